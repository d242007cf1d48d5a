"""The policy as its own teacher (`[distil]`): it sees more than its prompt, and rates the tokens that it sampled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

import numpy as np

from retrain.credit.kl import difference, given_logprobs, means, with_token_rewards
from retrain.credit.teacher import TeacherShaper
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedTasks
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Completion, Group, Outcome, TeacherRow
from retrain.tasks.prompts import encode_prompts


class PolicyTeacher:
    """A `Teacher` with the weights of the policy: the ones that `[distil] teacher` names, or its reference."""

    def __init__(self, backend: Backend) -> None:
        self.logprobs = getattr(backend, "teacher_logprobs", None) or backend.reference_logprobs

    def state(self) -> Mapping[str, Any]:
        return {}  # the backend saves its weights

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SelfTeacherShaper(TeacherShaper):
    """Gives completions the row that their teacher sees, and log p_teacher - log p as the rewards of their tokens.

    A completion has no teacher when there is nothing to show, when its context began again, or was not made from the
    prompt of its example. Its rewards are 0, and in the loss it counts 0.
    """

    def __init__(self, context: PluginContext, backend: Backend) -> None:
        super().__init__(PolicyTeacher(backend), context.config.training.temperature)
        self._context, self._table = context, context.config.distil
        self._fields = fields_of(self._table.template)

    def shape(self, step: int, groups: Sequence[Group]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        started = time.perf_counter()
        views = {id(c): view for group in groups for c, view in self._views(group)}
        found = given_logprobs([*views.values()], self._asked, where="[distil]", of="teacher") if views else []
        taught = dict(zip(views, zip(views.values(), found, strict=True), strict=True))
        rewards = {number: difference(*pair) for number, pair in taught.items()}
        rows = {n: TeacherRow(v.tokens_T, v.action_T, given_T[v.action_T]) for n, (v, given_T) in taught.items()}
        shaped = []
        for group in groups:
            pairs = zip(with_token_rewards(group, rewards).completions, group.completions, strict=True)
            shaped.append(replace(group, completions=tuple(replace(c, teacher=rows.get(id(old))) for c, old in pairs)))
        fields = {"teacher_rate": len(views) / max(1, sum(len(group.completions) for group in groups))}
        fields |= means([*rewards.values()], "teacher_kl") if views else {}
        return tuple(shaped), fields | {"teacher_time_s": time.perf_counter() - started}

    def _views(self, group: Group) -> Iterator[tuple[Completion, Completion]]:
        """Yield the completions with a teacher, each also as the teacher sees it."""
        shown = [(c, fields) for number, c in enumerate(group.completions) if (fields := self._shown(group, number))]
        examples = [replace(group.example, prompt=self._prompt(group.example.prompt, fields)) for _, fields in shown]
        own_T, *contexts = encode_prompts([group.example, *examples], self._context.tokenizer, self._context.config)
        start = len(own_T)
        for (c, _), context_T in zip(shown, contexts, strict=True):
            context_T = context_T[-self._table.max_context_tokens :]
            is_plain = np.array_equal(c.tokens_T[:start], own_T) and not c.action_T[:start].any()
            if len(c.contexts) == 1 and is_plain:
                tokens_T = np.concatenate([context_T, c.tokens_T[start:]])
                action_T = np.concatenate([context_T < 0, c.action_T[start:]])
                logprobs_T = np.concatenate([np.zeros(len(context_T)), c.logprobs_T[start:]])
                yield c, replace(c, tokens_T=tokens_T, action_T=action_T, logprobs_T=logprobs_T, starts=(0,))

    def _shown(self, group: Group, number: int) -> dict[str, str]:
        """Return what a completion's teacher may be shown, by field of the template; {} if that is nothing."""
        table, score = self._table, group.raw_scores[number]
        others = enumerate(zip(group.completions, group.raw_scores, strict=True))
        right = (c for at, (c, s) in others if at != number and s.value is not None and s.value >= table.success)
        solution = next((c.text if c.answer is None else c.answer for c in right), "")
        feedback = score.detail.strip() if score.outcome is Outcome.SCORED else ""
        fields = {
            "solution": table.solution_template.format(solution=solution) if solution else "",
            "feedback": table.feedback_template.format(feedback=feedback) if feedback else "",
            "privileged": str(group.example.info.get(table.privileged) or ""),
        }
        return fields if any(fields[name] for name in self._fields & fields.keys()) else {}

    def _prompt(self, prompt: Any, fields: Mapping[str, str]) -> Any:
        """Return the prompt with the template in place of its last message."""
        if isinstance(prompt, str):
            return self._table.template.format(prompt=prompt, **fields)
        *before, last = prompt
        return [*before, {**last, "content": self._prompt(last["content"], fields)}]


def fields_of(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def require_privileged(tasks: LoadedTasks, context: PluginContext) -> None:
    """ConfigError if the teacher is to be shown a column that no task has."""
    table = context.config.distil
    is_other = fields_of(table.template) - {"prompt"} != {"privileged"}
    if is_other or any(prompt.example.info.get(table.privileged) for prompt in tasks.prompts):
        return
    what, where = f"no task has a column {table.privileged!r} to show to the teacher", "distil.privileged"
    fix = "add the column to the data, or name another"
    raise ConfigError(Problem(code="distil.no-column", where=context.config.place(where), what=what, fix=fix))
