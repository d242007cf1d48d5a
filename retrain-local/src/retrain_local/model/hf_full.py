"""Training all weights of any other architecture: the modules of transformers themselves, in fp32."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from retrain.api import ConfigError, Problem
from retrain_local.model.full import computing_with
from retrain_local.model.hf_model import HfDecoder, load_base, measured_shape
from retrain_local.model.model_files import Folder, ModelFiles
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.probe import ATTENTION, own_logits
from retrain_local.model.weights import Reader

PARTS = ("_model", "_body", "_head")  # what an `HfDecoder` computes with


class HfFullDecoder(HfDecoder):
    """A model of transformers that is trained as a whole; its reference is read when first asked for."""

    read_reference: Callable[[], HfDecoder]
    _whole_reference: HfDecoder | None = None

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """See `TrainedDecoder`; recomputation, which changes modules in place, does not reach them: no gradient."""
        self._whole_reference = self._whole_reference or self.read_reference()
        with computing_with(self._whole_reference, self, PARTS):
            yield


def create_hf_full_pair(folder: Folder, place: Placement) -> Pair:
    """A pair whose trained weights are all those of the model; ConfigError where they cannot be trained as they are.

    Modules of transformers multiply by the numbers they hold, so these are fp32: rounded to bf16 they would lose
    updates.
    """
    kind = folder.document["model_type"]
    if place.trainer_dtype != torch.float32:
        what, fix = f"lora_rank = 0 trains {kind} in fp32 only", 'set [model] dtype = "fp32", or lora_rank to 32'
        why = "transformers' modules have no rounded copy of their weights to multiply by"
        raise ConfigError(Problem(where=folder.where, what=what, why=why, fix=fix))
    if place.mesh is not None:
        what = f"parallel = 'fsdp' is not served for {kind}"
        fix = 'set [backend.options] parallel to "replicate", or name a model of the Llama family'
        raise ConfigError(Problem(where=folder.where, what=what, fix=fix))
    base = load_base(folder, place)
    own = own_logits(base, base.get_input_embeddings().num_embeddings)
    total = sum(p.numel() for p in base.parameters())
    trained = HfFullDecoder(base)
    trained.shape = measured_shape(trained, base, own, total, folder)
    samplers: list[Any] = []
    for device in place.samplers:
        with folder.refusals(device):
            samplers.append(_copied(base, device, place.sampler_dtype))
    base.requires_grad_(True)
    trained.head_parameters = _head_parameters(trained)

    def reference() -> HfDecoder:
        frozen = load_base(folder, place)
        frozen.set_attn_implementation(ATTENTION)
        return HfDecoder(frozen)

    trained.read_reference = reference
    parameters = dict(base.named_parameters())
    _refuse_other_numbers(base, folder)
    decoders = [HfDecoder(model) for model in samplers]
    for decoder in decoders:
        decoder.shape = trained.shape

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        given = parameters if adapter is None else adapter
        with torch.no_grad():
            for model in samplers:
                for name, mine in model.named_parameters():
                    mine.copy_(given[name])

    return Pair(
        trained=trained,
        samplers=tuple(decoders),
        parameters=parameters,
        total=total,
        eos_ids=folder.eos_ids(),
        adapter_config={},
        publish=publish,
        files=_files(folder, parameters),
    )


def _copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    """Other modules with copies of all weights; buffers keep their dtype, which rotary frequencies need."""
    memo: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to(device, dtype, copy=True), requires_grad=False)
    return copy.deepcopy(model, memo)


def _head_parameters(decoder: HfDecoder) -> tuple[nn.Parameter, ...]:
    """Weights that the logits of given hidden states depend on."""
    found = tuple(decoder._head.parameters())
    with torch.enable_grad():
        logits_1V = decoder.logits(torch.zeros(1, decoder.shape.hidden, device=decoder.device))
    gradients = torch.autograd.grad(logits_1V.sum(), found, allow_unused=True)
    return tuple(p for p, gradient in zip(found, gradients, strict=True) if gradient is not None)


def _refuse_other_numbers(model: nn.Module, folder: Folder) -> None:
    """ConfigError for a model whose files hold more than its weights: a checkpoint would lack it."""
    weights = {p.data_ptr() for p in model.parameters()}
    others = [name for name, tensor in model.state_dict().items() if tensor.data_ptr() not in weights]
    if others:
        what = f"lora_rank = 0 is not served for {folder.document['model_type']}"
        why = f"its files hold {len(others)} tensors that no gradient trains, first {others[0]}"
        raise ConfigError(Problem(where=folder.where, what=what, why=why, fix="set [model] lora_rank to 32"))


def _files(folder: Folder, parameters: Mapping[str, Tensor]) -> ModelFiles:
    """Written in the dtype of the model's files where they have one, else in fp32."""
    with Reader(folder.weights(), torch.device("cpu"), torch.float32) as reader:
        stored = {reader.dtype(name) for name in reader.names()}
    dtype = stored.pop() if len(stored) == 1 else torch.float32
    return ModelFiles(
        document=dict(folder.document), companions=folder.companions(), dtypes=dict.fromkeys(parameters, dtype)
    )
