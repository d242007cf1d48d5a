"""The records of a step beside its metrics: every completion, the summary line, and plugins' own fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.informative import num_correct
from retrain.kernel.types import Completion, Group, Score
from retrain.rooms.credit.batch import Credited
from retrain.rooms.session.records.tokens import TokenRecord

TOP_SURPRISALS = 10
SUMMARY_PREFIXES = ("exec_", "plan_", "post_")


def generation_records(
    step: int,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    credited: Credited,
    trained_G: Sequence[bool],
    tokenizer: Any,
) -> list[dict[str, Any]]:
    """One record per completion, trained or not, in sampling order; texts are kept whole."""
    records = []
    for number, (prompt, group, is_trained) in enumerate(zip(prompts, groups, trained_G, strict=True)):
        texts = _prompt_text(prompt)
        for index, (completion, score) in enumerate(zip(group.completions, group.scores, strict=True)):
            records.append(
                {
                    "step": step,
                    "group": number,
                    "index": index,
                    "example_id": group.example.id,
                    "prompt": texts,
                    "completion": completion.text,
                    "reference": group.example.reference,
                    **_score_fields(score),
                    "num_tokens": completion.num_actions,
                    **({"turns": completion.turns} if completion.turns != 1 else {}),
                    "stop_reason": completion.stop_reason.value,
                    "policy_version": completion.policy_version,
                    "trained": is_trained and score.value is not None,
                    "top_surprisal_tokens": _top_surprisals(completion, tokenizer),
                }
            )
    return records


def token_records(groups: Sequence[Group], credited: Credited, *, has_detector: bool) -> list[TokenRecord]:
    """The action tokens of every completion with their credit, in the order of `generation_records`.

    A completion without a verdict has no credit and no planning marks.
    """
    marks = {
        id(c): mask
        for cs, ms in zip(credited.judged, credited.planning, strict=True)
        for c, mask in zip(cs, ms, strict=True)
    }
    advs = {
        id(c): a
        for cs, As in zip(credited.judged, credited.result.token_advs, strict=True)
        for c, a in zip(cs, As, strict=True)
    }
    records = []
    for completion in (completion for group in groups for completion in group.completions):
        action_T, zeros_T = completion.action_T, np.zeros(completion.num_actions)
        planning_T = marks.get(id(completion), zeros_T.astype(np.bool_))
        records.append(
            TokenRecord(
                tokens_T=completion.tokens_T[action_T],
                logprobs_T=completion.logprobs_T[action_T],
                advantages_T=advs.get(id(completion), zeros_T),
                entropies_T=None if completion.entropies_T is None else completion.entropies_T[action_T],
                planning_T=planning_T if has_detector else None,
            )
        )
    return records


def step_summary(metrics: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """The line of `emergence/steps.jsonl`."""
    kept = {name: value for name, value in metrics.items() if name.startswith(SUMMARY_PREFIXES)}
    return {
        "step": metrics["step"],
        "mean_reward": metrics.get("mean_reward"),
        "correct_count": sum(num_correct(group) for group in groups),
        "total_count": sum(len(group.completions) for group in groups),
        "condition": metrics["condition"],
        "uncertainty_kind": metrics["uncertainty_kind"],
        **kept,
    }


def merge_fields(metrics: dict[str, Any], fields: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """Metrics with `fields` added; PluginError when one exists already, or is not text or a finite number."""
    added = {}
    for name, value in fields.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if name in metrics:
            raise PluginError(Problem(what=f"metric {name!r} of {source} exists already", fix="give it another name"))
        if not isinstance(plain, bool | int | float | str):
            what = f"metric {name!r} of {source} is {type(plain).__name__}, not text or a number"
            raise PluginError(Problem(what=what, fix="return plain values"))
        if isinstance(plain, float) and not math.isfinite(plain):
            raise PluginError(Problem(what=f"metric {name!r} of {source} is {plain}", fix="leave it out instead"))
        added[name] = plain
    return metrics | added


def _prompt_text(prompt: Prompt) -> Any:
    text = prompt.example.prompt
    return text if isinstance(text, str) else [dict(message) for message in text]


def _score_fields(score: Score) -> dict[str, Any]:
    fields: dict[str, Any] = {"reward": score.value, "outcome": score.outcome.value}
    if score.parts:
        fields["reward_parts"] = dict(score.parts)
    return fields | ({"detail": score.detail} if score.detail else {})


def _top_surprisals(completion: Completion, tokenizer: Any) -> list[dict[str, Any]]:
    tokens_T = completion.tokens_T[completion.action_T]
    surprisals_T = -completion.logprobs_T[completion.action_T]
    order = np.argsort(-surprisals_T, kind="stable")[:TOP_SURPRISALS]
    names = tokenizer.convert_ids_to_tokens(tokens_T[order].tolist())
    return [
        {"pos": int(position), "surprisal": round(float(surprisals_T[position]), 6), "token": name}
        for position, name in zip(order, names, strict=True)
    ]
