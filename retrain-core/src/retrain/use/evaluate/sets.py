"""The sets that a configuration names: `[eval.sets.NAME]` becomes the run's configuration with the set's values."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.plugin_tables import SetsKeys
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.config.toml_file import key_lines
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedData, Prompt, Verifier
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import SamplingParams
from retrain.run.check import check_names, check_options
from retrain.run.seed_sources import set_apart
from retrain.tasks.derived import derived
from retrain.tasks.prompts import build_pool
from retrain.tasks.scoring.build import build_service, comparing_rewards, has_verifier, load_data, uses_own_verifier
from retrain.tasks.scoring.trial import refuse_broken_rewards
from retrain.tasks.tasks import RewardVerifier, Tasks, closed_on_error
from retrain.text.chat import prompt_text
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import context_length

HELD_OUT = "held_out"  # the set of [eval] examples
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
LOG = logging.getLogger("retrain")


class SetKeys(Table):
    """`[eval.sets.NAME]`, in addition to the keys of `[data]`; an absent key has the run's value."""

    examples: int = key(0, "Examples, drawn by seed; 0 = all.", ge=0)
    samples: int | None = key(None, "Completions per example; with greedy 1.", ge=1)
    temperature: float | None = key(None, "Sampling temperature; above 0. For greedy decoding set greedy.", gt=0.0)
    max_tokens: int | None = key(None, "New tokens per completion at most.", ge=1)
    greedy: bool = key(False, "Always take the most likely token.")
    seed: int | None = key(None, "Seed of the choice of examples and of sampling.", ge=0)
    cluster: str | None = key(None, "As [eval] cluster.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSet:
    """A set: the source of its examples, how they are sampled, and their reward.

    `config` is the run's, with the set's `[data]`, `[reward]` and `[training]`; `examples` = 0 means all.
    `names_reward`: the set has a reward key. `place` is the location to show in messages.
    """

    name: str
    config: Config
    params: SamplingParams
    examples: int
    samples: int
    seed: int
    cluster: str
    names_reward: bool
    place: str

    @property
    def described(self) -> str:
        """`files hard.jsonl, math, 64 examples x 1, greedy`"""
        data, reward = self.config.data, self.config.reward.type
        source = f"{data.source} {data.path}".strip()
        how = "greedy" if self.params.greedy else f"temperature {self.params.temperature:g}"
        return f"{source}, {reward}, {self.examples or 'all'} examples x {self.samples}, {how}"


def read_sets(config: Config) -> tuple[list[EvalSet], list[Problem]]:
    sets, problems = [], []
    given: Mapping[str, Mapping[str, Any]] = config.table("eval", SetsKeys).sets
    lines: Mapping[str, int] = {}
    if given and config.origin("eval.sets").layer is Layer.FILE:
        with suppress(OSError, ValueError):
            lines = key_lines(Path(config.source).read_text(encoding="utf-8"))
    for name, values in given.items():
        line = lines.get(f"eval.sets.{name}")
        origin = f"{config.source}:{line}" if line else config.origin("eval.sets").place
        place = f"{origin} [eval.sets.{name}]".strip()
        if name == HELD_OUT or not NAME.fullmatch(name):
            what, fix = f"{name!r} cannot be a set's name", f"use letters, digits and _; {HELD_OUT} is taken"
            problems.append(Problem(code="eval.bad-set-name", where=place, what=what, fix=fix))
            continue
        found, faults = read_set(name, values, config, place)
        problems += faults
        sets += [found] if found else []
    return sets, problems


def read_set(name: str, values: Mapping[str, Any], config: Config, place: str) -> tuple[EvalSet | None, list[Problem]]:
    """Return one set, or None and every problem with its keys."""
    own, reading, problems = derived(values, SetKeys, config, place, tables=("reward",))
    if isinstance(own, SetKeys) and own.greedy and (own.samples or 1) > 1:
        what, fix = f"{own.samples} samples of one greedy answer are all equal", "leave samples out, or greedy"
        problems.append(Problem(code="eval.greedy-samples", where=f"{place} samples", what=what, fix=fix))
    if problems or not isinstance(own, SetKeys):
        return None, problems
    tables: dict[str, BaseModel] = dict(reading.tables)
    # A set has a source of data, even where the run has an environment.
    tables.pop("environment", None)
    training = config.training
    max_tokens, temperature = own.max_tokens or training.max_tokens, own.temperature or training.temperature
    changed = {"max_tokens": max_tokens, "temperature": temperature, "max_examples": 0, "batch_size": 1}
    tables["training"] = training.model_copy(update=changed)
    tables["eval"] = config.eval.model_copy(update={"examples": 0})
    found = EvalSet(
        name=name,
        config=replace(reading, tables=tables),
        params=SamplingParams(max_tokens=max_tokens, temperature=temperature, greedy=own.greedy),
        examples=own.examples,
        samples=1 if own.greedy else own.samples or config.eval.samples,
        seed=config.eval.seed if own.seed is None else own.seed,
        cluster=config.table("eval", SetsKeys).cluster if own.cluster is None else own.cluster,
        names_reward="reward" in values,
        place=place,
    )
    return found, []


def problems_of(config: Config, plugins: Plugins) -> list[Problem]:
    sets, problems = read_sets(config)
    return problems + [problem for each in sets for problem in problems_with(each, plugins)]


def problems_with(each: EvalSet, plugins: Plugins) -> list[Problem]:
    tables = each.config.tables
    entries = {name: TableEntry(model=type(tables[name])) for name in ("data", "reward") if name in tables}
    found = check_names(each.config, plugins, entries) + check_options(each.config, plugins)
    # Problems outside the set are the run's own, and are reported with it.
    problems = [problem for problem in found if each.place in problem.where]
    if not has_verifier(each.config):
        fix = 'write reward = "match"'
        problems.append(Problem(code="eval.no-reward", where=each.place, what="the set has no reward", fix=fix))
    return problems


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedSet:
    """The prompts of a set, in sampling order, and the verifier of the completions.

    `is_shared`: the verifier belongs to the run and is closed by it. `context_length` limits an episode. `is_task`:
    held out by one of `[[data.tasks]]`, with its `weight`.
    """

    name: str
    prompts: Sequence[Prompt]
    samples: int
    seeds: Seeds
    params: SamplingParams
    cluster: str
    context: PluginContext
    verifier: Verifier
    is_shared: bool
    context_length: int | None
    is_task: bool = False
    weight: float = 1.0

    @property
    def prefix(self) -> str:
        return "eval_" if self.name == HELD_OUT else f"eval_{self.name}_"


def held_out_set(context: PluginContext, tasks: Tasks) -> LoadedSet:
    config = context.config
    training, cluster = config.training, str(config.table("eval", SetsKeys).cluster)
    prompts = tasks.pool.held_out
    _check_cluster(cluster, prompts, config.place("eval.cluster"))
    return LoadedSet(
        name=tasks.name or HELD_OUT,
        prompts=prompts,
        samples=config.eval.samples,
        seeds=Seeds(config.eval.seed, set_apart(config)),
        params=SamplingParams(max_tokens=training.max_tokens, temperature=training.temperature),
        cluster=cluster,
        context=context,
        verifier=tasks.verifier,
        is_shared=True,
        context_length=tasks.context_length,
        is_task=bool(tasks.name),
        weight=tasks.weight,
    )


def load_set(each: EvalSet, context: PluginContext, tasks: Tasks | None = None) -> LoadedSet:
    """Load a set with its verifier, sharing an equal one with the run; ConfigError when the set is empty.

    Examples that `tasks` trains on, by id or by prompt, are left out.
    """
    LOG.info("Loading evaluation set %s...", each.name)
    context.config.refuse_lost(f"eval.sets.{each.name}")
    reading = replace(context, config=each.config)
    data = load_data(each.config, reading)
    if data.reward is not None and not each.names_reward and each.config.data.source != context.config.data.source:
        # prefer the source's own verifier to the run's reward
        tables = {name: type(table)() if name == "reward" else table for name, table in each.config.tables.items()}
        origins = {path: origin for path, origin in each.config.origins.items() if not path.startswith("reward.")}
        reading = replace(reading, config=replace(each.config, tables=tables, origins=origins))
    shared = _shared_verifier(tasks, data, reading.config, context.config)
    verifier = shared or RewardVerifier(build_service(reading.config, reading, data.reward))
    with closed_on_error(verifier):
        length = tasks.context_length if tasks else context_length(context.config, context.plugins)
        pool, notes = build_pool(
            data,
            reading.config,
            context.tokenizer,
            context.seeds,
            context_length=length,
            comparing=comparing_rewards(verifier.service.rewards),
        )
        for note in (*data.notes, *notes):
            LOG.info("[eval.sets.%s] %s", each.name, printable(note))
        prompts = _chosen(each, pool.train, tasks)
        _check_cluster(each.cluster, prompts, f"{each.place} cluster")
        if not shared:
            refuse_broken_rewards(verifier, prompts, reading.config)
    return LoadedSet(
        name=each.name,
        prompts=prompts,
        samples=each.samples,
        seeds=Seeds(each.seed, set_apart(context.config) if each.seed == context.config.eval.seed else {}),
        params=each.params,
        cluster=each.cluster,
        context=reading,
        verifier=verifier,
        is_shared=shared is not None,
        context_length=length,
    )


def _shared_verifier(tasks: Tasks | None, data: LoadedData, config: Config, of_run: Config) -> RewardVerifier | None:
    """Return the run's verifier if the set would build the same: equal rewards, none from the data."""
    if tasks is None or not isinstance(tasks.verifier, RewardVerifier) or uses_own_verifier(data, config):
        return None
    names = tuple(config.reward.weights) or (config.reward.type,)
    is_same = config.tables.get("reward") == of_run.tables.get("reward") and tasks.verifier.names == names
    return tasks.verifier if is_same else None


def _chosen(each: EvalSet, prompts: Sequence[Prompt], tasks: Tasks | None) -> list[Prompt]:
    """Choose the set's prompts among those that training does not see; ConfigError when there are too few.

    They have the smallest keyed hashes of their ids, as held-out ones do.
    """
    examples = [prompt.example for prompt in tasks.pool.train] if tasks else []
    trained = {key for example in examples for key in (example.id, prompt_text(example))}
    left = [prompt for prompt in prompts if trained.isdisjoint((prompt.example.id, prompt_text(prompt.example)))]
    if count := len(prompts) - len(left):
        if not left:
            what = f"all {count} examples are trained on"
            fix = "name other data, or use [eval] examples"
            raise ConfigError(Problem(code="eval.all-trained-on", where=each.place, what=what, fix=fix))
        LOG.warning("[eval.sets.%s] %d of %d examples left out: they are trained on", each.name, count, len(prompts))
    if each.examples > len(left):
        what, fix = f"{each.examples} examples wanted, but the set has {len(left)}", "lower it, or leave it out"
        raise ConfigError(Problem(code="eval.too-few-examples", where=f"{each.place} examples", what=what, fix=fix))
    seeds = Seeds(each.seed)
    ranked = sorted(left, key=lambda prompt: seeds.derive("held-out", prompt.example.id)) if each.examples else left
    return ranked[: each.examples or None]


def _check_cluster(column: str, prompts: Sequence[Prompt], where: str) -> None:
    if not column or any(column in prompt.example.info for prompt in prompts):
        return
    columns = ", ".join(sorted({name for prompt in prompts for name in prompt.example.info}))
    fix = f"name one of the columns: {printable(columns) or 'none'}"
    raise ConfigError(Problem(code="eval.unknown-cluster", where=where, what=f"no example has {column!r}", fix=fix))
