"""Configurations of `[teacher]`, and of credit that needs no verdict, that are refused before anything loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retrain.credit.flow import CreditFlow
from retrain.kernel.config.plugin_tables import HERE
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.tasks.scoring.build import has_verifier

# What depends on verdicts and would do nothing, or the wrong thing, where credit needs none.
# The first entry is the value that is refused or, if it is 0, the only one that is not.
OF_VERDICTS: dict[str, tuple[Any, str, str]] = {
    "training.refill": (0, "every group teaches, so no further prompts are ever drawn", "set refill = 0"),
    "training.overlong": ("drop", "it takes away a verdict that credit does not need", 'use overlong = "mask"'),
    "training.soft_overlong": (0, "it lowers scores, and they are not trained on", "set soft_overlong = 0"),
}


def problems_of(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    if not flow.needs_verdict:
        yield from _of_verdicts(config, flow)
    if not has_verifier(config):
        yield from _without_verifier(config, flow)
    if config.teacher.is_set:
        yield from _unread(config, plugins, flow)
        yield from _of_engine(config, plugins)
    elif config.teacher.url or config.teacher.api_key_env:
        where = config.place("teacher.url" if config.teacher.url else "teacher.api_key_env")
        fix = 'set engine = "vllm" or "sglang", or remove it'
        yield Problem(where=where, what="has no effect: [teacher] names no server", fix=fix)


def _of_verdicts(config: Config, flow: CreditFlow) -> Iterator[Problem]:
    for path, (value, why, fix) in OF_VERDICTS.items():
        given: Any = config.value(path, value if value == 0 else "")
        if (given == value) is bool(value):
            what = f"{path.partition('.')[2]} = {given!r} does not go with advantage {flow.advantage.name!r}"
            yield Problem(where=config.place(path), what=what, why=why, fix=fix)


def _without_verifier(config: Config, flow: CreditFlow) -> Iterator[Problem]:
    """A run that judges nothing: something else must teach, and nothing can be evaluated."""
    if flow.needs_verdict:
        where = config.place("reward.weights" if config.reward.weights else "reward.type")
        what, why = "no completion would be judged", f"{flow.condition} learns only from scores"
        fix = 'choose a reward, or set [algorithm] advantage_mode = "distillation" with a [teacher]'
        yield Problem(where=where, what=what, why=why, fix=fix)
    if config.eval.examples:
        what, why = f"examples = {config.eval.examples} needs an evaluation", "with no reward nothing is judged"
        fix = "set examples = 0, or choose a reward: with a teacher its scores are recorded and not trained on"
        yield Problem(where=config.place("eval.examples"), what=what, why=why, fix=fix)


def _unread(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    table = config.teacher
    where = config.place(f"teacher.{'model' if table.model else 'adapter' if table.adapter else 'engine'}")
    if not flow.needs_token_rewards:
        what, why = "the teacher would have no effect", f"{flow.condition} takes no rewards of single tokens"
        fix = 'set [algorithm] advantage_mode = "distillation", or remove [teacher]'
        yield Problem(where=where, what=what, why=why, fix=fix)
    capabilities = declared_capabilities(config, plugins)
    if capabilities is not None and not capabilities.preserves_token_advantages:
        what = f"backend {config.backend.backend!r} trains all tokens of a completion alike"
        why = "a teacher gives each token a separate reward"
        yield Problem(where=where, what=what, why=why, fix='use [backend] backend = "local"')


def _of_engine(config: Config, plugins: Plugins) -> Iterator[Problem]:
    table, where = config.teacher, config.place("teacher.engine")
    engines = {entry.spec.name: entry.spec.traits for entry in plugins.registered(Kind.INFERENCE_ENGINE)}
    teaching = {name: t for name, t in engines.items() if isinstance(t, EngineTraits) and t.open_teacher}
    if table.engine not in teaching:
        if plugins.find(Kind.INFERENCE_ENGINE, table.engine):  # an unknown name is reported as such
            what = f"engine {table.engine!r} gives no log-probabilities of given tokens"
            yield Problem(where=where, what=what, fix=f"use one of: {', '.join(sorted(teaching))}")
        elif table.engine == HERE:
            what, fix = "no installed distribution runs a teacher in this process", "pip install retrain-local"
            yield Problem(where=where, what=what, fix=fix)
        return
    if table.engine != HERE and table.adapter:
        what, fix = "a server is given no adapter", "start it with the adapter merged, or under a name: [teacher] model"
        yield Problem(where=config.place("teacher.adapter"), what=what, fix=fix)
    temperature = config.training.temperature
    if temperature != 1.0 and not teaching[table.engine].teaches_at_any_temperature:
        what = f"temperature = {temperature:g} does not go with a teacher on {table.engine!r}"
        why = "servers give log-probabilities of given tokens at temperature 1, and both must be of one kind"
        fix = 'set [training] temperature = 1.0, or use [teacher] engine = "pytorch"'
        yield Problem(where=config.place("training.temperature"), what=what, why=why, fix=fix)
