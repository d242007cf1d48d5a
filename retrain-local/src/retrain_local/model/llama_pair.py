"""The decoder pair of a Llama-family model: trainer and samplers over one set of frozen tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from retrain_local.model import projection
from retrain_local.model.adapter import adapter_config, create_adapters
from retrain_local.model.architecture import Architecture
from retrain_local.model.llama import LlamaDecoder
from retrain_local.model.model_files import Folder
from retrain_local.model.pair import Lora, Pair, Placement
from retrain_local.model.prepacked import frozen_matrix
from retrain_local.model.projection import Sampled, SampledLowRank, SampledMerged
from retrain_local.model.qlora import QuantisedLinear, quantiser
from retrain_local.model.stacked import SampledStacked
from retrain_local.model.weights import Linear, Reader, Weights, matrices, read_weights


def create_llama_pair(folder: Folder, architecture: Architecture, lora: Lora, place: Placement) -> Pair:
    """The pair for a Llama-family model, see `create_pair`; imports neither transformers nor PEFT."""
    pack = quantiser(place.quantize)
    spare_rows = lora.rank if place.is_stacked and pack is None else 0
    device, dtype = place.trainer, place.trainer_dtype
    with Reader(folder.weights(), device, dtype, spare_rows=spare_rows, progress=place.progress) as reader:
        weights = read_weights(reader, architecture, pack=pack)
    adapters = create_adapters(_linears(weights), rank=lora.rank, alpha=lora.alpha, seed=lora.seed, rslora=lora.rslora)
    parameters = {name: p for adapter in adapters for name, p in adapter.named().items()}
    total = weights.count + sum(p.numel() for p in parameters.values())
    targets = (name.rpartition(".")[2] for name in matrices(architecture))
    is_light = sum(linear.weight.numel() for linear in _linears(weights)) <= projection.MERGE_LIMIT
    is_merged = is_light and weights.embedding.dtype == torch.float32 and pack is None
    kind = projection.TrainedMerged if is_merged else projection.TrainedLowRank
    head = frozen_matrix(weights.head, may_copy=is_light)
    products = [kind(adapter) for adapter in adapters]
    trained = LlamaDecoder(architecture, weights, products, head=head, parameters=total)
    trained.fuse()
    samplers: list[LlamaDecoder] = []
    published: list[list[Sampled]] = []
    for device in place.samplers:
        with folder.refusals(device):
            theirs = weights.mapped(partial(Tensor.to, device=device, dtype=place.sampler_dtype))
            may_copy = is_light or theirs.embedding is not weights.embedding
            there = (linear.to(device, place.sampler_dtype) for linear in _linears(weights))
            how = {"is_merged": is_merged, "is_light": is_light, "may_copy": may_copy}
            published.append([_sampled(linear, lora.rank, **how) for linear in there])
            their_head = head if theirs.head is weights.head else frozen_matrix(theirs.head, may_copy=may_copy)
            samplers.append(LlamaDecoder(architecture, theirs, published[-1], head=their_head, parameters=total))
            samplers[-1].fuse()

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        with torch.no_grad():
            for number, given in enumerate(adapters):
                values = given if adapter is None else given.holding(adapter)
                for sampled in published:
                    sampled[number].take(values)

    return Pair(
        trained=trained,
        samplers=tuple(samplers),
        parameters=parameters,
        total=total,
        eos_ids=folder.eos_ids(),
        adapter_config=adapter_config(targets, rank=lora.rank, alpha=lora.alpha, base=lora.name, rslora=lora.rslora),
        publish=publish,
    )


def _sampled(linear: Linear, rank: int, *, is_merged: bool, is_light: bool, may_copy: bool) -> Sampled:
    if isinstance(linear, QuantisedLinear):
        return SampledLowRank(linear, rank, expands=not is_light)
    if is_merged and linear.weight.dtype == torch.float32:
        return SampledMerged(linear)
    if linear.stacked is not None:
        return SampledStacked(linear, linear.stacked, rank)
    return SampledLowRank(linear, rank, may_copy=may_copy)


def _linears(weights: Weights) -> list[Linear]:
    return [linear for layer in weights.layers for linear in layer.linears]
