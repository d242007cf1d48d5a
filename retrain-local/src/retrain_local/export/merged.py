"""The weights of a model with its adapter merged in, one tensor at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from retrain.api import ConfigError, PhaseProgress, Problem
from retrain_local.model.adapter import PREFIX
from retrain_local.model.architecture import read_architecture
from retrain_local.model.checkpoint import ADAPTER_FILE, CONFIG_FILE
from retrain_local.model.model_files import MASTER_FILE, Folder
from retrain_local.model.qlora import quantiser, silence_advice
from retrain_local.model.weights import Reader, read_weights

# These initialisations subtract the initial factors from the base, so the base on disk is not the trained one.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
# Beyond factors of single linear layers, so merged by PEFT.
BEYOND_FACTORS = (
    *("modules_to_save", "target_parameters", "alpha_pattern", "layer_replication", "lora_bias", "use_bdlora"),
    *("trainable_token_indices", "alora_invocation_tokens"),
)
COMPLETE = "give a complete adapter folder, as PEFT writes it"
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """The change of one matrix W to W + scale B A; with DoRA its rows get the norms `magnitude_O`."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None
    transposed: bool  # W is stored [inputs, outputs]

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.b_OR.shape[0], self.a_RI.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    @property
    def is_zero(self) -> bool:
        """True if B is zero, as before any training."""
        return not torch.any(self.b_OR).item()

    def merged(self, stored: Tensor) -> Tensor:
        frozen_OI = stored.float().T if self.transposed else stored.float()
        sum_OI = torch.addmm(frozen_OI, self.b_OR.float(), self.a_RI.float(), alpha=self.scale)
        if self.magnitude_O is not None:
            norm_O = torch.linalg.vector_norm(sum_OI, dim=1)
            sum_OI *= (self.magnitude_O.float() / norm_O)[:, None]
        return sum_OI.T.contiguous() if self.transposed else sum_OI


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterFile:
    """An adapter's configuration and its changes by module; `deltas` is None where only PEFT can merge it."""

    folder: Path
    document: Mapping[str, Any]
    deltas: Mapping[str, Delta] | None
    is_fp32: bool  # some of its numbers are

    @property
    def is_zero(self) -> bool:
        """True if the adapter changes nothing; a magnitude counts as a change."""
        changes = self.deltas.values() if self.deltas is not None else ()
        return bool(changes) and all(delta.is_zero and delta.magnitude_O is None for delta in changes)


def read_adapter_file(folder: Path) -> AdapterFile:
    try:
        document = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        kind, init = document["peft_type"], document.get("init_lora_weights")
        if kind == "LORA":
            float(document["lora_alpha"])
        tensors = load_file(folder / ADAPTER_FILE)
    except UNREADABLE as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        raise refusal(folder, code="export.adapter-unreadable", what=what, fix=COMPLETE) from error
    if kind != "LORA":
        what, fix = f"peft_type is {kind!r}", "merge it with PEFT: only LORA adapters are merged here"
        raise refusal(folder, code="export.adapter-kind", what=what, fix=fix)
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        what, why = f"init_lora_weights is {init!r}", "it was trained on a changed base, not on the base that it names"
        fix = "convert it first: save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        raise refusal(folder, code="export.changed-base", what=what, fix=fix, why=why)
    odd = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
    if odd is not None:
        what, fix = f"{odd} holds a number that is not finite", "use an earlier checkpoint"
        raise refusal(folder, code="export.adapter-non-finite", what=what, fix=fix)
    is_fp32 = any(tensor.dtype == torch.float32 for tensor in tensors.values())
    return AdapterFile(folder=folder, document=document, deltas=_deltas(folder, document, tensors), is_fp32=is_fp32)


def _deltas(folder: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Delta] | None:
    """Return changes by module; None where the file or its configuration goes beyond factors of linear layers."""
    if any(document.get(name) for name in BEYOND_FACTORS) or document.get("bias", "none") != "none":
        return None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() > 2:
            return None
        parts.setdefault(match["module"].removeprefix(PREFIX), {})[match["part"].partition(".")[0]] = tensor
    if not parts:
        raise refusal(folder, code="export.adapter-unreadable", what="holds no LoRA factors", fix=COMPLETE)
    deltas = {}
    for module, found in parts.items():
        a, b = found.get("lora_A"), found.get("lora_B")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or not 0 < a.shape[0] == b.shape[1]:
            what = f"A and B of {module} do not fit together"
            raise refusal(folder, code="export.adapter-unreadable", what=what, fix=COMPLETE)
        alpha, rank = float(document["lora_alpha"]), a.shape[0]
        deltas[module] = Delta(
            a_RI=a,
            b_OR=b,
            scale=alpha / (math.sqrt(rank) if document.get("use_rslora") else rank),
            magnitude_O=found.get("lora_magnitude_vector"),
            transposed=bool(document.get("fan_in_fan_out")),
        )
    return deltas


def refusal(where: Path | str, *, code: str, what: str, fix: str, why: str = "") -> ConfigError:
    return ConfigError(Problem(code=code, where=str(where), what=what, why=why, fix=fix))


CPU = torch.device("cpu")
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedWeights:
    """Tensors of a base, some changed by `deltas`; `replaced` are those that the run had quantised, or not rounded."""

    reader: Reader
    deltas: Mapping[str, Delta]
    replaced: Mapping[str, Callable[[], Tensor]]

    def names(self) -> list[str]:
        return self.reader.names()

    def dtype(self) -> torch.dtype:
        sizes: dict[torch.dtype, int] = {}
        for name in self.names():
            dtype = self.reader.dtype(name)
            sizes[dtype] = sizes.get(dtype, 0) + self.count(name)
        return max(sizes, key=lambda dtype: sizes[dtype])

    def count(self, name: str) -> int:
        return math.prod(int(size) for size in self.reader.shape(name))

    def num_bytes(self, name: str, dtype: torch.dtype) -> int:
        stored = self.reader.dtype(name)
        size: int = (dtype if stored.is_floating_point else stored).itemsize
        return self.count(name) * size

    def base(self, name: str) -> Tensor:
        if name in self.replaced:
            return self.replaced[name]()
        return self.reader.read(name, torch.empty(self.reader.shape(name), dtype=torch.float32))

    def tensor(self, name: str) -> Tensor:
        """Return the merged tensor in fp32; integers are not weights and stay unchanged."""
        stored = self.reader.dtype(name)
        if not stored.is_floating_point:
            return self.reader.read(name, torch.empty(self.reader.shape(name), dtype=stored))
        base = self.base(name)
        return self.deltas[name].merged(base) if name in self.deltas else base


@contextmanager
def open_merged(
    folder: Folder,
    adapter: AdapterFile | None,
    *,
    quantize: str,
    dtype: torch.dtype,
    progress: PhaseProgress | None = None,
) -> Iterator[MergedWeights]:
    """Yield the merged weights; the run quantised in `dtype`. ConfigError for an adapter of another base."""
    path = folder.weights()
    if folder.document.get("quantization_config"):
        what, why = f"the base {folder.name} is stored quantised", "its tensors are not the numbers of its matrices"
        fix = "name the unquantised model of the same weights as base"
        raise refusal(folder.where, code="export.base-quantised", what=what, why=why, fix=fix)
    with Reader(path, CPU, torch.float32, progress=progress) as reader:
        deltas = {} if adapter is None else _located(reader, adapter, folder.name)
        replaced: dict[str, Callable[[], Tensor]] = {}
        if quantize != "none":
            replaced = _dequantised(folder, path, quantize, dtype)
        # These are the trained numbers; those in the model's own file are rounded to its dtype.
        elif (masters := path / MASTER_FILE).is_file():
            stored: Any = safe_open(masters, framework="pt", device="cpu")
            replaced = {name: partial(stored.get_tensor, name) for name in list(stored.keys())}
        yield MergedWeights(reader=reader, deltas=deltas, replaced=replaced)


def _located(reader: Reader, adapter: AdapterFile, base: str) -> dict[str, Delta]:
    located: dict[str, Delta] = {}
    for module, delta in (adapter.deltas or {}).items():
        name = next((name for name in _tensor_names(module) if name in reader), None)
        fix = "name the base that the adapter was trained on"
        if name is None:
            what = f"{base} has no matrix {module}"
            raise refusal(adapter.folder, code="export.other-base", what=what, fix=fix)
        if reader.shape(name) != delta.shape:
            what = f"changes {module} of shape {list(delta.shape)}; in {base} it is {list(reader.shape(name))}"
            raise refusal(adapter.folder, code="export.other-base", what=what, fix=fix)
        located[name] = delta
    return located


def can_stream(folder: Folder, adapter: AdapterFile | None) -> bool:
    """True if the modules that the adapter changes are tensors of the base's files; others need PEFT."""
    if adapter is None:
        return True
    if adapter.deltas is None:
        return False
    with Reader(folder.weights(), CPU, torch.float32) as reader:
        strange = [module for module in adapter.deltas if not any(n in reader for n in _tensor_names(module))]
    if not strange:
        return True
    silence_advice()
    from retrain_local.model.composite import has_modules  # its import of transformers takes seconds

    # Modules of today's transformers may have other names than the files. A module that the model lacks is refused.
    return len(strange) < len(adapter.deltas) and not has_modules(folder, strange)


def _tensor_names(module: str) -> tuple[str, str, str]:
    """Return possible names of a module's matrix in the files of a base.

    Some omit the name of the model's body; older ones put a text part's name before it.
    """
    older = module.replace("model.language_model.", "language_model.model.")
    return f"{module}.weight", f"{module.partition('.')[2]}.weight", f"{older}.weight"


def _dequantised(folder: Folder, path: Path, kind: str, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return the matrices W' of a run with `[model] quantize` in fp32, quantised in its dtype and as it stacks them."""
    architecture = read_architecture(folder.document)
    if architecture is None:
        what = f"quantize = {kind!r} is not served for this model"
        raise refusal(folder.where, code="model.not-quantisable", what=what, fix='set [model] quantize to "none"')
    with Reader(path, CPU, dtype) as reader:
        weights = read_weights(reader, architecture, pack=quantiser(kind))
        stored = set(reader.names())
    found: dict[str, Callable[[], Tensor]] = {}
    for layer in weights.layers:
        for linear in layer.linears:
            for at, name in enumerate(linear.names):
                own = next(each for each in _tensor_names(name) if each in stored)
                found[own] = partial(lambda linear, at: linear.weight.split(linear.sizes)[at].float(), linear, at)
    return found


def in_order(names: Sequence[str]) -> list[str]:
    """Sort names by the numbers in them: layers.2 before layers.10."""
    return sorted(names, key=lambda name: [(int(x), "") if x.isdecimal() else (-1, x) for x in _NUMBER.split(name)])
