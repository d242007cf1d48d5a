"""The policy as its own teacher (`[distil]`): it sees more than its prompt, and rates the tokens that it sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

import numpy as np

from retrain.credit.kl import difference, means
from retrain.credit.teacher import TeacherShaper
from retrain.kernel.config.plugin_tables import DistilTable
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import LoadedTasks
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import ActionRow, Completion, Floats, Group, Outcome, TeacherRow
from retrain.tasks.prompts import encode_prompts


class PolicyTeacher:
    """A `Teacher` with the weights of the policy: the ones that `[distil] teacher` names, or those of the reference."""

    def __init__(self, backend: Backend) -> None:
        self._logprobs = getattr(backend, "teacher_logprobs", None) or backend.reference_logprobs

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        found: list[Floats] = self._logprobs(rows, temperature)
        return found

    def state(self) -> Mapping[str, Any]:
        return {}  # the backend saves its weights

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class SelfTeacherShaper(TeacherShaper):
    """Gives each completion the row that its teacher sees, and log p_teacher - log p as the rewards of its tokens.

    A completion without anything to show in the teacher's context has no such row: its rewards are 0, and in the loss
    it counts 0. So has one whose context began again, or was not made from its example's prompt.
    """

    def __init__(self, context: PluginContext, backend: Backend) -> None:
        super().__init__(PolicyTeacher(backend), context.config.training.temperature)
        self._context, self._table = context, context.config.distil

    def _rewarded(self, groups: Sequence[Group]) -> tuple[dict[int, Floats], dict[int, TeacherRow], dict[str, float]]:
        views = {id(c): view for group in groups for c, view in self._views(group)}
        found = self._given(list(views.values())) if views else []
        rows, rewards = dict[int, TeacherRow](), dict[int, Floats]()
        for (number, view), teacher_T in zip(views.items(), found, strict=True):
            rewards[number] = difference(view, teacher_T)
            rows[number] = TeacherRow(view.tokens_T, view.action_T, teacher_T[view.action_T])
        fields = {"teacher_rate": len(views) / max(1, sum(len(group.completions) for group in groups))}
        return rewards, rows, fields | (means(list(rewards.values()), "teacher_kl") if views else {})

    def _views(self, group: Group) -> Iterator[tuple[Completion, Completion]]:
        """Yield the completions with a teacher, each also as the teacher sees it."""
        config, tokenizer = self._context.config, self._context.tokenizer
        told = [self._told(group, number) for number in range(len(group.completions))]
        examples = [replace(group.example, prompt=self._prompt(group, fields)) for fields in told if fields]
        (own_T, *contexts) = encode_prompts([group.example, *examples], tokenizer, config)
        shown = iter(contexts)
        for completion, fields in zip(group.completions, told, strict=True):
            if not fields:
                continue
            context_T = next(shown)[-self._table.max_context_tokens :]
            start = len(own_T)
            is_plain = np.array_equal(completion.tokens_T[:start], own_T) and not completion.action_T[:start].any()
            if len(completion.contexts) == 1 and is_plain:
                yield completion, _moved(completion, context_T, start)

    def _told(self, group: Group, number: int) -> dict[str, str]:
        """Return what the context of a completion may hold, by field of the template; {} if all of it is empty."""
        table, score = self._table, group.raw_scores[number]
        pairs = enumerate(zip(group.completions, group.raw_scores, strict=True))
        right = (c for at, (c, s) in pairs if at != number and s.value is not None and s.value >= table.success)
        solution = next((c.text if c.answer is None else c.answer for c in right), "")
        feedback = score.detail.strip() if score.outcome is Outcome.SCORED else ""
        fields = {
            "solution": table.solution_template.format(solution=solution) if solution else "",
            "feedback": table.feedback_template.format(feedback=feedback) if feedback else "",
            "privileged": str(group.example.info.get(table.privileged) or ""),
        }
        return fields if any(fields[name] for name in fields_of(table.template) & fields.keys()) else {}

    def _prompt(self, group: Group, fields: Mapping[str, str]) -> Any:
        """Return the example's prompt with the template in place of its last message."""
        prompt = group.example.prompt
        if isinstance(prompt, str):
            return self._table.template.format(prompt=prompt, **fields)
        *before, last = prompt
        return [*before, {**last, "content": self._table.template.format(prompt=last["content"], **fields)}]


def _moved(completion: Completion, context_T: np.ndarray[Any, Any], start: int) -> Completion:
    """Return the completion after another context than its first `start` tokens."""
    zeros_T = np.zeros(len(context_T))
    return replace(
        completion,
        tokens_T=np.concatenate([context_T, completion.tokens_T[start:]]),
        action_T=np.concatenate([zeros_T.astype(np.bool_), completion.action_T[start:]]),
        logprobs_T=np.concatenate([zeros_T, completion.logprobs_T[start:]]),
        starts=(0,),
    )


def fields_of(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def require_privileged(tasks: LoadedTasks, table: DistilTable, where: str) -> None:
    """ConfigError if the teacher is to be shown a column that not one task has."""
    shows = fields_of(table.template) - {"prompt"}
    if shows != {"privileged"} or any(prompt.example.info.get(table.privileged) for prompt in tasks.prompts):
        return
    what, why = f"no task has a column {table.privileged!r}", "the teacher would be shown nothing but the prompt"
    fix = "add the column to the data, or name another: [distil] privileged"
    raise ConfigError(Problem(code="distil.no-column", where=where, what=what, why=why, fix=fix))
