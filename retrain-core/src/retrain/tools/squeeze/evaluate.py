"""Measures the cost of squeezing: the same evaluation of the source adapter and of the smaller one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.run import is_run
from retrain.run.opened import Opened, opened
from retrain.run.subject import BASE, find_subject
from retrain.tasks.tasks import closed_on_error, load_tasks
from retrain.text.amounts import rate_interval
from retrain.tools.squeeze.adapter import WEIGHTS_FILE, Adapter, read_adapter
from retrain.tools.squeeze.tensor_file import TensorInfo, encode, write_tensor_file

Evaluate = Callable[[Path], Mapping[str, float]]  # folder of a checkpoint -> `eval_*` fields
RATE, LOW, HIGH = "eval_correct_rate", "eval_ci_low", "eval_ci_high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The fields of both evaluations: same examples, same random streams."""

    rank: int
    source_rank: int
    source: Mapping[str, float]
    squeezed: Mapping[str, float]

    def as_data(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Both correct rates with their 95 % intervals."""
        lines = ["Held-out correct rate, 95% interval:"]
        for rank, fields in ((self.source_rank, self.source), (self.rank, self.squeezed)):
            interval = rate_interval(fields.get(LOW), fields.get(HIGH))
            lines.append(f"  rank {rank:>4}: {100 * fields[RATE]:5.1f}%  {interval}".rstrip())
        return lines


def measure(source: Path, compressed: Path, evaluate: Evaluate, scratch: Path) -> Measured:
    """Evaluate the checkpoint in `source`, then the same with the weights of `compressed`, in the folder `scratch`."""
    big, small = read_adapter(source), read_adapter(compressed)
    before = dict(evaluate(big.folder))
    write_at_source_rank(small, big, scratch)
    return Measured(rank=small.rank, source_rank=big.rank, source=before, squeezed=dict(evaluate(scratch)))


def write_at_source_rank(small: Adapter, big: Adapter, folder: Path) -> None:
    """`big`'s checkpoint with the weights of `small`, padded with zeros to the shapes of `big`.

    A backend loads adapters of the rank that its run has; zero rows of A and columns of B do not change the product,
    and compression keeps alpha / r, so this policy is exactly that of `small`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in big.folder.iterdir():
        if file.is_file() and file.name != WEIGHTS_FILE:
            _link_or_copy(file, folder / file.name)

    def contents(info: TensorInfo) -> Iterable[bytes]:
        if small.file.tensors[info.name].shape == info.shape:
            return small.file.chunks(info.name)
        values = small.file.values(info.name)
        gaps = [(0, wanted - size) for wanted, size in zip(info.shape, values.shape, strict=True)]
        return (encode(np.pad(values, gaps), info.dtype, name=info.name),)

    tensors = list(big.file.tensors.values())
    write_tensor_file(folder / WEIGHTS_FILE, tensors, contents, dict(big.file.metadata))


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard-link the file, since optimizer states are large; copy it if the file system has no links."""
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)


# Evaluates any checkpoint of a run as the run evaluates its policy.


def run_of(adapter: Path) -> Path:
    """The run that saved an adapter: the nearest parent folder with a `run.json`; ConfigError if there is none."""
    for folder in adapter.resolve().parents:
        if is_run(folder):
            return folder
    what = "no parent folder is a run, so it is unknown what to evaluate the adapter on"
    raise ConfigError(Problem(where=str(adapter), what=what, fix="give the run: --run DIR"))


@contextmanager
def evaluator(run: Path, plugins: Plugins, overrides: Sequence[str] = ()) -> Iterator[Evaluate]:
    """Within the block, a function that evaluates a checkpoint folder as the run `run` evaluated its policy.

    The model is loaded once. ConfigError when the run has no held-out examples.
    """
    with opened(find_subject(run, BASE), plugins, overrides) as policy:
        if not policy.config.eval.examples:
            why = "every example may have been trained on, and a rate on those is meaningless"
            fix = "train with [eval] examples, for instance --eval-examples 64"
            raise ConfigError(Problem(where=str(run), what="this run held out no examples", why=why, fix=fix))
        tasks = load_tasks(policy.context)
        with closed_on_error(tasks.verifier):
            evaluation = plugins.notify("retrain_evaluation", context=policy.context, tasks=tasks)
            if evaluation is None:
                what, fix = "the part of retrain-core that evaluates is missing", "reinstall retrain-core"
                raise PluginError(Problem(where="--eval", what=what, fix=fix))
        try:
            yield lambda folder: _evaluate(policy, evaluation, folder)
        finally:
            evaluation.close()
            tasks.verifier.close()


def _evaluate(policy: Opened, evaluation: Any, checkpoint: Path) -> Mapping[str, float]:
    policy.use(checkpoint)
    found: Mapping[str, float] = evaluation.measure(0, policy.backend, None)
    return {name: value for name, value in found.items() if not name.endswith("time_s")}
