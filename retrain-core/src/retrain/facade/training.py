"""`retrain.train`: the command `retrain CONFIG`, in this process and from Python."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.facade.capture import Captured, settings_of
from retrain.facade.hosting import arguments_of, briefly_told, data_file, held_interrupts, plain, restored_imports
from retrain.kernel.config.load import Setting
from retrain.kernel.config.resolved import Layer, Origin
from retrain.kernel.errors import ConfigError, HookError, Problem, StopRequested, raised_at
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner, Plugins
from retrain.run.configure import Checked, claim_of, load_file, split_arguments
from retrain.run.interrupts import Interrupts
from retrain.text.process import prepare_process

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

DATA = Path("logs/data")  # the run folder does not exist before the data is checked
OnStep = Callable[[Mapping[str, Any]], object]


class Tables(dict[str, Any]):
    """The tables of a configuration given by a program, in plain TOML values; messages call them `config`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__({str(name): plain(value) for name, value in given.items()})

    def __str__(self) -> str:
        return "config"


class Watcher:
    def __init__(self, on_step: OnStep | None, interrupts: Interrupts) -> None:
        self._on_step = on_step
        self._interrupts = interrupts
        self.folder: Path | None = None

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        self.folder = run.folder

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        """Call the user's function; KeyboardInterrupt in it stops the run like one from outside."""
        if self._on_step is None:
            return
        try:
            self._on_step(dict(metrics))
        except KeyboardInterrupt:
            self._interrupts.request("on_step")
        except Exception as error:
            what = f"on_step raised {type(error).__name__}: {error}{raised_at(error)}"
            fix = "correct it, and continue with retrain.load(folder).resume()"
            raise HookError(Problem(code="run.on-step-raised", what=what, fix=fix)) from error


def run_training(
    config: Mapping[str, Any] | str | os.PathLike[str],
    overrides: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any] | None],
    on_step: OnStep | None,
    *,
    data: Any = None,
    is_quiet: bool,
) -> tuple[Path, str]:
    """Train as `retrain.train`; returns the run's folder, and the reason of a stop, empty at the end."""
    with ExitStack() as undo:
        undo.enter_context(briefly_told())
        undo.enter_context(restored_imports())
        with held_interrupts():
            prepare_process()
            values, captured = settings_of(functions)
            undo.enter_context(_staged(captured))
            if data is not None:
                values |= {"data.source": "files", "data.path": data_file(data, DATA, "retrain.train(data=...)")}
            plugins = load_plugins()
            origin = Origin(layer=Layer.COMMAND_LINE, place="retrain.train")
            settings = [Setting(path=path, value=value, origin=origin) for path, value in values.items()]
            checked = _checked(config, arguments_of(overrides), settings, plugins)
            from retrain.observe.console.console import run_console  # only after the checks
            from retrain.run.backend import import_backend
            from retrain.run.session import train

            import_backend(checked.config, plugins)
        interrupts = Interrupts(grace_s=checked.config.training.grace_s, is_guest=True)
        watcher, reason = Watcher(on_step, interrupts), ""
        plugins.add(watcher, Owner(distribution="retrain-core", source="on_step"))
        with run_console(plugins, is_quiet=is_quiet):
            try:
                train(checked, plugins, interrupts)
            except StopRequested as stop:
                watcher.folder, reason = stop.folder or watcher.folder, stop.reason
        log_dir = checked.config.resume.from_ or checked.config.logging.log_dir
        return watcher.folder or Path(log_dir).expanduser(), reason


def _checked(
    config: Mapping[str, Any] | str | os.PathLike[str], arguments: list[str], settings: list[Setting], plugins: Plugins
) -> Checked:
    if isinstance(config, Mapping):
        return load_file(Tables(config), arguments, plugins, starts_run=True, settings=settings)
    words = [os.fspath(config), *arguments]
    if claim := claim_of(words, plugins):
        what = f"is for `retrain {claim.command}`, not for a single run"
        fix = f"run `retrain {claim.command} {words[0]}`"
        raise ConfigError(Problem(code="run.not-single", where=words[0], what=what, fix=fix))
    return load_file(*split_arguments(words), plugins, starts_run=True, settings=settings)


@contextmanager
def _staged(captured: list[Captured]) -> Iterator[None]:
    """Make the modules of captured functions importable in the block; the run keeps copies with its other code."""
    with tempfile.TemporaryDirectory(prefix="retrain-functions-") as folder:
        for one in captured:
            if one.source:
                Path(folder, f"{one.module}.py").write_text(one.source, encoding="utf-8")
        # Last, so that no copy hides a module of the user.
        sys.path.append(folder)
        importlib.invalidate_caches()
        for one in captured:
            try:
                importlib.import_module(one.module)
            except Exception as error:  # user code
                what = f"{one.name} cannot be imported from a copy of its source: {type(error).__name__}: {error}"
                fix = "put it into a .py file and import it from there"
                problem = Problem(code="plugin.copy-failed", where="retrain.train", what=what, fix=fix)
                raise ConfigError(problem) from error
        yield
