"""A LoRA adapter on disk, module by module, for merging: what PEFT computes with, without its modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from retrain.api import ConfigError, Problem
from retrain_local.model.adapter import PREFIX
from retrain_local.model.checkpoint import ADAPTER_FILE, CONFIG_FILE

# These initialisations subtract the start of the factors from the base, which is then no longer the one on disk.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
# What the factors of single linear layers do not hold: left to PEFT's own merging.
BEYOND_FACTORS = (
    *("modules_to_save", "target_parameters", "alpha_pattern", "layer_replication", "lora_bias", "use_bdlora"),
    *("trainable_token_indices", "alora_invocation_tokens"),
)
_FACTOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_magnitude_vector)")

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError),
    SafetensorError,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Delta:
    """What an adapter does to one matrix W: W + scale B A; with DoRA its rows get the norms `magnitude_O`."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    magnitude_O: Tensor | None
    transposed: bool  # W is stored [inputs, outputs]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the stored matrix."""
        outputs, inputs = self.b_OR.shape[0], self.a_RI.shape[1]
        return (inputs, outputs) if self.transposed else (outputs, inputs)

    @property
    def is_zero(self) -> bool:
        """Whether B is zero, as it is before any training."""
        return not torch.any(self.b_OR).item()

    def merged(self, stored: Tensor) -> Tensor:
        """The matrix with the adapter in it, in fp32, as it is stored."""
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
        """Whether the adapter changes nothing; a magnitude counts as a change."""
        changes = self.deltas.values() if self.deltas is not None else ()
        return bool(changes) and all(delta.is_zero and delta.magnitude_O is None for delta in changes)


def read_adapter_file(folder: Path) -> AdapterFile:
    """Read an adapter's folder; ConfigError when it cannot be merged into a base that is on disk."""
    try:
        document = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        kind, init = document["peft_type"], document.get("init_lora_weights")
        if kind == "LORA":
            float(document["lora_alpha"])
        tensors = load_file(folder / ADAPTER_FILE)
    except UNREADABLE as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        raise refusal(folder, what, fix="give a complete adapter folder, as PEFT writes it") from error
    if kind != "LORA":
        raise refusal(folder, f"peft_type is {kind!r}", fix="merge it with PEFT: only LORA adapters are merged here")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        fix = "convert it first: save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        why = "it was trained on a base that had been changed before, which is not the one that it names"
        raise refusal(folder, f"init_lora_weights is {init!r}", fix=fix, why=why)
    odd = next((name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()), None)
    if odd is not None:
        raise refusal(folder, f"{odd} holds a number that is not finite", fix="use an earlier checkpoint")
    is_fp32 = any(tensor.dtype == torch.float32 for tensor in tensors.values())
    return AdapterFile(folder=folder, document=document, deltas=_deltas(folder, document, tensors), is_fp32=is_fp32)


def _deltas(folder: Path, document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Delta] | None:
    """By module; None where the file or its configuration goes beyond factors of linear layers."""
    if any(document.get(name) for name in BEYOND_FACTORS) or document.get("bias", "none") != "none":
        return None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() > 2:
            return None
        parts.setdefault(match["module"].removeprefix(PREFIX), {})[match["part"].partition(".")[0]] = tensor
    if not parts:
        raise refusal(folder, "holds no LoRA factors", fix="give a complete adapter folder, as PEFT writes it")
    deltas = {}
    for module, found in parts.items():
        a, b = found.get("lora_A"), found.get("lora_B")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or not 0 < a.shape[0] == b.shape[1]:
            raise refusal(folder, f"A and B of {module} do not fit together", fix="take the adapter again")
        alpha, rank = float(document["lora_alpha"]), a.shape[0]
        deltas[module] = Delta(
            a_RI=a,
            b_OR=b,
            scale=alpha / (math.sqrt(rank) if document.get("use_rslora") else rank),
            magnitude_O=found.get("lora_magnitude_vector"),
            transposed=bool(document.get("fan_in_fan_out")),
        )
    return deltas


def refusal(where: Path | str, what: str, *, fix: str, why: str = "") -> ConfigError:
    """The error for an adapter or a base that cannot be merged."""
    return ConfigError(Problem(where=str(where), what=what, why=why, fix=fix))
