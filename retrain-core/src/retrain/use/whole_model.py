"""Writes a subject as one whole model into a new folder, which appears when it is complete and was compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.export import ExportedModel, ModelExport
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.first_party import install_line
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import ADAPTER_CONFIG
from retrain.records.files import write_folder
from retrain.run.subject import Subject
from retrain.text.progress import progress_bar
from retrain.text.terminal_text import printable

MIB = 2**20
EATEN = 0.5  # of the change by training: from this share on, rounding is told


def base_of(subject: Subject) -> tuple[str, Path | None]:
    """The model to write and the adapter to merge into it; a run that trains all weights has no adapter."""
    if subject.folder is None or (subject.folder / ADAPTER_CONFIG).is_file():
        return subject.model, subject.folder
    return str(subject.folder), None


def write_whole(
    subject: Subject, config: Config, plugins: Plugins, out: Path, *, form: str, dtype: str, with_check: bool
) -> ExportedModel:
    """Fill the new folder `out`; ConfigError when there is something already. On any error nothing is left."""
    config.refuse_lost("model.model")
    base, adapter = base_of(subject)
    base = config.model.model if base == subject.model else base
    found: list[ExportedModel | None] = []

    def fill(folder: Path) -> None:
        export = ModelExport(
            base=base,
            adapter=adapter,
            out=folder,
            form=form,
            dtype=dtype,
            with_check=with_check,
            config=config,
            plugins=plugins,
        )
        with progress_bar("merging" if adapter else "writing", export.progress):
            found.append(plugins.call_backend("export_model", export))
        if found[-1] is None:
            what = "no installed plugin can merge and write models"
            raise ConfigError(Problem(where=subject.label, what=what, fix=install_line("retrain-local")))

    fill_new(out, fill)
    assert found[-1] is not None
    return found[-1]


def fill_new(out: Path, fill: Callable[[Path], None]) -> None:
    """Make the new folder `out`, which appears when `fill` has written it; ConfigError when that cannot be done."""
    refuse_existing(out)
    try:
        write_folder(out, fill)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(where=str(out), what=what, fix="name a folder that can be made")) from error


def refuse_existing(out: Path) -> None:
    """ConfigError unless nothing is there, or an empty folder."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(Problem(where=str(out), what="is no folder", fix="name a new one"))
    if out.is_dir() and any(out.iterdir()):
        fix = "name a new folder: nothing is ever written over"
        raise ConfigError(Problem(where=str(out), what="exists and is not empty", fix=fix))


def as_data(subject: Subject, out: Path, written: ExportedModel) -> dict[str, Any]:
    """For `--json`."""
    base, adapter = base_of(subject)
    return {
        "out": str(out),
        "subject": subject.named,
        "checkpoint": subject.checkpoint or None,
        "base": base,
        "adapter": str(adapter) if adapter else None,
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


def lines(subject: Subject, out: Path, written: ExportedModel) -> list[str]:
    """What was written, and how it compares."""
    base, adapter = base_of(subject)
    what = f"{subject.label} merged into {base}" if adapter else f"{subject.label}: a whole model, nothing to merge"
    shown = [f"{what}: {out}", f"  {written.tensors} tensors in {written.dtype}, {written.num_bytes / MIB:,.1f} MiB"]
    if written.gap is None:
        shown.append("  logits were not compared (--no-check)")
    else:
        of = "the trained model" if adapter else "the model it is a copy of"
        shown.append(f"  logits differ by at most {written.gap:.2g} from {of} (largest logit {written.size:.3g})")
    if written.change is not None:
        shown.append(f"  training changed them by up to {written.change:.2g}")
    if written.quantised_gap is not None:
        shown.append(
            f"  the run computed with quantised matrices: from that model they differ by {written.quantised_gap:.2g}"
        )
    if written.is_unchanged:
        shown.append("  the adapter changes nothing: every B is zero, so this is the base model")
    elif written.gap and written.change and written.gap > EATEN * written.change:
        shown.append(f"  {written.dtype} rounds away much of what training changed; a wider --dtype keeps it")
    return [printable(line) for line in [*shown, *(f"  {note}" for note in written.notes)]]
