"""Export of a whole model: the request to a backend's distribution, and its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PhaseProgress
from retrain.kernel.registry import Plugins


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelExport:
    """A model to be written into `out`, an existing empty folder.

    `base` is the model's folder, hub id or `builtin:` name, `adapter` the folder of the adapter to merge into it, None
    to write `base` only. `form` is `folder`, for transformers, or `gguf`. `dtype` is `fp32` or `bf16` for a folder,
    `f32`, `f16`, `bf16` or `q8_0` for GGUF, "" for the base's own. `config` is the run's: it names the dtype and the
    quantisation that it computed with. `progress` counts tensors, for display.
    """

    base: str
    adapter: Path | None
    out: Path
    form: str
    dtype: str
    with_check: bool
    config: Config
    plugins: Plugins
    progress: PhaseProgress = field(default_factory=PhaseProgress)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A written model: its dtype, tensors and bytes, and how far its logits are from the trained model's.

    Gaps are largest differences of a logit over a few texts: `gap` between the trained model and the one written,
    `change` between base and trained model, `quantised_gap` between the model with quantised matrices, as the run
    computed with it, and the one written; None where nothing was compared. `size` is the largest logit. `is_unchanged`:
    the adapter is zero.
    """

    dtype: str
    tensors: int
    num_bytes: int
    gap: float | None = None
    change: float | None = None
    size: float | None = None
    quantised_gap: float | None = None
    is_unchanged: bool = False
    notes: tuple[str, ...] = ()
