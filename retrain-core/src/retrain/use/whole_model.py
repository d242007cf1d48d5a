"""Writes a subject as one whole model into a new folder that appears once it is complete and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.export import ExportedModel, ModelExport
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.files import write_folder
from retrain.run.subject import Subject
from retrain.text.tables import progress_bar
from retrain.text.terminal_text import printable

MIB = 2**20
# Share of the trained change; rounding that loses more of it is reported.
ROUNDING_WARNING_FRAC = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A subject to write; `dtype` is the type of the weights, `with_check` compares logits."""

    subject: Subject
    config: Config
    plugins: Plugins
    dtype: str
    with_check: bool

    @property
    def adapter(self) -> Path | None:
        """The adapter to merge; None for a run that trains all weights."""
        folder = self.subject.folder
        return folder if folder is None or (folder / ADAPTER_CONFIG).is_file() else None

    @property
    def base(self) -> str:
        is_trained = self.subject.folder is not None and self.adapter is None
        return str(self.subject.folder) if is_trained else self.subject.model

    @property
    def located_base(self) -> str:
        """The base, perhaps at a place that the run recorded; ConfigError when it is lost."""
        self.config.refuse_lost("model.model")
        return self.config.model.model if self.base == self.subject.model else self.base

    def write(self, out: Path, form: str) -> ExportedModel:
        """Fill the new folder `out`; ConfigError when it exists. Nothing is left on an error."""
        base, adapter = self.located_base, self.adapter
        found: list[ExportedModel] = []

        def fill(folder: Path) -> None:
            export = ModelExport(
                base=base,
                adapter=adapter,
                out=folder,
                form=form,
                dtype=self.dtype,
                with_check=self.with_check,
                config=self.config,
                plugins=self.plugins,
            )
            with progress_bar("merging" if adapter else "writing", export.progress):
                written = self.plugins.call_backend("export_model", export)
            if written is None:
                what = "no installed plugin can merge and write models"
                fix = f"install one that can: {install_line('retrain-local')}"
                raise ConfigError(Problem(code="export.no-writer", where=self.subject.label, what=what, fix=fix))
            found.append(written)

        fill_new(out, fill)
        return found[0]

    def as_data(self, out: Path, written: ExportedModel) -> dict[str, Any]:
        return {
            "out": str(out),
            "subject": self.subject.named,
            "checkpoint": self.subject.checkpoint or None,
            "base": self.base,
            "adapter": str(self.adapter) if self.adapter else None,
            "dtype": written.dtype,
            "tensors": written.tensors,
            "bytes": written.num_bytes,
            "logit_gap": written.gap,
            "logit_change": written.change,
            "largest_logit": written.size,
            "quantised_logit_gap": written.quantised_gap,
            "is_unchanged": written.is_unchanged,
            "notes": list(written.notes),
        }


def fill_new(out: Path, fill: Callable[[Path], None]) -> None:
    refuse_existing(out)
    try:
        write_folder(out, fill)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        fix = "name a folder that can be made"
        raise ConfigError(Problem(code="export.not-written", where=str(out), what=what, fix=fix)) from error


def usage_error(*, code: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(code=code, where="command line", what=what, fix=fix))


def refuse_existing(out: Path, *, or_empty_folder: bool = True) -> None:
    """Raise ConfigError unless `out` is free, or an empty folder that may be filled."""
    is_empty_folder = or_empty_folder and out.is_dir() and not any(out.iterdir())
    if out.is_symlink() or (out.exists() and not is_empty_folder):
        fix = "give another name: nothing is written over"
        raise ConfigError(Problem(code="export.exists", where=str(out), what="exists already", fix=fix))


def lines_of(whole: WholeModel, out: Path, written: ExportedModel) -> list[str]:
    label, adapter = whole.subject.label, whole.adapter
    what = f"{label} merged into {whole.base}" if adapter else f"{label}: a whole model, nothing to merge"
    shown = [f"{what}: {out}", f"  {written.tensors} tensors in {written.dtype}, {written.num_bytes / MIB:,.1f} MiB"]
    if written.gap is None:
        shown.append("  logits were not compared (--no-check)")
    else:
        of = "the trained model" if adapter else "the model it is a copy of"
        shown.append(f"  logits differ by at most {written.gap:.2g} from {of} (largest logit {written.size:.3g})")
    if written.change is not None:
        shown.append(f"  training changed them by up to {written.change:.2g}")
    if written.quantised_gap is not None:
        gap = f"{written.quantised_gap:.2g}"
        shown.append(f"  the run computed with quantised matrices: from that model they differ by {gap}")
    if written.is_unchanged:
        shown.append("  the adapter changes nothing: every B is zero, so this is the base model")
    elif written.gap and written.change and written.gap > ROUNDING_WARNING_FRAC * written.change:
        shown.append(f"  {written.dtype} rounds away much of what training changed; a wider --dtype keeps it")
    return [printable(line) for line in [*shown, *(f"  {note}" for note in written.notes)]]
