"""`retrain squeeze`: the rank that an adapter needs, the adapter at that rank, and what that costs."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from retrain.kernel.config.load import load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import locate_adapter
from retrain.run.configure import split_arguments
from retrain.run.tables import registered_tables, table_hint
from retrain.text.command_options import config_argument, json_option
from retrain.text.terminal_text import printable
from retrain.tools.squeeze.adapter import REMOTE, local_copy, read_adapter
from retrain.tools.squeeze.analysis import ranks_to_test
from retrain.tools.squeeze.compress import compress_adapter
from retrain.tools.squeeze.evaluate import Measured, measure
from retrain.tools.squeeze.job import SqueezeResult, rank_to_keep, run_job
from retrain.tools.squeeze.table import SqueezeTable

REPORT = Path("logs/squeeze")
_FOLDER = click.Path(path_type=Path, file_okay=False)
EPILOG = """\b
Examples:
  retrain squeeze logs/train                        the adapter of a run
  retrain squeeze logs/train --squeeze-output-path small
  retrain squeeze logs/train --eval --json

\b
Exit codes: 0 done; 1 failed; 2 usage or configuration error.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A parsed command line: the adapter, the settings, and the overrides as given."""

    adapter: str
    settings: SqueezeTable
    config: Config
    overrides: tuple[str, ...]


@click.command(
    "squeeze", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True}, epilog=EPILOG
)
@click.option("--eval", "with_eval", is_flag=True, help="Measure both ranks on the run's held-out examples.")
@click.option("--run", "run", type=_FOLDER, help="With --eval: the run, if the adapter is not in its folder.")
@click.option("--report", type=_FOLDER, default=REPORT, show_default=True, help="Folder of spectrum.json and .html.")
@json_option("As JSON, with every layer.")
@config_argument("[ADAPTER|RUN|CONFIG] [--KEY VALUE]...")
@click.pass_obj
def command(
    plugins: Plugins, with_eval: bool, run: Path | None, report: Path, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Show which LoRA rank an adapter needs. With `--squeeze-output-path DIR` it is also written at that rank."""
    request = parse_request(arguments, plugins)
    result = run_job(request.adapter, request.settings, report, wandb=request.config.as_dict()["logging"])
    measured = _measure(request, result, run, plugins) if with_eval else None
    if as_json:
        data = result.as_data() | {"layers": [layer.as_data() for layer in result.analysis.layers]}
        data |= {"eval": measured.as_data()} if measured else {}
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    lines = result.lines() + (measured.lines() if measured else [])
    click.echo("\n".join(map(printable, lines)))


def explain(arguments: Sequence[str], plugins: Plugins) -> dict[str, Any]:
    """`retrain explain` for a file that is a squeeze; only names and shapes of the adapter are read."""
    request = parse_request(arguments, plugins)
    settings, adapter = request.settings, read_adapter(request.adapter)
    content: dict[str, Any] = {
        "mode": "squeeze",
        "config": request.config.source or "(defaults)",
        "adapter_path": str(adapter.folder),
        "source_rank": adapter.rank,
        "num_layers": len(adapter.pairs),
        "tested_ranks": ranks_to_test(adapter.rank, settings.target_ranks),
        "min_variance_retention": settings.min_variance_retention,
        "device": settings.device,
    }
    if settings.output_path:
        content |= {"output_path": settings.output_path, "compress_to": settings.compress_to or "(recommended rank)"}
    return content


def parse_request(arguments: Sequence[str], plugins: Plugins) -> Request:
    """`[ADAPTER | RUN | CONFIG] [overrides]`; ConfigError lists every problem, before any weights are read.

    Without ADAPTER, RUN or CONFIG, `./retrain.toml`. A configuration that names no adapter stands for that of its run.
    """
    overrides, adapter, file = list(arguments), "", None
    if overrides and not overrides[0].startswith("-") and not overrides[0].endswith(".toml"):
        adapter = overrides.pop(0)
    else:
        file, overrides = split_arguments(overrides)
    tables, hint = registered_tables(plugins), partial(table_hint, plugins)
    config, problems = load_config(file, tables=tables, arguments=overrides, environ=os.environ, table_hint=hint)
    if problems:
        raise ConfigError(*problems)
    settings = config.table("squeeze", SqueezeTable)
    if not adapter:
        adapter = _named(config, settings)
    if not adapter and file is None:
        fix = "retrain squeeze ADAPTER, where ADAPTER is a folder, or a run's"
        raise ConfigError(Problem(where="command line", what="no adapter is named", fix=fix))
    adapter = local_copy(adapter or config.logging.log_dir, config, plugins)
    return Request(adapter=adapter, settings=settings, config=config, overrides=tuple(overrides))


def _named(config: Config, settings: SqueezeTable) -> str:
    """The adapter that a configuration names, "" if none; ConfigError with the key's location if it does not exist."""
    for path, adapter in (
        ("squeeze.adapter_path", settings.adapter_path),
        ("backend.adapter_path", config.backend.adapter_path),
    ):
        if not adapter:
            continue
        if adapter.startswith(REMOTE):
            return adapter
        try:
            return str(locate_adapter(adapter))
        except ConfigError as error:
            where = config.place(path)
            raise ConfigError(*(replace(p, where=f"{where}: {p.where}") for p in error.problems)) from None
    return ""


def _measure(request: Request, result: SqueezeResult, run: Path | None, plugins: Plugins) -> Measured:
    from retrain.tools.squeeze.evaluate import (
        evaluator,
        run_of,  # imports the training loop
    )

    source = result.analysis.adapter
    rank = rank_to_keep(result.analysis, request.settings)
    with tempfile.TemporaryDirectory(prefix="retrain-squeeze-") as scratch:
        small = result.compressed.path if result.compressed else Path(scratch) / "small"
        if result.compressed is None:
            compress_adapter(source, small, rank, device=request.settings.device)
        with evaluator(run or run_of(source), plugins, request.overrides) as evaluate:
            return measure(source, small, evaluate, Path(scratch) / "checkpoint")
