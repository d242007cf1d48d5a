"""Evaluates subjects, one or several checkpoints of each, on the sets of their configuration or on others."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config, Layer
from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind, Outcome, Score
from retrain.records.checkpoints import SUMS
from retrain.records.files import JsonLines, digest_of
from retrain.records.reading import read_records
from retrain.records.record_names import CONFIG_FILE
from retrain.records.run import Run
from retrain.run.opened import Opened, opened, subject_config
from retrain.run.subject import Subject, SubjectKind, checkpoints_of, find_subject
from retrain.tasks.loading import load_tasks
from retrain.tasks.tasks import Tasks
from retrain.text.chat import prompt_text
from retrain.text.secrets import hide
from retrain.text.tables import progress_bar
from retrain.text.terminal_text import printable
from retrain.use.evaluate import sets as eval_sets
from retrain.use.evaluate.evaluation import Record, evaluate, set_fields, set_records
from retrain.verdicts.ledger.looks import InterimLooks

LOG = logging.getLogger("retrain")
ALL = "all"
COLUMN_KEYS = ("prompt_key", "answer_key", "messages_key")
# Reading larger files would take longer than many evaluations; size and time identify them instead.
SMALL_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An evaluation to run, as given on the command line.

    `checkpoints` are names as of `find_subject`, or `all`; `sets` are names of the configuration's sets, all if empty.
    `data` is a file or a data source, judged by `reward`; `changed` are the keys of a set that flags override.
    """

    named: str
    checkpoints: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    file: Path | None = None
    data: str = ""
    reward: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    out: Path | None = None
    at_once: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One policy on one set.

    `own` counts the samples equal to those that the run recorded at that step, and all of them; None if the run
    evaluated otherwise or not at all.
    """

    subject: Subject
    set: str
    fields: Mapping[str, Any]
    file: Path
    own: tuple[int, int] | None = None

    def as_data(self) -> dict[str, Any]:
        subject = self.subject
        return {
            "subject": subject.named,
            "run": str(subject.run) if subject.run else None,
            "checkpoint": subject.checkpoint or None,
            "steps": subject.steps,
            "set": self.set,
            **self.fields,
            "own": {"same_as_run": self.own[0], "of": self.own[1]} if self.own else None,
            "file": str(self.file),
        }


def evaluate_subject(request: Request, plugins: Plugins, say: Callable[[str], None]) -> Iterator[Result]:
    """Yield the results of every requested checkpoint on every set; recorded results are not computed again."""
    found: list[Subject] = []
    for checkpoint in request.checkpoints or ("",):
        if checkpoint != ALL:
            found.append(find_subject(request.named, checkpoint))
        elif run := find_subject(request.named).run:
            found += {subject.steps: subject for subject in checkpoints_of(run)}.values()
        else:
            what = "--checkpoint all needs a run"
            fix = "give the folder of a run"
            raise ConfigError(Problem(code="eval.needs-run", where=printable(request.named), what=what, fix=fix))
    subjects = list({(subject.folder, subject.steps): subject for subject in found}.values())
    first = subjects[0]
    InterimLooks("eval", say).at([first.run] if first.run else [])
    overrides, file = _overrides(request, first)
    config = subject_config(first, plugins, overrides, file=file).config
    # None means the held-out examples; every fault is found before anything loads
    wanted = {} if request.data and not request.sets else _of_config(request, config)
    wanted |= _given(request, config, plugins) if request.data else {}
    if None in wanted.values():
        _refuse_another_split(first, config)
    sets: list[eval_sets.LoadedSet] = []
    with ExitStack() as stack:

        def load(context: PluginContext) -> None:
            """Load the sets; their verifiers close with the stack."""
            tasks = _tasks(context, first, needed=None in wanted.values())
            if tasks:
                stack.callback(tasks.verifier.close)
            for name, each in wanted.items():
                if each is None:
                    named = [t for t in (tasks or load_tasks(context)).each if name == (t.name or eval_sets.HELD_OUT)]
                    sets.extend(eval_sets.held_out_set(t.context, t) for t in named if t.pool.held_out)
                    continue
                sets.append(eval_sets.load_set(each, context, tasks))
                if not sets[-1].is_shared:
                    stack.callback(sets[-1].verifier.close)

        policy = stack.enter_context(opened(first, plugins, overrides, file=file, before_model=load))
        for subject in subjects:
            policy.use(subject.folder)
            for each in sets:
                yield _result(request, policy, subject, each)


def _overrides(request: Request, subject: Subject) -> tuple[list[str], Path | None]:
    """Return flags and file of the configuration; a file given for a run only adds its `[eval.sets]`."""
    if request.file is None or subject.run is None:
        return list(request.overrides), request.file
    own, added = (
        read_toml(file)[0].get("eval", {}).get("sets", {}) for file in (subject.run / CONFIG_FILE, request.file)
    )
    if not added or not isinstance(added, dict):
        what = "has no [eval.sets.NAME], the only table that `retrain eval RUN` reads"
        fix = "add a table [eval.sets.NAME] with the set's data"
        raise ConfigError(Problem(code="eval.no-sets", where=str(request.file), what=what, fix=fix))
    return [f"--eval-sets={json.dumps({**own, **added})}", *request.overrides], None


def _refuse_another_split(subject: Subject, config: Config) -> None:
    """Raise ConfigError for keys that would evaluate on examples that the run trained on."""
    recorded = read_toml(subject.run / CONFIG_FILE)[0].get("eval", {}) if subject.run else {}
    if not recorded:
        return
    held_out, wanted, seed = recorded.get("examples", 0), config.eval.examples, recorded.get("seed", 0)
    if wanted > held_out:
        path, what = "eval.examples", f"{wanted} held-out examples wanted, but the run held out {held_out}"
    elif config.eval.seed != seed:
        path, what = "eval.seed", f"is {config.eval.seed}, and the run held out its examples with {seed}"
    else:
        return
    fix = "remove it, or use other data: --data FILE"
    why = "the run trained on the others"
    raise ConfigError(Problem(code="eval.other-split", where=config.place(path), what=what, why=why, fix=fix))


def _of_config(request: Request, config: Config) -> dict[str, eval_sets.EvalSet | None]:
    sets, problems = eval_sets.read_sets(config)
    if problems:
        raise ConfigError(*problems)
    named = config.data.task_names or ((eval_sets.HELD_OUT,) if config.eval.examples else ())
    known: dict[str, eval_sets.EvalSet | None] = dict.fromkeys(named)
    known |= {each.name: each for each in sets}
    for name in request.sets:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            fix = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known) or 'none'}"
            what = f"there is no set {printable(name)!r}"
            raise ConfigError(Problem(code="eval.unknown-set", where="--eval-set", what=what, fix=fix))
    if not known:
        what = "there is nothing to evaluate on: neither [eval] examples nor [eval.sets.NAME]"
        fix = "name data and reward: --data FILE --reward match, or a file with sets: --config FILE"
        raise ConfigError(Problem(code="eval.nothing-to-evaluate", where=printable(request.named), what=what, fix=fix))
    return {name: known[name] for name in request.sets} or known


def _given(request: Request, config: Config, plugins: Plugins) -> dict[str, eval_sets.EvalSet | None]:
    path = Path(request.data)
    is_source = not path.exists() and bool(plugins.find(Kind.DATA_SOURCE, request.data))
    values: dict[str, Any] = {"source": request.data} if is_source else {"source": "files", "path": request.data}
    # Files may have the columns of the run's data. A named source has other ones, unless a flag names them.
    if values["source"] != config.data.source:
        origins = {key: config.origin(f"data.{key}") for key in COLUMN_KEYS}
        given = [key for key, origin in origins.items() if origin != DEFAULT_ORIGIN]
        given = [key for key in given if not is_source or origins[key].layer is Layer.COMMAND_LINE]
        values |= {key: getattr(config.data, key) for key in given}
    values |= {"reward": request.reward} if request.reward else {}
    name = re.sub(r"\W", "_", path.stem, flags=re.ASCII).lstrip("_0123456789")
    # The name becomes part of metric names, so it must be an identifier and not the run's own.
    name = "data" if name in ("", eval_sets.HELD_OUT) else name
    found, problems = eval_sets.read_set(name, values | dict(request.changed), config, "--data")
    problems += eval_sets.problems_with(found, plugins) if found else []
    if problems:
        raise ConfigError(*problems)
    return {name: found}


def _tasks(context: PluginContext, subject: Subject, *, needed: bool) -> Tasks | None:
    """Return the run's tasks, whose examples no set may contain; None if neither a run nor held-out examples."""
    if not needed and subject.kind is not SubjectKind.RUN:
        return None
    try:
        return load_tasks(context)
    except RetrainError as error:
        if needed:
            raise
        LOG.warning("The run's own data cannot be loaded, so its training examples are not left out: %s", error)
        return None


def _result(request: Request, policy: Opened, subject: Subject, each: eval_sets.LoadedSet) -> Result:
    """Evaluate one policy on one set: read the recorded part, and record the rest in portions."""
    name = re.sub(r"[^\w.-]+", "_", request.named).strip("._") or "model"
    folder = request.out or (subject.run / "evaluations" if subject.run else Path("logs/evaluations", name))
    file = ResultFile(folder, subject, each)
    step = -1 if subject.steps is None else subject.steps - 1
    records = file.read(each.prompts, request.at_once)
    for start in range(len(records), len(each.prompts), request.at_once):
        portion = each.prompts[start : start + request.at_once]
        label = f"eval_{step + 1:06d}_{each.name}"
        done = f"{subject.label}, {each.name}: {start} of {len(each.prompts)} examples done"
        with progress_bar(done, policy.context.sampling_progress):
            found = evaluate(each, portion, policy.backend, label=label, failures=folder / "failures")
        fresh = set_records(each, portion, found, step)
        file.append(fresh)
        records += fresh
    # before its first step a run has had its warm-up
    has_warm_up = subject.steps == 0 and bool(policy.config.sft.steps)
    # With other settings the samples differ anyway, so comparing them with the run's own would say nothing.
    is_changed = any(origin.layer is Layer.ENVIRONMENT for origin in policy.config.origins.values())
    is_repeated = not (request.file or request.data or request.overrides or is_changed or has_warm_up)
    recorded = Run(subject.run).evaluations() if subject.run and is_repeated else ()
    own = [record for record in recorded if (record.get("step"), record.get("set")) == (step, each.name)]
    fields = set_fields(each, [scores_of(record) for record in records], policy.plugins)
    return Result(
        subject=subject,
        set=each.name,
        fields={name.removeprefix(each.prefix): value for name, value in fields.items()},
        file=file.path,
        own=_same_as(own, records),
    )


def _same_as(own: Sequence[Record], records: Sequence[Record]) -> tuple[int, int] | None:
    """Count the samples that equal the run's in score, length and end, and all; None if it recorded none."""
    if not own:
        return None

    def samples(record: Record) -> list[tuple[Any, ...]]:
        return list(zip(record["scores"], record["lengths"], record["stops"], strict=True))

    by_name = {record["example"]: samples(record) for record in own}
    pairs = [(samples(record), by_name.get(record["example"], [])) for record in records]
    same = sum(now == then for found, recorded in pairs for now, then in zip(found, recorded, strict=False))
    return same, sum(len(found) for found, _ in pairs)


class ResultFile:
    """`<folder>/<checkpoint>/<set>-<hash>.jsonl`; the hash covers everything that affects samples and scores."""

    def __init__(self, folder: Path, subject: Subject, each: eval_sets.LoadedSet) -> None:
        self._header = _header(subject, each)
        text = json.dumps(self._header, sort_keys=True)
        code = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        self.path = folder / (subject.checkpoint or "model") / f"{each.name}-{code}.jsonl"

    def read(self, prompts: Sequence[Prompt], at_once: int) -> list[Record]:
        """Return the records of the finished examples, whole portions of `at_once`; a later rest is cut off.

        ConfigError when the file is damaged.
        """
        if not self.path.exists():
            return []
        found = [record for _, record in read_records(self.path)]
        # The evaluation was stopped while it wrote its first line.
        if not found:
            self.path.unlink()
            return []
        names = [record.get("example") for record in found[1:]]
        if found[:1] != [self._header] or names != [prompt.example.id for prompt in prompts[: len(names)]]:
            what, fix = "is the record of another evaluation", "delete this file, and evaluate again"
            raise ConfigError(Problem(code="eval.other-record", where=str(self.path), what=what, fix=fix))
        # A portion is sampled as one batch, and rounding depends on the batch: a partial one is done again.
        whole = len(names) if len(names) == len(prompts) else len(names) // at_once * at_once
        with self.path.open("r+b") as stream:
            for _ in range(whole + 1):
                stream.readline()
            stream.truncate(stream.tell())
        return found[1 : whole + 1]

    def append(self, records: Sequence[Record]) -> None:
        """Add the records of further examples, all or none of them; RecordError when the disk refuses."""
        is_new = not self.path.exists()
        with closing(JsonLines(self.path)) as lines:
            lines.write([self._header, *records] if is_new else records)
            lines.sync()


def scores_of(record: Record) -> tuple[Score, ...]:
    parts: Mapping[str, Sequence[float | None]] = record.get("parts", {})
    scores = _scores(record)
    shadows = _scores(record, "shadow_") if "shadow_scores" in record else [None] * len(scores)
    return tuple(
        replace(
            score,
            parts={name: found for name, all_G in parts.items() if (found := all_G[index]) is not None},
            shadow=shadow,
        )
        for index, (score, shadow) in enumerate(zip(scores, shadows, strict=True))
    )


def _scores(record: Record, prefix: str = "") -> list[Score]:
    values: Sequence[float | None] = record[f"{prefix}scores"]
    outcomes = record.get(f"{prefix}outcomes") or [Outcome.SCORED.value] * len(values)
    return [Score(outcome=Outcome(name), value=value) for value, name in zip(values, outcomes, strict=True)]


def _header(subject: Subject, each: eval_sets.LoadedSet) -> dict[str, Any]:
    config = each.context.config
    digest = hashlib.blake2b(digest_size=16)
    for prompt in each.prompts:
        parts = (prompt.example.id, prompt_text(prompt.example), prompt.example.reference)
        digest.update(json.dumps(parts).encode() + prompt.tokens_T.tobytes())
    params = each.params
    return {
        "model": subject.model,
        "checkpoint": subject.checkpoint,
        "steps": subject.steps,
        "weights": _weights(subject.folder or Path(config.model.model).expanduser()),
        "set": each.name,
        "examples": len(each.prompts),
        "examples_digest": digest.hexdigest(),
        "samples": each.samples,
        "seed": each.seeds.apart.get("eval", each.seeds.root),
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "greedy": params.greedy,
        "engine": str(config.inference.engine),
        "rewards": list(each.verifier.names),
        "reward": hide(config.as_dict().get("reward", {})),
        "correct_above": config.scoring.correct_above,
        "cluster": each.cluster,
    }


def _weights(folder: Path) -> str:
    """Return a digest of the weights: of a checkpoint's checksums, or of a folder's files; empty for a hub id."""
    if (folder / SUMS).is_file():
        return digest_of(folder / SUMS).hexdigest()
    if not folder.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size, time_ns = file.stat().st_size, file.stat().st_mtime_ns
        content = digest_of(file).hexdigest() if size <= SMALL_BYTES else f"{size} {time_ns}"
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()
