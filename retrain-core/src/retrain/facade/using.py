"""A trained policy from Python: scored and sampled as the commands do it."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain.facade.data import data_file, rows_of
from retrain.facade.hosting import arguments_of, briefly_told, held_interrupts, restored_imports
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.records.record_names import CONFIG_FILE
from retrain.run.assemble import import_backend
from retrain.run.configure import load_file
from retrain.run.opened import opened, subject_config
from retrain.run.subject import find_subject
from retrain.text.process import prepare_process
from retrain.use.evaluate.subjects import Request, evaluate_subject
from retrain.use.prompts import Prompt, prompts_of, read_prompts
from retrain.use.sample_command import Wanted, sample_file

LOG = logging.getLogger("retrain")


def evaluate_run(run: Path, data: Any, given: Mapping[str, Any], overrides: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The results that `retrain eval RUN --json` would print; `given` are fields of `Request`."""
    with briefly_told(), restored_imports(), tempfile.TemporaryDirectory(prefix="retrain-data-") as folder:
        plugins, file = _ready_plugins(run), data_file(data, Path(folder), "run.evaluate(data=...)")
        if (given["changed"] or given["reward"]) and not file:
            what, fix = "says how `data` is evaluated, which is not given", "add data, or leave it out"
            name = next(iter(given["changed"]), "reward")
            raise ConfigError(Problem(where=f"run.evaluate({name}=...)", what=what, fix=fix))
        request = Request(named=str(run), data=file, overrides=tuple(arguments_of(overrides)), **given)
        return [result.as_data() for result in evaluate_subject(request, plugins, LOG.info)]


def sample_run(
    run: Path, checkpoint: str, prompts: Any, how: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The lines that `retrain sample RUN` would write."""
    with briefly_told(), restored_imports(), tempfile.TemporaryDirectory(prefix="retrain-sample-") as folder:
        plugins, file = _ready_plugins(run), Path(folder, "samples.jsonl")
        policy, arguments = find_subject(run, checkpoint), arguments_of(overrides)
        asked = _prompts(prompts, subject_config(policy, plugins, arguments).config, plugins)
        with opened(policy, plugins, arguments) as source:
            sample_file(source, asked, Wanted(**how, tokens=False, logprobs=False), file)
        lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        entries = sorted(lines, key=lambda line: int(line["index"]))
        return [
            {name: value for name, value in entry.items() if name not in ("index", "settings")} for entry in entries
        ]


def _prompts(given: Any, config: Config, plugins: Plugins) -> list[Prompt]:
    """Texts and chats as they are given; those of a file or of rows, from their column."""
    if isinstance(given, str | os.PathLike):
        return read_prompts(os.fspath(given), config, plugins)
    argument = "run.sample(prompts)"
    entries = list(given) if isinstance(given, list | tuple | Iterator) else rows_of(given, argument)
    if any(isinstance(each, Mapping) for each in entries):
        entries = rows_of(entries, argument)
    return prompts_of([(f"{argument[:-1]}[{number}])", each) for number, each in enumerate(entries)], config)


def _ready_plugins(run: Path) -> Plugins:
    """The plugins, with the libraries of the run's backend imported, which no interrupt may tear."""
    with held_interrupts():
        prepare_process()
        plugins = load_plugins()
        with suppress(RetrainError):  # told when the run is opened
            import_backend(load_file(run / CONFIG_FILE, (), plugins).config, plugins)
    return plugins
