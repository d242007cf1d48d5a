"""The records of a step next to its metrics line: every completion, its tokens with their credit, and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.contracts.algorithm import Credit, TokenCredit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.types import Completion, Example, Floats, Group, Outcome, Score, num_correct
from retrain.records.reading import number
from retrain.records.tokens import RowRecord, TokenRecord
from retrain.text.secrets import hide_text

TOP_SURPRISALS = 10
DIFFICULTY = ("difficulty", "level")  # columns of `Example.info`
SUMMARY_PREFIXES = ("exec_", "plan_", "post_")


def generation_records(
    step: int,
    prompts: Sequence[Prompt],
    groups: Sequence[Group],
    credit: Credit,
    tokenizer: Any,
    *,
    is_trained: bool,
) -> list[dict[str, Any]]:
    """Return one record per completion, trained or not, in sampling order; texts are never shortened."""
    records = []
    for at, (prompt, group, credit_G) in enumerate(zip(prompts, groups, credit.tokens_PG, strict=True)):
        prompt_text = prompt.example.prompt
        text = prompt_text if isinstance(prompt_text, str) else [dict(message) for message in prompt_text]
        is_group_trained = is_trained and credit.trains(at)
        pairs = zip(group.completions, group.raw_scores, group.scores, credit_G, strict=True)
        for index, (completion, raw, score, token_credit) in enumerate(pairs):
            records.append(
                {
                    "step": step,
                    "group": at,
                    "index": index,
                    "example_id": group.example.id,
                    **_difficulty(group.example),
                    "prompt": text,
                    "completion": completion.text,
                    "reference": group.example.reference,
                    **_score_fields(raw),
                    **({"shaped_reward": score.value} if score.value != raw.value else {}),
                    "num_tokens": completion.num_actions,
                    **({"turns": completion.turns} if completion.turns != 1 else {}),
                    "stop_reason": completion.stop_reason.value,
                    "policy_version": completion.policy_version,
                    **({"round": group.round} if group.round else {}),
                    **({"surplus": True} if group.is_surplus else {}),
                    "trained": is_group_trained and _is_in_loss(score, token_credit),
                    "top_surprisal_tokens": _top_surprisals(completion, tokenizer),
                }
            )
    return records


def token_records(groups: Sequence[Group], credit: Credit) -> list[TokenRecord]:
    """Return the action tokens of every completion with their credit, in the order of `generation_records`."""
    return [
        _token_record(completion, token_credit)
        for group, tokens_G in zip(groups, credit.tokens_PG, strict=True)
        for completion, token_credit in zip(group.completions, tokens_G, strict=True)
    ]


def step_summary(metrics: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    kept = {name: value for name, value in metrics.items() if name.startswith(SUMMARY_PREFIXES)}
    return {
        "step": metrics["step"],
        "mean_reward": metrics.get("mean_reward"),
        "correct_count": sum(num_correct(group) for group in groups),
        "total_count": sum(len(group.completions) for group in groups),
        "condition": metrics["condition"],
        "uncertainty_kind": metrics.get("uncertainty_kind"),
        **kept,
    }


def _token_record(completion: Completion, token_credit: TokenCredit) -> TokenRecord:
    action_T = completion.action_T

    def at_actions(values_T: Floats | None) -> Floats | None:
        return None if values_T is None else values_T[action_T]

    return TokenRecord(
        tokens_T=completion.tokens_T[action_T],
        logprobs_T=completion.logprobs_T[action_T],
        advantages_T=token_credit.advantages_A,
        entropies_T=at_actions(completion.entropies_T),
        planning_T=token_credit.planning_A,
        engine_logprobs_T=at_actions(completion.engine_logprobs_T),
        reference_logprobs_T=at_actions(completion.reference_logprobs_T),
        rewards_T=at_actions(completion.rewards_T),
        kl_coef=completion.kl_coef,
        row=RowRecord(tokens_T=completion.tokens_T, action_T=action_T, starts=completion.starts),
    )


def _is_in_loss(score: Score, token_credit: TokenCredit) -> bool:
    """True if a completion of a trained group counts: with a verdict, or with credit that needs none."""
    return not token_credit.is_masked and (score.value is not None or bool(token_credit.advantages_A.any()))


def _difficulty(example: Example) -> dict[str, Any]:
    """Return the difficulty that the example states, in the first of these columns; nothing otherwise."""
    found = next((each for name in DIFFICULTY if (each := example.info.get(name)) is not None), None)
    return {"difficulty": found} if isinstance(found, str | int) or number(found) is not None else {}


def _score_fields(score: Score) -> dict[str, Any]:
    fields: dict[str, Any] = {"reward": score.value, "outcome": score.outcome.value}
    if score.parts:
        fields["reward_parts"] = dict(score.parts)
    is_failed = score.outcome is Outcome.FAILED
    detail = hide_text(score.detail) if is_failed else score.detail  # an exception may quote a key
    fields |= {"detail": detail} if detail else {}
    of_shadow = _score_fields(score.shadow) if score.shadow is not None else {}
    return fields | {f"shadow_{name}": value for name, value in of_shadow.items()}


def _top_surprisals(completion: Completion, tokenizer: Any) -> list[dict[str, Any]]:
    tokens_A = completion.tokens_T[completion.action_T]
    surprisals_A = -completion.logprobs_T[completion.action_T]
    order = np.argsort(-surprisals_A, kind="stable")[:TOP_SURPRISALS]
    names = tokenizer.convert_ids_to_tokens(tokens_A[order].tolist())
    return [
        {"pos": int(position), "surprisal": round(float(surprisals_A[position]), 6), "token": name}
        for position, name in zip(order, names, strict=True)
    ]
