"""Any other architecture: the modules of transformers with PEFT's adapter and the attention of this backend."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging as transformers_logging

from retrain_local.decoder import Attend, Shape
from retrain_local.memory import sizes
from retrain_local.model.adapter import ADAPTER, PREFIX, adapter_config, file_names
from retrain_local.model.full import ReadsReference
from retrain_local.model.model_files import Folder, ModelFiles, refuse_recurrent
from retrain_local.model.pair import Lora, Pair, Placement, Publish
from retrain_local.model.probe import ATTENTION, KEYWORD, UnsupportedAttentionError, attention, measured, own_logits
from retrain_local.model.weights import Reader, UnfitWeightsError


class HfDecoder:
    """A causal language model of transformers as a `TrainedDecoder`.

    The model with its body cut out is the head, so that the architecture's own code does soft-capping and scaling.
    """

    shape: Shape
    is_ordered = False  # experts and other modules scatter
    head_parameters: tuple[nn.Parameter, ...] = ()

    def __init__(self, model: Any) -> None:
        self.device, self.dtype = model.device, model.dtype
        self._model = model
        body = model.get_decoder() if hasattr(model, "get_decoder") else None
        names = [name for name, module in model.named_modules() if name and module is body]
        path = names[0] if names else str(model.base_model_prefix)
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
        # transformers' own switch requires training mode and so enables dropout in some layers
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
        return self._body(**inputs, **{KEYWORD: attend}).last_hidden_state[0]

    def keep_reference(self) -> None:
        self._reference = [(copy.deepcopy(layer.lora_A), copy.deepcopy(layer.lora_B)) for layer in self._adapted()]

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        layers = self._adapted()
        trained = [(layer.lora_A, layer.lora_B) for layer in layers]
        try:
            for layer in layers:
                # PEFT's own switch also freezes the parameters.
                layer._disable_adapters = not self._reference
            for layer, (a, b) in zip(layers, self._reference, strict=False):
                layer.lora_A, layer.lora_B = a, b
            yield
        finally:
            for layer, (a, b) in zip(layers, trained, strict=True):
                layer.lora_A, layer.lora_B, layer._disable_adapters = a, b, False

    def _adapted(self) -> list[LoraLayer]:
        return [module for module in self._model.modules() if isinstance(module, LoraLayer)]

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden_MD[None], use_cache=False).logits[0]


def load_base(folder: Folder, place: Placement) -> Any:
    """Load the model of transformers, frozen and in evaluation mode; ConfigError for one that cannot be served."""
    if place.quantize != "none":
        what = f"quantize = {place.quantize!r} is not served for {folder.document['model_type']}"
        fix = 'set [model] quantize to "none", or name a model of the Llama family (llama, qwen2, qwen3, mistral)'
        raise folder.refused(code="model.not-quantisable", what=what, fix=fix)
    AttentionInterface.register(ATTENTION, attention)
    source, options = folder.source, {"trust_remote_code": folder.trust_remote_code}
    options["local_files_only"] = folder.source.offline
    config = AutoConfig.from_pretrained(source.path, **options)
    text = config.get_text_config()
    if not getattr(text, "num_attention_heads", None):
        what, fix = f"{config.model_type} has no attention layers", "use a model with attention layers only"
        raise folder.refused(code="model.recurrent-layers", what=what, fix=fix)
    refuse_recurrent({"model_type": config.model_type, "layer_types": getattr(text, "layer_types", None)}, folder.where)
    with quiet():
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
        what, fix = f"{type(model).__name__} has no language-model head", "name a causal language model"
        raise folder.refused(code="model.no-head", what=what, fix=fix)
    return model.requires_grad_(False).eval().to(place.trainer)


def measured_shape(trained: HfDecoder, base: Any, own: list[Tensor], parameters: int, folder: Folder) -> Shape:
    """Measure the sizes of `trained`; ConfigError unless its logits equal `own`, those with the model's attention."""
    text = base.config.get_text_config()
    context = getattr(text, "max_position_embeddings", None)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    try:
        return measured(trained, own, parameters=parameters, context=context, inner=inner)
    except UnsupportedAttentionError as error:
        what, fix = f"{type(base).__name__} cannot be trained here: {error}", "name a model of another architecture"
        raise folder.refused(code="model.other-attention", what=what, fix=fix) from None


def create_hf_pair(folder: Folder, lora: Lora, place: Placement) -> Pair:
    base = load_base(folder, place)
    own = own_logits(base, base.get_input_embeddings().num_embeddings)
    peft = attach(base, lora)
    parameters = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    total = sum(p.numel() for p in peft.parameters())
    trained = HfDecoder(peft.get_base_model())
    trained.shape = measured_shape(trained, base, own, total, folder)
    made = []
    for device in place.samplers:
        with folder.refusals(device):
            made.append(_create_sampler(peft, parameters, place, device))
    peft_config = peft.peft_config[ADAPTER]
    given: dict[str, Any] = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "base": lora.name,
        "rslora": lora.rslora,
        "dora": lora.dora,
    }
    fan_in_fan_out = bool(peft_config.fan_in_fan_out)
    written = adapter_config(peft_config.target_modules, fan_in_fan_out=fan_in_fan_out, **given)
    return _pair(folder, trained, made, parameters=parameters, total=total, adapter_config=written)


def _pair(folder: Folder, trained: HfDecoder, made: Sequence[tuple[Any, Publish]], **given: Any) -> Pair:
    """`made` are the modules of each sampler and the function that publishes to them."""
    samplers = [HfDecoder(model) for model, _ in made]
    for sampler in samplers:
        sampler.shape = trained.shape

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        for _, publish_one in made:
            publish_one(adapter)

    return Pair(trained=trained, samplers=tuple(samplers), eos_ids=folder.eos_ids(), publish=publish, **given)


class _Output(BaseModelOutput):  # type: ignore[misc]
    """Hidden states. Other fields that an architecture reads (router logits, cross attentions) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):  # type: ignore[misc]
    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


def _replaced(module: nn.Module, path: list[str], new: nn.Module) -> Any:
    """Return a copy of the module with the same tensors and another submodule at `path`."""
    found, child = copy.copy(module), module._modules[path[0]]
    assert child is not None
    found._modules = module._modules | {path[0]: _replaced(child, path[1:], new) if path[1:] else new}
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bar; the console reports loading."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def attach(base: Any, lora: Lora) -> PeftModel:
    """Add LoRA to every linear layer except the head, initialised from the seed; torch's random state is kept."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    device = next(base.parameters()).device
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
        # PEFT warns about weight layouts and versions; the user cannot act on either.
        warnings.simplefilter("ignore")
        torch.manual_seed(lora.seed)
        peft = get_peft_model(base, config)
    peft.eval()
    return peft


def _create_sampler(
    peft: PeftModel, trained: Mapping[str, nn.Parameter], place: Placement, device: torch.device
) -> tuple[Any, Publish]:
    """Create modules that share frozen tensors of the same device and dtype, and the function that publishes to them.

    Small fp32 models hold merged matrices W + scale B A, computed from W each time, so nothing drifts, to save three
    operations per layer and token. In bf16 merging would round the update away: others have copies of A and B.
    """
    layers = {name: m for name, m in peft.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    # expert layers have no such attribute
    matrices = [getattr(layer.get_base_layer(), "weight", None) for layer in layers.values()]
    is_plain = all(isinstance(w, Tensor) and w.dtype == torch.float32 for w in matrices)
    is_small = is_plain and sum(w.numel() for w in matrices if w is not None) <= sizes.MERGE_LIMIT
    model = _copy(peft.get_base_model(), place, device)
    has_magnitudes = any(layer.lora_magnitude_vector for layer in layers.values())
    if place.sampler_dtype == torch.float32 and is_small and not has_magnitudes:
        return model, _merging(model, layers, trained)
    return model, _copying(model, trained)


def _merging(model: nn.Module, layers: Mapping[str, LoraLayer], trained: Mapping[str, nn.Parameter]) -> Publish:
    pairs = []
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        plain = copy.copy(model.get_submodule(name).get_base_layer())
        frozen = plain.weight.detach()
        plain._parameters = plain._parameters | {"weight": nn.Parameter(frozen.clone(), requires_grad=False)}
        setattr(model.get_submodule(parent), child, plain)
        pairs.append((name, layer, frozen, plain.weight))

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        given = file_names(trained) if adapter is None else adapter
        with torch.no_grad():
            for name, layer, frozen, merged in pairs:
                a, b = (given[f"{PREFIX}{name}.lora_{kind}.weight"].to(frozen.device) for kind in "AB")
                delta = b @ a * layer.scaling[ADAPTER]
                torch.add(frozen, delta.T if layer.fan_in_fan_out else delta, out=merged)

    return publish


def _copying(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Publish:
    own = dict(model.named_parameters())
    copies = {name: own[name.removeprefix(PREFIX)] for name in trained}
    for p in copies.values():
        p.requires_grad_(False)
    targets = file_names(copies)

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        given = file_names(trained) if adapter is None else adapter
        with torch.no_grad():
            for name, mine in targets.items():
                mine.copy_(given[name])

    return publish


def _copy(model: nn.Module, place: Placement, device: torch.device) -> Any:
    """Return other modules around the same frozen tensors, or copies of them on another device or in another dtype."""
    memo: dict[int, Any] = {}
    for p in model.parameters():
        is_cast = p.dtype == place.trainer_dtype and not p.requires_grad
        there = p.detach().to(device, place.sampler_dtype if is_cast else p.dtype, copy=p.requires_grad)
        memo[id(p)] = p if there.data_ptr() == p.data_ptr() else nn.Parameter(there, requires_grad=False)
    for buffer in model.buffers():
        # rotary frequencies need their own dtype
        memo[id(buffer)] = buffer.to(device)
    return copy.deepcopy(model, memo)


class HfFullDecoder(ReadsReference, HfDecoder):
    # The reference takes no gradient, so recomputation need not reach it.
    attributes = ("_model", "_body", "_head")


def create_hf_full_pair(folder: Folder, place: Placement) -> Pair:
    """Create a pair that trains all weights of the model; ConfigError where that is not possible."""
    # transformers' modules multiply by the numbers they hold, so these are fp32: in bf16 they would lose updates
    _refuse(folder, place)
    base = load_base(folder, place)
    own = own_logits(base, base.get_input_embeddings().num_embeddings)
    total = sum(p.numel() for p in base.parameters())
    trained = HfFullDecoder(base)
    trained.shape = measured_shape(trained, base, own, total, folder)
    parameters, made = dict(base.named_parameters()), []
    for device in place.samplers:
        with folder.refusals(device):
            model = _copied(base, device, place.sampler_dtype)
        made.append((model, _copying(model, parameters)))
    base.requires_grad_(True)
    trained.head_parameters = _head_parameters(trained)

    def reference() -> HfDecoder:
        frozen = load_base(folder, place)
        frozen.set_attn_implementation(ATTENTION)
        return HfDecoder(frozen)

    trained.read_reference = reference
    _refuse_other_numbers(base, folder)
    with Reader(folder.weights(), torch.device("cpu"), torch.float32) as reader:
        stored = {reader.dtype(name) for name in reader.names()}
    written = stored.pop() if len(stored) == 1 else torch.float32
    dtypes = dict.fromkeys(parameters, written)
    files = ModelFiles(document=dict(folder.document), companions=folder.companions(), dtypes=dtypes)
    return _pair(folder, trained, made, parameters=parameters, total=total, adapter_config={}, files=files)


def _refuse(folder: Folder, place: Placement) -> None:
    kind = folder.document["model_type"]
    if place.trainer_dtype != torch.float32:
        what, fix = f"lora_rank = 0 trains {kind} in fp32 only", 'set [model] dtype = "fp32", or lora_rank to 32'
        why = "transformers' modules have no rounded copy of their weights to multiply by"
        raise folder.refused(code="model.fp32-only", what=what, why=why, fix=fix)
    if place.mesh is not None:
        what = f"parallel = 'fsdp' is not served for {kind}"
        fix = 'set [backend.options] parallel to "replicate", or name a model of the Llama family'
        raise folder.refused(code="model.not-shardable", what=what, fix=fix)


def _copied(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Any:
    memo: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(p.detach().to(device, dtype, copy=True), requires_grad=False)
    return copy.deepcopy(model, memo)


def _head_parameters(decoder: HfDecoder) -> tuple[nn.Parameter, ...]:
    """Return the weights that the logits of given hidden states depend on."""
    found = tuple(decoder._head.parameters())
    with torch.enable_grad():
        logits_1V = decoder.logits(torch.zeros(1, decoder.shape.hidden, device=decoder.device))
    gradients = torch.autograd.grad(logits_1V.sum(), found, allow_unused=True)
    return tuple(p for p, gradient in zip(found, gradients, strict=True) if gradient is not None)


def _refuse_other_numbers(model: nn.Module, folder: Folder) -> None:
    """Raise ConfigError if the model's files hold more than its weights: a checkpoint would lack it."""
    weights = {p.data_ptr() for p in model.parameters()}
    others = [name for name, tensor in model.state_dict().items() if tensor.data_ptr() not in weights]
    if others:
        what = f"lora_rank = 0 is not served for {folder.document['model_type']}"
        why = f"its files hold {len(others)} tensors that no gradient trains, first {others[0]}"
        fix = "set [model] lora_rank to 32"
        raise folder.refused(code="model.untrained-tensors", what=what, why=why, fix=fix)
