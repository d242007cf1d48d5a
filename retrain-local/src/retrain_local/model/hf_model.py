"""Architectures beyond the Llama family: transformers' modules with PEFT's adapter and this backend's attention."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from retrain.api import ConfigError, Problem
from retrain_local.memory import sizes
from retrain_local.memory.shape import TEXT_NAMES
from retrain_local.model import composite
from retrain_local.model.activations import measure_activations
from retrain_local.model.adapter import ADAPTER, PREFIX, Lora, adapter_config, file_names
from retrain_local.model.composite import Whole, text_config, whole_of
from retrain_local.model.experts import fit_experts
from retrain_local.model.full import ReadsReference
from retrain_local.model.hf_decoder import HfDecoder
from retrain_local.model.model_files import Folder, ModelFiles
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.plain import PlainDecoder
from retrain_local.model.probe import NotCausalError, Route, VaryingLogitsError, choose_route
from retrain_local.model.projection import Matrix, frozen_matrix, own_matrix
from retrain_local.model.targets import RESCALE, UnknownTargetError, is_product, set_targets
from retrain_local.model.weights import Reader, UnfitWeightsError

log = logging.getLogger("retrain")
Take = Callable[[Mapping[str, Tensor]], None]  # of published tensors, by their names in a file of the text model


def load_base(folder: Folder, place: Placement) -> tuple[Any, Whole | None]:
    """Load the model of transformers, frozen and in evaluation mode, and its place in a checkpoint of more than text.

    ConfigError for a model that cannot be served.
    """
    if place.quantize != "none":
        what = f"quantize = {place.quantize!r} is not served for {folder.document['model_type']}"
        fix = 'set [model] quantize to "none", or name a model of the Llama family (llama, qwen2, qwen3, mistral)'
        raise folder.refused(code="model.not-quantisable", what=what, fix=fix)
    options: dict[str, Any] = {"trust_remote_code": folder.trust_remote_code, "local_files_only": folder.source.offline}
    config = AutoConfig.from_pretrained(folder.source.path, **options)
    text = text_config(config)
    if hasattr(config, RESCALE):
        # RWKV would divide the weights of later layers in place when it reads: trained ones would be saved divided.
        config.rescaled_from, config.rescale_every = config.rescale_every, 0
    options |= {"dtype": place.trainer_dtype, "config": config if text is None else text}
    reads_whole, missing = composite.is_whole(config), list[str]()
    if not reads_whole:
        options |= {} if text is None else {"key_mapping": TEXT_NAMES}
        model, missing = _read(AutoModelForCausalLM, folder, options)
        if text is not None and missing == ["lm_head.weight"]:
            # The whole ties its head to the embedding, and its text configuration does not say so.
            text.tie_word_embeddings = True
            model, missing = _read(AutoModelForCausalLM, folder, options)
    if reads_whole or (missing and composite.has_whole(config)):
        # The files may have names that only the class of the whole converts.
        model, missing = _read(composite.whole_class(config), folder, options | {"key_mapping": None, "config": config})
        model = composite.without_towers(model)
    if missing:
        raise UnfitWeightsError.missing(missing)
    if model.get_output_embeddings() is None:
        what, fix = f"{type(model).__name__} has no language-model head", "name a causal language model"
        raise folder.refused(code="model.no-head", what=what, fix=fix)
    fit_experts(model)
    _fix_angles(model)
    whole = None if text is None and not reads_whole else whole_of(config, model)
    return model.requires_grad_(False).eval().to(place.trainer), whole


def _fix_angles(model: nn.Module) -> None:
    """Leave out the question whether a row exceeds the context: none does, and on a GPU the answer is waited for."""
    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.forward = MethodType(inspect.unwrap(type(module).forward), module)


def _read(made: Any, folder: Folder, options: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Return the model of this class, and the weights that its files lack."""
    given = {"use_safetensors": True, "output_loading_info": True, "attn_implementation": "eager"}
    with quiet():
        model, report = made.from_pretrained(folder.source.path, **given, **options)
    return model, sorted(report["missing_keys"])


def route_of(base: Any, folder: Folder) -> Route:
    """Choose the tier of the loaded model, and log the reason against a faster one."""
    try:
        route = choose_route(base)
    except NotCausalError:
        what = f"{type(base).__name__} is not a causal language model: a token's logits change with later tokens"
        raise folder.refused(code="model.not-causal", what=what, fix="name a causal language model") from None
    except VaryingLogitsError:
        what = f"{type(base).__name__} gives a row other logits when it reads the row again"
        fix = "name a model whose forward pass is deterministic in evaluation mode"
        raise folder.refused(code="model.varying-logits", what=what, fix=fix) from None
    if route.why:
        how = "its own cache" if route.cache else "no cache, so every token reads its row again"
        log.info("Tier plain for %s (%s): the model's own forward pass, with %s.", folder.name, route.why, how)
    elif route.mixers:
        count = route.shape.layers if route.mixers.is_body else len(route.mixers.layers)
        size = route.shape.row_bytes / 2**10
        told = "Tier paged for %s: %d layers keep a state of %.0f KiB a row."
        if base.dtype == torch.bfloat16:
            # Measured on random models of 20 to 50 M parameters: docs/pages/models.md.
            told += " In bf16 a mean log-probability gap of 0.004 is rounding."
        log.info(told, folder.name, count, size)
    if any(name.endswith("experts") for name, _ in base.named_modules()):
        unable = ("replayed" if not route.routers.can_replay else "") if route.routers else "measured or replayed"
        if unable:
            log.info("The experts of %s are not %s: its routers are of another kind.", folder.name, unable)
    return route


def create_hf_pair(folder: Folder, lora: Lora, place: Placement) -> Pair:
    base, whole = load_base(folder, place)
    route = route_of(base, folder)
    try:
        peft = attach(base, lora, route.mixing)
    except UnknownTargetError as error:
        known = sorted({name.rpartition(".")[2] for name, module in base.named_modules() if hasattr(module, "weight")})
        what, fix = f"no layer is named {str(error)!r}", f"known: all-linear, attention, experts, {', '.join(known)}"
        raise ConfigError(Problem(code="model.unknown-target", where="[lora] targets", what=what, fix=fix)) from None
    parameters = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    trained = route.decoder(peft.get_base_model())
    made = []
    for device in place.samplers:
        with folder.refusals(device):
            made.append(_create_sampler(peft, parameters, place, device))
    peft_config = peft.peft_config[ADAPTER]
    names = {name: name for name in parameters}
    targets: Collection[str] = peft_config.target_modules
    if whole is not None:
        names = {name: PREFIX + whole.name(name.removeprefix(PREFIX)) for name in parameters}
        # The short names would match layers of the other towers too.
        targets = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in names.values()}
    written = adapter_config(targets, lora, fan_in_fan_out=bool(peft_config.fan_in_fan_out))
    beside = {name: getattr(peft_config, name, None) for name in BESIDE_MODULES}
    written |= {k: sorted(v) if isinstance(v, (set, list, tuple)) else v for k, v in beside.items() if v}
    model = peft.get_base_model()
    return _pair(folder, route, trained, model, made, names, parameters=parameters, adapter_config=written)


# Keys of PEFT's configuration that an adapter of fused experts needs in addition to modules.
BESIDE_MODULES = ("target_parameters", "rank_pattern", "alpha_pattern")


def _pair(
    folder: Folder,
    route: Route,
    trained: HfDecoder,
    model: nn.Module,
    made: Sequence[tuple[Any, Take]],
    names: Mapping[str, str],
    *,
    parameters: Mapping[str, nn.Parameter],
    **given: Any,
) -> Pair:
    """Create the pair; `made` are the modules of each sampler and the function that gives them published tensors.

    `names` maps parameters to their names in files. The two differ if the modules are part of a whole.
    """
    total = sum(p.numel() for p in model.parameters())
    measured = cache(partial(measure_activations, trained, model, trained.shape.token_elements))
    trained.shape = replace(trained.shape, parameters=total, activations=measured)
    trained.head_parameters = _head_parameters(trained)
    samplers = [route.decoder(sampled) for sampled, _ in made]
    for sampler in samplers:
        sampler.shape = trained.shape

    in_files = {names[name]: p for name, p in parameters.items()}
    modules = {id(p): name for name, p in file_names(parameters).items()}
    own = {name: modules[id(p)] for name, p in file_names(in_files).items()}

    def publish(adapter: Mapping[str, Tensor] | None = None) -> None:
        values = file_names(parameters) if adapter is None else {own[name]: x for name, x in adapter.items()}
        for _, take in made:
            take(values)

    given |= {"parameters": in_files, "total": total, "eos_ids": folder.eos_ids()}
    if route.first_position:  # the padding id has no position, so no text continues after it
        given["eos_ids"] |= {route.first_position - 1}
    return Pair(trained=trained, samplers=tuple(samplers), publish=publish, **given)


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


def attach(base: Any, lora: Lora, attention: Collection[str]) -> PeftModel:
    """Add LoRA to the layers of `lora.targets`, initialised from the seed; torch's random state is kept."""
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    set_targets(base, config, lora.targets, attention)
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
    peft: PeftModel, trained: Iterable[str], place: Placement, device: torch.device
) -> tuple[Any, Take]:
    """Create modules that share frozen tensors of the same device and dtype, and the function that updates the others.

    Small fp32 models hold merged matrices W + scale B A, computed from W each time, so nothing drifts, to save three
    operations per layer and token. In bf16 merging would round the update away: others have copies of A and B.
    """
    layers = {name: m for name, m in peft.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    bases = [layer.get_base_layer() for layer in layers.values()]
    is_plain = all(is_product(base) and base.weight.dtype == torch.float32 for base in bases)
    is_small = is_plain and sum(base.weight.numel() for base in bases) <= sizes.MERGE_LIMIT
    model = _copy(peft.get_base_model(), place, device)
    has_magnitudes = any(layer.lora_magnitude_vector for layer in layers.values())
    if place.sampler_dtype == torch.float32 and is_small and not has_magnitudes:
        return model, _merging(model, layers)
    return model, _copying(model, trained)


class _Product(nn.Module):  # type: ignore[misc]
    """A linear layer of the sampler: x W^T + bias with the W of `matrix`; `weight` is the frozen one."""

    def __init__(self, layer: Any, matrix: Matrix) -> None:
        super().__init__()
        self.matrix, self.weight, self.bias = matrix, layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.matrix.linear(x, self.bias)


def _merging(model: Any, layers: Mapping[str, LoraLayer]) -> Take:
    head, merged = model.get_output_embeddings(), []
    for name, module in list(model.named_modules()):
        if name in layers:
            base, layer = module.get_base_layer(), layers[name]
            frozen_OI = base.weight.T if layer.fan_in_fan_out else base.weight
            product = _Product(base, own_matrix(frozen_OI))
            merged.append((f"{PREFIX}{name}.lora_", layer.scaling[ADAPTER], frozen_OI, product.matrix))
        elif module is head and type(head) is nn.Linear:
            product = _Product(head, frozen_matrix(head.weight))
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, product)

    def take(given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for place, scale, frozen_OI, matrix in merged:
                a, b = (given[f"{place}{kind}.weight"].to(frozen_OI.device) for kind in "AB")
                matrix.take(torch.addmm(frozen_OI, b, a, alpha=scale))

    return take


def _copying(model: nn.Module, trained: Iterable[str]) -> Take:
    own = dict(model.named_parameters())
    copies = {name: own[name.removeprefix(PREFIX)] for name in trained}
    for p in copies.values():
        p.requires_grad_(False)
    targets = file_names(copies)

    def take(given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, mine in targets.items():
                mine.copy_(given[name])

    return take


def _copy(model: nn.Module, place: Placement, device: torch.device, *, shares: bool = True) -> Any:
    """Return other modules around the same frozen tensors, or copies of them on another device or in another dtype.

    Unless it `shares` them, all are copied.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        is_cast = p.dtype == place.trainer_dtype and not p.requires_grad
        copies = p.requires_grad or not shares
        there = p.detach().to(device, place.sampler_dtype if is_cast else p.dtype, copy=copies)
        memo[id(p)] = p if there.data_ptr() == p.data_ptr() else nn.Parameter(there, requires_grad=False)
    for buffer in model.buffers():
        # rotary frequencies need their own dtype
        memo[id(buffer)] = buffer.to(device, copy=not shares)
    return copy.deepcopy(model, memo)


# The reference takes no gradient, so recomputation need not reach it.
WITH_REFERENCE = ("_model", "_body", "_head")


class HfFullDecoder(ReadsReference, HfDecoder):
    attributes = WITH_REFERENCE


class PlainFullDecoder(ReadsReference, PlainDecoder):
    attributes = WITH_REFERENCE


def create_hf_full_pair(folder: Folder, place: Placement) -> Pair:
    """Create a pair that trains all weights of the model; ConfigError where that is not possible."""
    # transformers multiplies by the trained weights themselves, so they are fp32: bf16 would lose small updates
    _refuse(folder, place)
    base, whole = load_base(folder, place)
    route = route_of(base, folder)
    trained = route.decoder(base, HfFullDecoder, PlainFullDecoder)
    parameters, made = dict(base.named_parameters()), []
    for device in place.samplers:
        with folder.refusals(device):
            model = _copy(base, place, device, shares=False)
        made.append((model, _copying(model, parameters)))
    base.requires_grad_(True)

    def reference() -> object:
        frozen, _ = load_base(folder, place)
        return route.decoder(frozen)

    trained.read_reference = reference
    with Reader(folder.weights(), torch.device("cpu"), torch.float32) as reader:
        stored, in_files = {reader.dtype(name) for name in reader.names()}, reader.names()
    written = stored.pop() if len(stored) == 1 else torch.float32
    names = {name: name for name in parameters} if whole is None else whole.stored(parameters, in_files)
    dtypes = dict.fromkeys(names.values(), written)
    weights = {p.data_ptr() for p in base.parameters()}
    # Numbers of the files that no gradient trains: a bias that balances experts, a normalisation's running mean.
    fixed = {name: tensor for name, tensor in base.state_dict().items() if tensor.data_ptr() not in weights}
    files = ModelFiles(
        document=dict(folder.document),
        companions=folder.companions(),
        dtypes=dtypes,
        fixed=fixed if whole is None else {whole.name(name): tensor for name, tensor in fixed.items()},
        source=folder.weights(),
        others=composite.others(in_files, names.values()) if whole is not None else (),
    )
    given = {"adapter_config": {}, "files": files}
    return _pair(folder, route, trained, base, made, names, parameters=parameters, **given)


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


def _head_parameters(decoder: HfDecoder) -> tuple[nn.Parameter, ...]:
    """Return the trained weights that the logits of given hidden states depend on."""
    found = tuple(p for p in decoder._head.parameters() if p.requires_grad)
    if not found:
        return ()
    with torch.enable_grad():
        logits_1V = decoder.logits(torch.zeros(1, decoder.shape.hidden, device=decoder.device))
    gradients = torch.autograd.grad(logits_1V.sum(), found, allow_unused=True)
    return tuple(p for p, gradient in zip(found, gradients, strict=True) if gradient is not None)
