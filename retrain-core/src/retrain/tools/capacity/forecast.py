"""The needs of a configuration: memory by its sizes, time by earlier runs of the same work on this machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from retrain.credit.flow import build_flow
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, MemoryModel, Workload
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.records.reading import table_of
from retrain.records.record_names import RUN_FILE
from retrain.records.run import Run
from retrain.text.amounts import counted, duration
from retrain.tools.capacity import workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    model: MemoryModel
    work: Workload
    estimate: MemoryEstimate
    time: RunTime
    past: Past
    limit_bytes: int | None
    runtime_bytes: int | None

    @property
    def step_tokens(self) -> int:
        return (self.work.completions + self.work.greedy_completions) * self.work.max_tokens

    @property
    def advice(self) -> str:
        limit = self.limit_bytes
        if not limit or self.estimate.needed_bytes <= int(limit * workload.SAFETY[self.work.device]):
            return ""
        from retrain.tools.capacity.advice import advise  # most forecasts fit

        model, runtime = self.model, self.runtime_bytes
        return advise(
            self.work, limit, lambda work: model.estimate(work, runtime, limit), can_quantise=model.can_quantise
        )

    @property
    def is_prompt_assumed(self) -> bool:
        """True if neither a past run nor the user gives the length of prompts."""
        return self.past.prompt_tokens is None and self.work.prompt_tokens == workload.ASSUMED_PROMPT_TOKENS


def forecast(
    config: Config,
    plugins: Plugins,
    *,
    prompt_tokens: int = 0,
    fetch: bool = False,
    past: Past | None = None,
    gpu_bytes: int | None = None,
    sizes: Mapping[str, Any] | None = None,
) -> Forecast:
    """Return the needs of the configuration on this machine; `past` (of a pilot) replaces the runs in `logs/`.

    With `gpu_bytes` they are the needs on CUDA GPUs of that memory, whatever this machine has. `sizes` takes the place
    of the model's `config.json`. ConfigError if the model's sizes cannot be read, or no plugin estimates the backend's
    memory.
    """
    with TemporaryDirectory() as scratch:
        folder = partial(model_folder, config, plugins, fetch=fetch, scratch=Path(scratch), sizes=sizes)
        name = config.backend.backend
        model: MemoryModel | None = plugins.call_backend("estimate_memory", config, folder, backend=name)
    if model is None:
        what = f"no plugin knows how much memory backend {name!r} needs"
        where, fix = config.place("backend.backend"), "measure it with --pilot 3"
        raise ConfigError(Problem(code="capacity.no-estimate", where=where, what=what, fix=fix))
    if past is None:
        # Runs of this machine say nothing about the speed or the idle memory of another.
        past = Past() if gpu_bytes else past_runs(config)
    prompt, device = prompt_tokens or past.prompt_tokens or 0, "cuda" if gpu_bytes else None
    if not prompt and fetch and sizes is None:
        prompt = longest_prompt(config, plugins)
    work = workload.workload_of(config, prompt_tokens=prompt, context=model.context, device=device)
    if build_flow(config, plugins).needs_greedy:
        work = replace(work, greedy_completions=work.batch_size)
    limit = gpu_bytes or workload.memory_limit(config.backend.devices)
    # Memory of the process without the model. On a GPU it is not measured.
    runtime = None
    if past.memory_at_start_bytes is not None and work.device == "cpu":
        resident = model.estimate(work, 0, limit).phases[0].resident
        loaded = sum(resident.get(name, 0) for name in ("weights", "sampler", "adapter"))
        runtime = max(0, past.memory_at_start_bytes - loaded)
    return Forecast(
        model=model,
        work=work,
        estimate=model.estimate(work, runtime, limit),
        time=run_time(config, past),
        past=past,
        limit_bytes=limit,
        runtime_bytes=runtime,
    )


PROMPTS_READ = 1000


def longest_prompt(config: Config, plugins: Plugins) -> int:
    """Return the tokens of the longest of the first prompts, if both data and model are files here; otherwise 0."""
    name = config.model.model
    is_here = plugins.locate_model(name) is not None or Path(name).expanduser().is_dir()
    if is_here and config.data.path and Path(config.data.path).expanduser().exists():
        from retrain.run.opened import run_context  # most forecasts read no data
        from retrain.tasks.prompts import encode_prompts
        from retrain.tasks.scoring.build import load_data

        with suppress(RetrainError):  # a forecast does without them
            context = run_context(config, plugins, 0)
            examples = load_data(config, context).examples[:PROMPTS_READ]
            return max(map(len, encode_prompts(examples, context.tokenizer, config)), default=0)
    return 0


def model_folder(
    config: Config, plugins: Plugins, name: str = "", *, fetch: bool, scratch: Path, sizes: Mapping[str, Any] | None
) -> Path:
    """Return a folder with the `config.json` of the run's model, or of the model `name`; weights are not needed.

    It is local, shipped by a plugin, in the hub's cache, or written below `scratch`: from `sizes` for the run's model,
    or from the table of known models. `fetch` downloads it for any other model. ConfigError otherwise.
    """
    if sizes is not None and not name:
        from retrain.tools.capacity.shapes import write_document

        return write_document(sizes, scratch / "sizes")
    where = config.place("teacher.model" if name else "model.model")
    name = name or config.model.model
    located = plugins.locate_model(name)
    folder = Path(located or name).expanduser()
    if located is not None or folder.is_dir():
        return folder
    from retrain.tools.capacity.shapes import folder_of_known  # only for a model that is not here

    return folder_of_known(name, where, fetch=fetch, scratch=scratch)


MAX_DEPTH = 4  # logs/campaign/runs/NAME/run.json
MAX_RUNS = 2000
# Memory and time depend on these: a past run that agrees in them did the same work.
SAME_WORK = (
    ("model", "model"),
    ("model", "lora_rank"),
    ("backend", "backend"),
    ("backend", "devices"),
    ("backend", "options"),
    ("training", "batch_size"),
    ("training", "group_size"),
    ("training", "max_tokens"),
    ("training", "minibatches"),
    ("training", "epochs"),
    ("training", "refill"),
    ("inference", "engine"),
    ("inference", "dtype"),
    ("inference", "kv_cache_dtype"),
    ("model", "dtype"),
)
SAME_PROCESS = SAME_WORK[:1] + SAME_WORK[2:4]  # the memory of an idle process depends on these


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """Medians over past runs, None if unknown; `runs` counts those with the same work on this machine."""

    runs: int = 0
    median_step_time_s: float | None = None
    peak_memory_bytes: int | None = None
    memory_at_start_bytes: int | None = None
    prompt_tokens: int | None = None
    eval_completion_s: float | None = None


def past_runs(config: Config, folder: Path | None = None) -> Past:
    """Read the `run.json` files below a folder (by default the parent of the run's) for runs of this configuration."""
    same_work: list[Mapping[str, Any]] = []
    same_process: list[Mapping[str, Any]] = []
    now, folder = config.as_dict(), folder or Path(config.logging.log_dir).expanduser().parent
    work, this_machine = _work(now), {"machine": platform.machine(), "cores": os.cpu_count()}
    for manifest in islice(_manifests(folder), MAX_RUNS):
        measured = table_of(manifest, "capacity", "measured")
        hardware = table_of(manifest, "hardware")
        if not measured or any(hardware.get(name) != value for name, value in this_machine.items()):
            continue
        before = _work(table_of(manifest, "config"))
        same_process += [measured] if all(before[key] == work[key] for key in SAME_PROCESS) else []
        same_work += [measured] if before == work else []
    # Any of their configurations would do: the same work has steps of the same size.
    each_s = [{"s": eval_completion_s(measured, now)} for measured in same_work]
    return Past(
        runs=len(same_work),
        median_step_time_s=_median(same_work, "median_step_time_s"),
        peak_memory_bytes=_whole(_median(same_work, "peak_memory_bytes")),
        memory_at_start_bytes=_whole(_median(same_process, "memory_at_start_bytes")),
        prompt_tokens=_whole(_median(same_process, "longest_prompt_tokens")),
        eval_completion_s=_median(each_s, "s"),
    )


def eval_completion_s(measured: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """Return the seconds of one evaluated completion: measured, or the time in which a step sampled one."""
    if (measured_s := workload.positive(measured.get("eval_completion_time_s"))) is not None:
        return measured_s
    share = workload.positive(table_of(measured, "time_shares").get("sample"))
    step_s = workload.positive(measured.get("median_step_time_s"))
    if share is None or step_s is None:
        return None
    completions: int = config["training"]["batch_size"] * config["training"]["group_size"]
    return share * step_s / completions


def _manifests(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the `run.json` of runs and of campaigns' runs; links are not followed, nor is a run's folder entered."""
    for place, folders, files in os.walk(folder):
        run = Path(place)
        if RUN_FILE in files or len(run.relative_to(folder).parts) == MAX_DEPTH:
            folders.clear()
        folders.sort()
        if RUN_FILE in files:
            with suppress(ConfigError):
                yield Run(run).manifest


def _work(config: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return the values of `SAME_WORK`; a GPU that this machine lacks is the CPU that a run takes instead."""
    found = {(table, name): table_of(config, table).get(name) for table, name in SAME_WORK}
    if isinstance(devices := found["backend", "devices"], str):
        found["backend", "devices"] = [workload.device_kind(each.strip()) for each in devices.split(",")]
    return found


def _median(found: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for record in found if (value := workload.positive(record.get(name))) is not None]
    return statistics.median(values) if values else None


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# Share of a step's time that is sampling, until a run has measured it.
ASSUMED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Work and time left of a run, or of all runs of a campaign.

    Seconds are None until a past run or a pilot has measured them. `warning` names the keys to change where the
    evaluations take longer than the training; otherwise it is empty.
    """

    schedule: workload.Schedule
    training: str
    evaluation: str
    training_s: float | None
    evaluation_s: float | None
    warning: str

    @property
    def total_s(self) -> float | None:
        return None if self.training_s is None else self.training_s + (self.evaluation_s or 0.0)

    def rows(self) -> dict[str, str]:
        """Return rows for `retrain explain`; empty for a run that evaluates nothing, or of unknown time."""
        if not self.evaluation_s:
            return {}
        return {
            "training_time": f"{duration(self.training_s)} ({self.training})",
            "evaluation_time": f"{duration(self.evaluation_s)} ({self.evaluation})",
        }


def run_time(config: Config, past: Past, *, steps_done: int = 0) -> RunTime:
    schedule, completions = workload.schedule_of(config), workload.eval_completions_of(config)
    steps = max(schedule.max_steps - steps_done, 0)
    number = workload.evaluations(schedule.max_steps, config.eval.every, steps_done) if completions else 0
    step_size = config.training.batch_size * config.training.group_size
    step_s, each_s = past.median_step_time_s, past.eval_completion_s if completions else 0.0
    share = partial(_share, config, each_s * step_size / step_s if each_s is not None and step_s else ASSUMED_SHARE)
    runs = f"{schedule.runs} runs x " if schedule.runs > 1 else ""
    warning = ""
    if share() > 1.0:
        from retrain.tools.capacity.advice import shorter_evaluations  # few configurations need it

        longer = f"the evaluations take longer than the training, about {share():.1f} times its time"
        warning = f"{longer}: {shorter_evaluations(config, share)}"
    return RunTime(
        schedule=schedule,
        training=f"{runs}{counted(steps, 'step')}",
        evaluation=f"{runs}{counted(number, 'evaluation')} of {counted(completions, 'completion')}" if number else "",
        training_s=None if step_s is None else schedule.seconds(steps * step_s),
        evaluation_s=None if each_s is None else schedule.seconds(number * completions * each_s),
        warning=warning,
    )


def _share(config: Config, of_step: float, **changes: int) -> float:
    """Return the time of all evaluations divided by the time of all steps.

    `of_step` is the time to evaluate as many completions as a step samples, divided by the time of a step.
    """
    evaluation = config.eval.model_copy(update=changes)
    completions = workload.eval_completions_of(replace(config, tables={**config.tables, "eval": evaluation}))
    steps, training = workload.schedule_of(config).max_steps, config.training
    work = steps * training.batch_size * training.group_size
    return workload.evaluations(steps, evaluation.every) * completions * of_step / work
