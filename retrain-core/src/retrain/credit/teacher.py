"""The teacher in a run: after sampling it gives every sampled token a reward."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from retrain.credit.kl import difference, given_logprobs, means, with_token_rewards
from retrain.kernel.config.plugin_tables import HERE
from retrain.kernel.contracts.backend import Teacher
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import BackendError, ConfigError, Problem, ResumeError
from retrain.kernel.hooks import hookimpl
from retrain.kernel.registry import call
from retrain.kernel.types import Floats, Group, LogprobRow
from retrain.text.tokenizer import load_tokenizer

STATE = "teacher"


def open_teacher(context: PluginContext) -> TeacherShaper:
    """The shaper of a run with `[teacher]`; ConfigError when no installed part offers its engine as a teacher."""
    config, engine = context.config, context.config.teacher.engine
    require_vocabulary(context)
    traits = context.plugins.traits_of(Kind.INFERENCE_ENGINE, engine, EngineTraits)
    if traits is None or not traits.open_teacher:
        what = f"no installed plugin opens a teacher with engine {engine!r}"
        fix = "pip install retrain-local for a model in this process, or name a server: vllm, sglang"
        where = config.place("teacher.engine")
        raise ConfigError(Problem(code="teacher.not-installed", where=where, what=what, fix=fix))
    teacher: Teacher = call(traits.open_teacher, context)
    return TeacherShaper(teacher, config.training.temperature)


def require_vocabulary(context: PluginContext) -> None:
    """ConfigError unless both models name every token by the same id: a row of ids must be the same text to both.

    A server is checked when it opens; see `engines`.
    """
    config, table = context.config, context.config.teacher
    # The same model has the same tokens: an adapter changes none of them.
    if table.engine != HERE or table.model in ("", config.model.model):
        return
    tables = {**config.tables, "model": config.model.model_copy(update={"model": table.model})}
    # With this origin an error about the tokenizer points to [teacher], not to [model].
    origins = {**config.origins, "model.model": config.origin("teacher.model")}
    teachers = load_tokenizer(replace(config, tables=tables, origins=origins), context.plugins).get_vocab()
    own = context.tokenizer.get_vocab()
    if own == teachers:
        return
    different = sum(own.get(token) != number for token, number in teachers.items())
    what = f"student {config.model.model!r} and teacher {table.model!r} have different tokenizers"
    why = f"{len(own)} and {len(teachers)} tokens, {different} of the teacher's under another id or missing"
    fix = "use a teacher of the same family: it is shown token ids"
    where = config.place("teacher.model")
    raise ConfigError(Problem(code="teacher.other-tokenizer", where=where, what=what, why=why, fix=fix))


class TeacherShaper:
    """A `Shaper` that adds log p_teacher - log p to the reward of each sampled token.

    p is the policy that sampled it. Every completion gets these rewards, with a verdict or without.
    """

    def __init__(self, teacher: Teacher, temperature: float) -> None:
        self._teacher, self._temperature = teacher, temperature

    def shape(self, step: int, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        started = time.perf_counter()
        completions = [completion for group in groups for completion in group.completions]
        found = given_logprobs(completions, self._asked, where="[teacher]", of="teacher")
        rewards = {id(c): difference(c, teacher_T) for c, teacher_T in zip(completions, found, strict=True)}
        fields = means(list(rewards.values()), "teacher_kl")
        shaped = tuple(with_token_rewards(group, rewards) for group in groups)
        return shaped, fields | {"teacher_time_s": time.perf_counter() - started}

    @hookimpl
    def retrain_save_state(self) -> dict[str, Any]:
        """Save how a teacher in this process splits its work: the split decides how it rounds."""
        state = self._teacher.state()
        return {STATE: dict(state)} if state else {}

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        try:
            self._teacher.restore(state.get(STATE, {}))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = f"the checkpoint's state of [teacher] cannot be read: {type(error).__name__}: {error}"
            fix = "resume from a checkpoint of this run"
            raise ResumeError(Problem(code="resume.bad-teacher-state", what=what, fix=fix)) from error

    @hookimpl
    def retrain_run_end(self) -> None:
        self._teacher.close()

    def _asked(self, rows: list[LogprobRow]) -> Sequence[Floats]:
        found = self._teacher.logprobs(rows, self._temperature)
        if len(found) != len(rows):
            what = f"the teacher gave log-probabilities of {len(found)} rows instead of {len(rows)}"
            fix = "correct the plugin that opened it"
            raise BackendError(Problem(code="teacher.wrong-rows", where="[teacher]", what=what, fix=fix))
        return found
