"""`adapter_config.json`: rank and scale of every module, and the same file for a smaller rank."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.tools.squeeze.tensor_file import unusable

CONFIG_FILE = "adapter_config.json"
# These initialisations move base weights into the factors: their spectrum is not that of the update.
BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")
REFUSED = {
    "use_dora": "DoRA divides by a column norm of base weight plus update, and the base weights are not available here",
    "target_parameters": "fused expert parameters stack one adapter per expert in each factor",
    "use_bdlora": "block-diagonal factors do not multiply to the update",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """What PEFT computes with: `Delta = scale * B A`, scale = alpha / r, or alpha / sqrt(r) with rsLoRA."""

    path: Path
    document: Mapping[str, Any]
    rank: int
    alpha: float
    use_rslora: bool
    ranks: Mapping[str, int]  # regular expression on the module's name -> rank
    alphas: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        """Rank of one module: the first pattern that its name matches, else `r`."""
        return self.ranks.get(_match(self.ranks, module), self.rank)

    def alpha_of(self, module: str) -> float:
        """Alpha of one module, by the same rule."""
        return self.alphas.get(_match(self.alphas, module), self.alpha)

    def scale(self, alpha: float, rank: int) -> float:
        """The factor in front of B A."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def alpha_at(self, alpha: float, rank: int, smaller: int) -> float:
        """The alpha that keeps `scale` at another rank: alpha k / r, with rsLoRA alpha sqrt(k / r)."""
        return alpha * (math.sqrt(smaller / rank) if self.use_rslora else smaller / rank)

    def squeezed(self, rank: int, modules: Iterable[tuple[str, int]]) -> dict[str, Any]:
        """The document for `rank`; `modules` are all names with their new ranks.

        Every module keeps its scale. Modules that differ from the rest get a pattern of their own.
        """
        alpha = self.alpha_at(self.alpha, self.rank, rank)
        ranks: dict[str, int] = {}
        alphas: dict[str, float] = {}
        for module, smaller in sorted(
            modules, key=lambda pair: -len(pair[0])
        ):  # longest first: one name may be the ending of another
            pattern = f"^{re.escape(module)}"
            own = self.alpha_at(self.alpha_of(module), self.rank_of(module), smaller)
            if smaller != rank:
                ranks[pattern] = smaller
            if not math.isclose(own, alpha, rel_tol=1e-12):
                alphas[pattern] = own
        patterns = {"rank_pattern": ranks, "alpha_pattern": alphas}
        return {**self.document, "r": rank, "lora_alpha": alpha, **patterns}


def read_lora_config(folder: Path) -> LoraConfig:
    """The configuration of the adapter in `folder`; ConfigError if there is none, or it is not plain LoRA."""
    path = folder / CONFIG_FILE
    document = _read(path)
    if (kind := document.get("peft_type")) != "LORA":
        raise unusable(path, f"peft_type is {kind!r}", fix="only LORA adapters have a rank that can be squeezed")
    for name, why in REFUSED.items():
        if document.get(name):
            raise unusable(path, f"{name} is set", why=why, fix="train without it, or keep this adapter's rank")
    init = document.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(BASE_CHANGING_INITS):
        fix = "convert it first: save_pretrained(..., path_initial_model_for_weight_conversion=...) of PEFT"
        raise unusable(path, f"init_lora_weights is {init!r}", why="its factors hold base weights too", fix=fix)
    return LoraConfig(
        path=path,
        document=document,
        rank=_rank(path, "r", document.get("r")),
        alpha=_alpha(path, "lora_alpha", document.get("lora_alpha")),
        use_rslora=bool(document.get("use_rslora")),
        ranks={k: _rank(path, f"rank_pattern {k!r}", v) for k, v in _patterns(path, document, "rank_pattern")},
        alphas={k: _alpha(path, f"alpha_pattern {k!r}", v) for k, v in _patterns(path, document, "alpha_pattern")},
    )


def _read(path: Path) -> dict[str, Any]:
    fix = "give an adapter folder that PEFT wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise unusable(path, "file not found", fix=fix) from None
    except (OSError, ValueError, RecursionError) as error:
        raise unusable(path, f"is not readable JSON: {error}", fix=fix) from error
    if not isinstance(document, dict):
        raise unusable(path, "is not a JSON object", fix=fix)
    return document


def _patterns(path: Path, document: Mapping[str, Any], name: str) -> list[tuple[str, Any]]:
    patterns = document.get(name) or {}
    if not isinstance(patterns, dict):
        raise unusable(path, f"{name} is not an object", fix="write {pattern: value}, or {}")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise unusable(path, f"{name} {pattern!r} is not a valid pattern: {error}", fix="correct it") from None
    return list(patterns.items())


def _rank(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unusable(path, f"{name} is {value!r}", fix="a rank is a whole number from 1")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise unusable(path, f"{name} is {value!r}", fix="an alpha is a finite number")
    return float(value)


def _match(patterns: Iterable[str], module: str) -> str:
    """The pattern that applies to a module by PEFT's rule: it must match the end of the name, starting at a dot."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), module)
