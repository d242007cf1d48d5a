"""A run folder as an object: configuration, records, trained weights, and resumption."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import retrain.records.run as records
from retrain.facade.hosting import arguments_of, briefly_told, data_file, held_interrupts, restored_imports, rows_of
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.records.reading import damaged
from retrain.records.record_names import CONFIG_FILE, RUN_FILE
from retrain.run.backend import import_backend
from retrain.run.configure import load_file
from retrain.run.opened import opened, subject_config
from retrain.run.subject import find_subject
from retrain.text.process import prepare_process
from retrain.use.evaluate.subjects import Request, evaluate_subject
from retrain.use.sample_command import Prompt, Wanted, prompts_of, read_prompts, sample_file

LOG = logging.getLogger("retrain")
OnStep = Callable[[Mapping[str, Any]], object]


class Run:
    """A run by its `folder`, finished or not; its files are read on demand.

    It is a path, too: `open(run / "metrics.jsonl")`, `retrain.compare([run_a, run_b])`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder).expanduser()
        if not records.is_run(self.folder):
            what, fix = "is not the folder of a run", f"give the log_dir of a run that had started, with {RUN_FILE}"
            raise ConfigError(Problem(code="run.not-a-run", where=str(self.folder), what=what, fix=fix))

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Every table with every key as the run used it, defaults included; secrets are hidden."""
        found = self._records.manifest.get("config")
        if not isinstance(found, dict):
            raise damaged(str(self.folder / RUN_FILE), "it holds no configuration")
        return dict(found)

    @property
    def status(self) -> str:
        """`running`, `done`, `stopped` (by a signal, with a checkpoint), `failed`, or `dead`: as `retrain status`."""
        from retrain.records.runs.run_status import status_of_run

        return status_of_run(self.folder).state

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, one per step; the evaluation before training has `step` -1."""
        self._is_looked_at()
        return [dict(record) for _, record in self._records.steps()]

    @property
    def metrics(self) -> Any:
        """`rows` as a pandas DataFrame, one column per field; without pandas, `rows` itself."""
        if find_spec("pandas") is None:
            return self.rows
        import pandas  # takes a second, and only this needs it

        return pandas.DataFrame(self.rows)

    @property
    def completions(self) -> Iterator[Mapping[str, Any]]:
        """Every completion in the order of steps, read from the file one by one: `generations.jsonl`.

        Among the fields are `step`, `group`, `prompt`, `completion`, `reward` and `trained`.
        """
        self._is_looked_at()
        return (record for _, record in self._records.completions())

    @property
    def adapter(self) -> Path:
        """The folder of the newest checkpoint, loadable by PEFT; ConfigError before the first one."""
        folder = find_subject(self.folder).folder
        assert folder is not None  # of a run it is a checkpoint, or an error
        return folder

    def resume(self, *, on_step: OnStep | None = None, quiet: bool = False, **overrides: Any) -> Run:
        """Continue from the newest checkpoint as `retrain --resume`, in the same folder: bit by bit the same run.

        `overrides` as in `retrain.train`: `run.resume(max_steps=200)`. ResumeError when code, data or keys have
        changed; `resume_anyway=True` accepts that. A complete run is left unchanged.
        """
        return train(self.folder / CONFIG_FILE, resume=self.folder, on_step=on_step, quiet=quiet, **overrides)

    def evaluate(
        self,
        *,
        sets: Sequence[str] = (),
        checkpoints: Sequence[str | int] = (),
        data: Any = "",
        reward: str = "",
        examples: int | None = None,
        samples: int | None = None,
        greedy: bool = False,
        out: str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> list[dict[str, Any]]:
        """Score the trained policy, as `retrain eval`: one entry per checkpoint and set.

        Each has `checkpoint`, `steps`, `set`, `correct_rate`, `ci_low`, `ci_high`, `pass_at_...` and `file`, with the
        records of single examples. By default the newest checkpoint is scored on the run's own sets. `checkpoints`
        are `best`, `final`, `base`, `all` or numbers of steps. `data` takes the place of the sets: a
        file or a data source, a list of dicts, a pandas or polars DataFrame, or a `datasets.Dataset`, judged by the
        `reward` of that name; `examples`, `samples` and `greedy` are about it. Its columns are the run's unless
        `prompt_key`, `answer_key` or `messages_key` says otherwise; other keys are keywords, too.

        >>> [(entry["set"], entry["correct_rate"]) for entry in retrain.load("logs/tiny").evaluate()]
        [('held_out', 0...)]
        """
        given = {"examples": examples, "samples": samples, "greedy": greedy or None}
        changed = {name: value for name, value in given.items() if value is not None}
        with briefly_told(), restored_imports(), tempfile.TemporaryDirectory(prefix="retrain-data-") as folder:
            plugins, file = _ready_plugins(self.folder), data_file(data, Path(folder), "run.evaluate(data=...)")
            if (changed or reward) and not file:
                where, fix = f"run.evaluate({next(iter(changed), 'reward')}=...)", "add data, or leave it out"
                raise ConfigError(Problem(code="eval.needs-data", where=where, what="needs `data`", fix=fix))
            request = Request(
                named=str(self.folder),
                sets=tuple(sets),
                checkpoints=tuple(map(str, checkpoints)),
                data=file,
                reward=reward,
                changed=changed,
                overrides=tuple(arguments_of(overrides)),
                out=Path(out) if out is not None else None,
            )
            return [result.as_data() for result in evaluate_subject(request, plugins, LOG.info)]

    def sample(
        self,
        prompts: Any,
        *,
        samples: int = 1,
        greedy: bool = False,
        seed: int = 0,
        checkpoint: str = "",
        raw: bool = False,
        **overrides: Any,
    ) -> list[dict[str, Any]]:
        """Sample completions of prompts, as `retrain sample`: one entry per prompt.

        `prompts` are texts or chats, or data as of `evaluate` with the prompt in a column: `prompt_key` or
        `messages_key` names it; by default it is the run's, or a usual one.

        Each has `prompt`, `completions`, `stop_reasons` and `num_tokens`. `checkpoint` is `best`, `final`, `base` or a
        number of steps, by default the newest; `raw` leaves the chat template out; `temperature=0.7` and other keys are
        keywords. ConfigError names a prompt that cannot be used.

        >>> retrain.load("logs/tiny").sample(["What is 2 + 3?"], greedy=True)[0]["num_tokens"]
        [10]
        """
        wanted = Wanted(samples=samples, greedy=greedy, seed=seed, raw=raw, tokens=False, logprobs=False)
        with briefly_told(), restored_imports(), tempfile.TemporaryDirectory(prefix="retrain-sample-") as folder:
            plugins, file = _ready_plugins(self.folder), Path(folder, "samples.jsonl")
            policy, arguments = find_subject(self.folder, checkpoint), arguments_of(overrides)
            asked = _prompts(prompts, subject_config(policy, plugins, arguments).config, plugins)
            with opened(policy, plugins, arguments) as source:
                sample_file(source, asked, wanted, file)
            entries = sorted(map(json.loads, file.read_text("utf-8").splitlines()), key=lambda line: int(line["index"]))
        return [{name: each[name] for name in each if name not in ("index", "settings")} for each in entries]

    @property
    def _records(self) -> records.Run:
        return records.Run(self.folder)

    def _is_looked_at(self) -> None:
        """Record a look at the results of an unfinished campaign, as the commands do."""
        from retrain.verdicts.ledger.looks import InterimLooks

        InterimLooks("retrain.load", LOG.warning).at([self.folder])

    def __fspath__(self) -> str:
        return str(self.folder)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}, status={self.status!r})"


def train(
    config: Mapping[str, Any] | str | os.PathLike[str],
    /,
    *,
    data: Any = None,
    on_step: OnStep | None = None,
    reward: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    transform: Callable[..., Any] | None = None,
    uncertainty: Callable[..., Any] | None = None,
    resume: str | os.PathLike[str] | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Train, and return the finished run.

    `config` is the path of a TOML file, or its tables: `{"training": {"max_steps": 20}}`. `overrides` are the flags of
    the command line: `lr=1e-4` is `--lr 1e-4`. Variables of the environment and `.env` count as they do there.

    `data` takes the place of `[data] source` and `path`: a file, a list of dicts, a pandas or polars DataFrame, or a
    `datasets.Dataset`; `prompt_key`, `answer_key` or `messages_key` names its columns. Rows are kept in `logs/data`.

    `reward(response, reference)`, or `reward(example, completion)`, gives a number, `retrain.api.Score` or None.
    `advantage`, `transform` and `uncertainty` take the arguments of such plugins. A function of a notebook or a script
    is copied into the run folder with the imports, constants and functions that it uses, so that scoring processes and
    a resume have it; ConfigError says what of it cannot be copied. Names of plugins belong in `config`.

    `on_step(metrics)` is called after each line of `metrics.jsonl`: every step, and the evaluation before training. An
    exception in it fails the run, and checkpoints stay; KeyboardInterrupt in it stops the run with a checkpoint.
    `resume` continues the run in that folder. `quiet` prints only warnings and the outcome.

    Raises ConfigError and PluginError before anything starts, with every problem at once; ResumeError; other
    RetrainErrors when the run fails; RunStopped when it was interrupted, with a checkpoint saved.

    >>> run = retrain.train("retrain.toml", max_steps=2, eval_examples=8, quiet=True, log_dir="logs/short")
    Training complete. maxrl+gtpo_sepa, 2 steps, running correct rate: ...
    >>> [row["step"] for row in run.rows]
    [-1, 0, 1]
    """
    functions = {"reward": reward, "advantage": advantage, "transform": transform, "uncertainty": uncertainty}
    if resume is not None:
        overrides["resume"] = os.fspath(resume)

    with held_interrupts():
        from retrain.facade.training import run_training

    folder, reason = run_training(config, overrides, functions, on_step, data=data, is_quiet=quiet)
    run = Run(folder)
    if reason:
        raise RunStopped(run, reason)  # here, where no frame of the run, with its model, is kept alive by it
    return run


class RunStopped(KeyboardInterrupt):
    """Ctrl-C, the interrupt button or SIGTERM stopped `retrain.train`; `run` can be resumed from a checkpoint.

    A KeyboardInterrupt, so that the rest of a script or notebook does not continue with half a run.
    """

    def __init__(self, run: Run, reason: str) -> None:
        how = f"run = retrain.load({str(run.folder)!r}); run.resume()"
        super().__init__(f"stopped by {reason}; the state is saved. To continue: {how}")
        self.run = run

    def _render_traceback_(self) -> list[str]:
        return [f"retrain: {self}"]


def load(folder: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, finished or not; ConfigError if the folder has no run."""
    return Run(folder)


def _prompts(given: Any, config: Config, plugins: Plugins) -> list[Prompt]:
    if isinstance(given, str | os.PathLike):
        return read_prompts(os.fspath(given), config, plugins)
    argument = "run.sample(prompts)"
    entries = list(given) if isinstance(given, list | tuple | Iterator) else rows_of(given, argument)
    if any(isinstance(each, Mapping) for each in entries):
        entries = rows_of(entries, argument)
    return prompts_of([(f"{argument[:-1]}[{number}])", each) for number, each in enumerate(entries)], config)


def _ready_plugins(run: Path) -> Plugins:
    """Load the plugins and the libraries of the run's backend, whose import no interrupt may break."""
    with held_interrupts():
        prepare_process()
        plugins = load_plugins()
        with suppress(RetrainError):  # raised again when the run is opened
            import_backend(load_file(run / CONFIG_FILE, (), plugins).config, plugins)
    return plugins
