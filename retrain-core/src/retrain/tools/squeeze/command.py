"""`retrain squeeze`: the rank that an adapter needs, the adapter at that rank, and its cost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.kernel.config.load import load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import locate_adapter
from retrain.records.run import is_run
from retrain.run.configure import split_arguments
from retrain.run.tables import registered_tables, table_hint
from retrain.text.amounts import rate_interval
from retrain.text.command_options import config_argument, json_option
from retrain.text.terminal_text import printable
from retrain.tools.squeeze import adapter as lora
from retrain.tools.squeeze.compress import compress_adapter
from retrain.tools.squeeze.job import SqueezeResult, rank_to_keep, run_job
from retrain.tools.squeeze.spectrum import ranks_to_test
from retrain.tools.squeeze.table import SqueezeTable

Evaluate = Callable[[Path], Mapping[str, float]]  # folder of a checkpoint -> `eval_*` fields
RATE, LOW, HIGH = "eval_correct_rate", "eval_ci_low", "eval_ci_high"
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
        data |= {"eval": asdict(measured)} if measured else {}
        click.echo(json.dumps(data, indent=2, allow_nan=False))
        return
    lines = result.lines() + (measured.lines() if measured else [])
    click.echo("\n".join(map(printable, lines)))


def explain(arguments: Sequence[str], plugins: Plugins) -> dict[str, Any]:
    request = parse_request(arguments, plugins)
    settings, adapter = request.settings, lora.read_adapter(request.adapter)
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
    """Parse `[ADAPTER | RUN | CONFIG] [overrides]`; ConfigError lists every problem, before any weights are read.

    The default is `./retrain.toml`. A configuration that names no adapter means its run's.
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
        what, fix = "no adapter is named", "retrain squeeze ADAPTER, where ADAPTER is a folder, or a run's"
        raise ConfigError(Problem(code="squeeze.no-adapter", where="command line", what=what, fix=fix))
    adapter = lora.local_copy(adapter or config.logging.log_dir, config, plugins)
    return Request(adapter=adapter, settings=settings, config=config, overrides=tuple(overrides))


def _named(config: Config, settings: SqueezeTable) -> str:
    """Return the adapter that a configuration names, or ""; ConfigError with the key's location if it is missing."""
    named = {"squeeze.adapter_path": settings.adapter_path, "backend.adapter_path": config.backend.adapter_path}
    for path, adapter in named.items():
        if not adapter:
            continue
        if adapter.startswith(lora.REMOTE):
            return adapter
        try:
            return str(locate_adapter(adapter))
        except ConfigError as error:
            where = config.place(path)
            raise ConfigError(*(replace(p, where=f"{where}: {p.where}") for p in error.problems)) from None
    return ""


def _measure(request: Request, result: SqueezeResult, run: Path | None, plugins: Plugins) -> Measured:
    source = result.analysis.adapter
    rank = rank_to_keep(result.analysis, request.settings)
    run = run or next(filter(is_run, source.resolve().parents), None)
    if run is None:
        what, fix = "no parent folder is a run, whose held-out examples would be used", "give the run: --run DIR"
        raise ConfigError(Problem(code="squeeze.no-run", where=str(source), what=what, fix=fix))
    with tempfile.TemporaryDirectory(prefix="retrain-squeeze-") as scratch:
        small = result.compressed.path if result.compressed else Path(scratch) / "small"
        if result.compressed is None:
            compress_adapter(source, small, rank, device=request.settings.device)
        with evaluator(run, plugins, request.overrides) as evaluate:
            return measure(source, small, evaluate, Path(scratch) / "checkpoint")


# The cost of squeezing: the same evaluation of the source adapter and of the smaller one.


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The fields of both evaluations: same examples, same random streams."""

    rank: int
    source_rank: int
    source: Mapping[str, float]
    squeezed: Mapping[str, float]

    def lines(self) -> list[str]:
        lines = ["Held-out correct rate, 95% interval:"]
        for rank, fields in ((self.source_rank, self.source), (self.rank, self.squeezed)):
            interval = rate_interval(fields.get(LOW), fields.get(HIGH))
            lines.append(f"  rank {rank:>4}: {100 * fields[RATE]:5.1f}%  {interval}".rstrip())
        return lines


def measure(source: Path, compressed: Path, evaluate: Evaluate, scratch: Path) -> Measured:
    """Evaluate the checkpoint in `source`, then the same with the weights of `compressed`, in the folder `scratch`."""
    big, small = lora.read_adapter(source), lora.read_adapter(compressed)
    before = dict(evaluate(big.folder))
    write_at_source_rank(small, big, scratch)
    return Measured(rank=small.rank, source_rank=big.rank, source=before, squeezed=dict(evaluate(scratch)))


def write_at_source_rank(small: lora.Adapter, big: lora.Adapter, folder: Path) -> None:
    """Write `big`'s checkpoint with the weights of `small`, padded with zeros to the shapes of `big`.

    A backend loads adapters of its run's rank; zero rows of A and columns of B do not change the product, and
    compression keeps alpha / r, so this policy is exactly the one of `small`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in big.folder.iterdir():
        if file.is_file() and file.name != lora.WEIGHTS_FILE:
            try:
                # A link, since optimizer states are large; not all file systems have them.
                os.link(file, folder / file.name)
            except OSError:
                shutil.copyfile(file, folder / file.name)

    def contents(info: lora.TensorInfo) -> Iterable[bytes]:
        if small.file.tensors[info.name].shape == info.shape:
            return small.file.chunks(info.name)
        values = small.file.values(info.name)
        gaps = [(0, wanted - size) for wanted, size in zip(info.shape, values.shape, strict=True)]
        return (lora.encode(np.pad(values, gaps), info.dtype, name=info.name),)

    tensors = list(big.file.tensors.values())
    lora.write_tensor_file(folder / lora.WEIGHTS_FILE, tensors, contents, dict(big.file.metadata))


@contextmanager
def evaluator(run: Path, plugins: Plugins, overrides: Sequence[str] = ()) -> Iterator[Evaluate]:
    """Within the block, a function that evaluates a checkpoint folder as the run `run` evaluated its policy.

    The model is loaded once. ConfigError when the run has no held-out examples.
    """
    from retrain.run.opened import opened  # these load the training loop
    from retrain.run.subject import BASE, find_subject
    from retrain.tasks.loading import load_tasks

    with opened(find_subject(run, BASE), plugins, overrides) as policy:
        if not policy.config.eval.examples:
            what = "this run held out no examples"
            why = "every example may have been trained on, and a rate on those is meaningless"
            fix = "train with [eval] examples, for instance --eval-examples 64"
            raise ConfigError(Problem(code="squeeze.no-held-out", where=str(run), what=what, why=why, fix=fix))
        tasks = load_tasks(policy.context)
        with (
            closing(tasks.verifier),
            closing(plugins.notify("retrain_evaluation", context=policy.context, tasks=tasks)) as evaluation,
        ):

            def evaluate(folder: Path) -> Mapping[str, float]:
                policy.use(folder)
                found: Mapping[str, float] = evaluation.measure(0, policy.backend, None)
                return {name: value for name, value in found.items() if not name.endswith("time_s")}

            yield evaluate
