"""Loads a subject so that it samples: outside a run, without data, rewards or records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import all_keys
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.record_names import CONFIG_FILE
from retrain.run.backend import build_backend, choose_devices
from retrain.run.configure import Checked, load_file
from retrain.run.seed_sources import run_seeds
from retrain.run.subject import Subject, SubjectKind, adapter_shape
from retrain.run.tables import registered_tables
from retrain.text.tables import progress_bar
from retrain.text.tokenizer import load_tokenizer

# Using a policy is not part of its run, so nothing is recorded.
SILENT = {"logging.wandb_project": "", "logging.recorders": "[]"}
# A model that is only used still gets an adapter: the smallest, whose B is 0.
SMALLEST_RANK = 1


@dataclass(slots=True, kw_only=True, eq=False)
class Opened:
    """A policy that samples.

    `backend.sample` draws from the subject with the configured engine, and `backend.logprobs`, where the backend has
    it, is of the same policy.
    """

    subject: Subject
    config: Config
    plugins: Plugins
    context: PluginContext
    backend: Backend
    # The folder that the backend samples from; empty if unknown. Copies by `dataclasses.replace` share it.
    _shown: list[Path | None] = field(default_factory=lambda: [None], repr=False)

    @property
    def tokenizer(self) -> Any:
        return self.context.tokenizer

    def use(self, folder: Path | None) -> None:
        """Sample from another checkpoint or adapter of the same shape, without loading the base again; None = the base.

        BackendError when it does not fit the base, or the backend cannot change its weights.
        """
        if self._shown == [folder]:
            return
        # A load that fails may leave any weights behind, so they count as unknown until it succeeds.
        self._shown.clear()
        backend, name = self.backend, self.config.backend.backend
        if hasattr(backend, "sample_from"):
            backend.sample_from(folder)
        elif folder is not None:
            backend.load(folder)
            backend.publish()
        else:
            what = f"backend {name!r} cannot return to the model that training began with"
            fix = "use --backend local, or open the base model by its name"
            where = self.config.place("backend.backend")
            raise BackendError(Problem(code="backend.no-base-model", where=where, what=what, fix=fix))
        self._shown.append(folder)


def subject_config(
    subject: Subject, plugins: Plugins, overrides: Sequence[str] = (), *, file: Path | None = None
) -> Checked:
    """The configuration in which a subject is used: its run's, otherwise `file` or the defaults, with its base.

    `overrides` are flags as of `retrain`, and beat everything. No recorder is on.
    """
    known = {key.path for key in all_keys(registered_tables(plugins))}
    own: dict[str, Any] = {path: value for path, value in SILENT.items() if path in known}
    if subject.kind is SubjectKind.RUN:
        file = file or (subject.run / CONFIG_FILE if subject.run else None)
        # The checkpoint contains the adapter that training began with.
        own["model.adapter"] = ""
    else:
        own |= {"model.model": subject.model, "model.lora_rank": SMALLEST_RANK}
    if subject.kind is SubjectKind.ADAPTER and subject.folder:
        own |= adapter_shape(subject.folder)
    texts = {path: str(value).lower() if isinstance(value, bool) else value for path, value in own.items()}
    given = [f"--set={path}={text}" for path, text in texts.items() if path in known]
    return load_file(file, [*given, *overrides], plugins)


def run_context(config: Config, plugins: Plugins, root: int | None = None) -> PluginContext:
    """What a run gives to its parts, with the tokenizer of the model and the seeds of `run_seeds`."""
    seeds, tokenizer = run_seeds(config, root), load_tokenizer(config, plugins)
    return PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer)


@contextmanager
def opened(
    subject: Subject,
    plugins: Plugins,
    overrides: Sequence[str] = (),
    *,
    file: Path | None = None,
    before_model: Callable[[PluginContext], None] | None = None,
) -> Iterator[Opened]:
    """Within the block, a policy that samples from the subject; see `subject_config` for the configuration.

    `before_model` is called with the tokenizer and before the model loads, so that it may refuse the subject.
    """
    devices = choose_devices(subject_config(subject, plugins, overrides, file=file).config, plugins)
    devices.log()
    config = devices.config
    context = run_context(config, plugins, max(config.training.seed, 0))
    if before_model:
        before_model(context)
    with progress_bar(f"loading {config.model.model}", context.training_progress):
        backend = build_backend(context)
    try:
        policy = Opened(subject=subject, config=config, plugins=plugins, context=context, backend=backend)
        policy.use(subject.folder)
        yield policy
    finally:
        backend.close()
