"""Any other architecture: the modules of transformers with PEFT's adapter and our attention."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging

from retrain.api import ConfigError, Problem
from retrain_local.decoder import Attend, Shape
from retrain_local.model.adapter import ADAPTER, adapter_config
from retrain_local.model.model_files import Folder, refuse_recurrent
from retrain_local.model.pair import Lora, Pair, Placement, Publish
from retrain_local.model.peft_layers import attach, create_sampler, trainable
from retrain_local.model.probe import KEYWORD, UnsupportedAttentionError, measured, own_logits, register
from retrain_local.model.weights import UnfitWeightsError


class HfDecoder:
    """A causal language model of transformers; see `TrainedDecoder`.

    Its body is called on one packed row without cache or mask; the model with its body cut out is the head, so that
    whatever the architecture does behind it (soft-capping, scaling) is done by its own code.
    """

    shape: Shape
    is_ordered = False  # experts and others scatter
    head_parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, model: Any) -> None:
        self.device, self.dtype = model.device, model.dtype
        self._model = model
        path = _body_path(model)
        self._body = model.get_submodule(path)
        self._head = _replaced(model, path.split("."), _Given())
        self._recompute = False
        self._reference: list[tuple[nn.ModuleDict, nn.ModuleDict]] = []

    @property
    def recompute(self) -> bool:
        return self._recompute

    @recompute.setter
    def recompute(self, value: bool) -> None:
        if value == self._recompute:
            return
        self._recompute = value
        # by hand: the switch of transformers requires training mode, which enables dropout in some layers
        for module in self._model.modules():
            if not isinstance(module, GradientCheckpointingLayer):
                continue
            if value:
                again = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)
                module.__dict__["forward"] = again
            else:
                del module.__dict__["forward"]

    def hidden(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        inputs = {"input_ids": ids_N[None], "position_ids": positions_N[None], "use_cache": False}
        hidden_ND: Tensor = self._body(**inputs, **{KEYWORD: attend}).last_hidden_state[0]
        return hidden_ND

    def keep_reference(self) -> None:
        self._reference = [(copy.deepcopy(layer.lora_A), copy.deepcopy(layer.lora_B)) for layer in self._adapted()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        layers = self._adapted()
        trained = [(layer.lora_A, layer.lora_B) for layer in layers]
        try:
            for layer in layers:
                layer._disable_adapters = not self._reference  # PEFT's own switch also freezes the parameters
            for layer, (a, b) in zip(layers, self._reference, strict=False):
                layer.lora_A, layer.lora_B = a, b
            yield
        finally:
            for layer, (a, b) in zip(layers, trained, strict=True):
                layer.lora_A, layer.lora_B, layer._disable_adapters = a, b, False

    def _adapted(self) -> list[LoraLayer]:
        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def logits(self, hidden_MD: Tensor) -> Tensor:
        logits_MV: Tensor = self._head(inputs_embeds=hidden_MD[None], use_cache=False).logits[0]
        return logits_MV


def load_base(folder: Folder, place: Placement) -> Any:
    """The model of transformers, frozen; ConfigError for what its modules cannot do."""
    if place.quantize != "none":
        what = f"quantize = {place.quantize!r} is not served for {folder.document['model_type']}"
        fix = 'set [model] quantize to "none", or name a model of the Llama family (llama, qwen2, qwen3, mistral)'
        raise ConfigError(Problem(where=folder.where, what=what, fix=fix))
    register()
    with quiet():
        return _load(folder, place)


def measured_shape(trained: HfDecoder, base: Any, own: list[Tensor], parameters: int, folder: Folder) -> Shape:
    """See `measured`; `own` are the logits of `base` with its own attention. ConfigError where ours cannot serve it."""
    text = base.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    try:
        return measured(trained, own, parameters=parameters, context=context, inner=inner)
    except UnsupportedAttentionError as error:
        what, fix = f"{type(base).__name__} cannot be trained here: {error}", "name a model of another architecture"
        raise ConfigError(Problem(where=folder.where, what=what, fix=fix)) from None


def create_hf_pair(folder: Folder, lora: Lora, place: Placement) -> Pair:
    base = load_base(folder, place)
    own = own_logits(base, base.get_input_embeddings().num_embeddings)
    peft = attach(base, lora)
    parameters, total = trainable(peft), sum(p.numel() for p in peft.parameters())
    trained = HfDecoder(peft.get_base_model())
    trained.shape = measured_shape(trained, base, own, total, folder)
    samplers: list[HfDecoder] = []
    published: list[Publish] = []
    for device in place.samplers:
        with folder.refusals(device):
            model, publish = create_sampler(peft, place, device)
        samplers.append(HfDecoder(model))
        samplers[-1].shape = trained.shape
        published.append(publish)

    def publish_to_all(adapter: Mapping[str, Tensor] | None = None) -> None:
        for publish in published:
            publish(adapter)

    peft_config = peft.peft_config[ADAPTER]
    written = adapter_config(
        peft_config.target_modules,
        rank=lora.rank,
        alpha=lora.alpha,
        base=lora.name,
        fan_in_fan_out=bool(peft_config.fan_in_fan_out),
        rslora=lora.rslora,
        dora=lora.dora,
    )
    return Pair(
        trained=trained,
        samplers=tuple(samplers),
        parameters=parameters,
        total=total,
        eos_ids=folder.eos_ids(),
        adapter_config=written,
        publish=publish_to_all,
    )


def _load(folder: Folder, place: Placement) -> Any:
    """The causal language model on its device, frozen, in evaluation mode."""
    source, options = folder.source, {"trust_remote_code": folder.trust_remote_code}
    options["local_files_only"] = folder.source.offline
    config = AutoConfig.from_pretrained(source.path, **options)
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        what = f"{config.model_type} has no attention layers"
        raise ConfigError(Problem(where=folder.where, what=what, fix="use a model with attention layers only"))
    refuse_recurrent({"model_type": config.model_type, "layer_types": getattr(text, "layer_types", None)}, folder.where)
    model, report = AutoModelForCausalLM.from_pretrained(
        source.path,
        config=config,
        dtype=place.trainer_dtype,
        use_safetensors=True,
        output_loading_info=True,
        attn_implementation="eager",
        **options,
    )
    if report["missing_keys"]:
        raise UnfitWeightsError.missing(sorted(report["missing_keys"]))
    if model.get_output_embeddings() is None:
        what = f"{type(model).__name__} has no language-model head"
        raise ConfigError(Problem(where=folder.where, what=what, fix="name a causal language model"))
    return model.requires_grad_(False).eval().to(place.trainer)


class _Output(BaseModelOutput):  # type: ignore[misc]
    """Hidden states; other fields that an architecture reads (router logits, cross attentions) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):  # type: ignore[misc]
    """Replaces the body of a model and returns hidden states computed before."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _body_path(model: Any) -> str:
    """Name of the module between embedding and head."""
    body = model.get_decoder() if hasattr(model, "get_decoder") else None
    names = [name for name, module in model.named_modules() if name and module is body]
    return names[0] if names else str(model.base_model_prefix)


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> Any:
    """A copy of the module with the same tensors and another submodule at `path`."""
    found, child = copy.copy(module), module._modules[path[0]]
    assert child is not None
    found._modules = module._modules | {path[0]: _replaced(child, path[1:], new) if path[1:] else new}
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bar of reading weights: the console reports loading itself."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
