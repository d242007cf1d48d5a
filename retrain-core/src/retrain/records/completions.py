"""The records of a step next to its metrics line: a summary, every completion, and its tokens with their credit.

Tokens are one safetensors file per step, flat arrays over all action tokens in the order of `generations.jsonl`;
`lengths` splits them into completions. Numbers are float32, the precision of samplers and trainers, except rewards of
single tokens: they are float64, because credit is computed from them.

A prompt is stored once for all completions that begin with it. `runs` are lengths in turn: actions, then tokens of the
environment, then actions again; `num_runs` of them belong to each completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.types import Completion, Floats, Group, Mask, Outcome, Score, Tokens, Turns, num_correct
from retrain.records.files import new_digest, write_bytes
from retrain.records.reading import number
from retrain.records.record_names import token_file
from retrain.text.secrets import hide_text

TOP_SURPRISALS = 10
DIFFICULTY = ("difficulty", "level")  # columns of `Example.info`
SUMMARY_PREFIXES = ("exec_", "plan_", "post_")


def generation_records(
    step: int, prompts: Sequence[Prompt], groups: Sequence[Group], credit: Credit, tokenizer: Any, *, is_trained: bool
) -> list[dict[str, Any]]:
    """Return one record per completion, trained or not, in sampling order; texts are never shortened."""
    records = []
    for at, (prompt, group, credit_G) in enumerate(zip(prompts, groups, credit.tokens_PG, strict=True)):
        prompt_text = prompt.example.prompt
        text = prompt_text if isinstance(prompt_text, str) else [dict(message) for message in prompt_text]
        is_group_trained = is_trained and credit.trains(at)
        pairs = zip(group.completions, group.raw_scores, group.scores, credit_G, strict=True)
        for index, (completion, raw, score, token_credit) in enumerate(pairs):
            # A completion counts with a verdict, or with credit that needs none.
            is_in_loss = not token_credit.is_masked and (score.value is not None or token_credit.advantages_A.any())
            parts: dict[str, Any] = {}
            if completion.answer is not None:
                parts = {"reasoning": completion.reasoning, "answer": completion.answer}
            # The difficulty that the example states, in the first of these columns.
            found = next((each for name in DIFFICULTY if (each := group.example.info.get(name)) is not None), None)
            records.append(
                {
                    "step": step,
                    "group": at,
                    "index": index,
                    "example_id": group.example.id,
                    **({"difficulty": found} if isinstance(found, str | int) or number(found) is not None else {}),
                    "prompt": text,
                    "completion": completion.text,
                    **parts,
                    "reference": group.example.reference,
                    **_score_fields(raw),
                    **({"shaped_reward": score.value} if score.value != raw.value else {}),
                    **({"greedy_reward": group.greedy_score.value} if group.greedy_score else {}),
                    "num_tokens": completion.num_actions,
                    **({"turns": completion.turns} if completion.turns != 1 else {}),
                    **({} if completion.by_turn is None else {"by_turn": asdict(completion.by_turn)}),
                    "stop_reason": completion.stop_reason.value,
                    "policy_version": completion.policy_version,
                    **({"round": group.round} if group.round else {}),
                    **({"surplus": True} if group.is_surplus else {}),
                    "trained": bool(is_group_trained and is_in_loss),
                    "top_surprisal_tokens": _top_surprisals(completion, tokenizer),
                }
            )
    return records


def token_records(groups: Sequence[Group], credit: Credit) -> list[TokenRecord]:
    """Return the action tokens of every completion with their credit, in the order of `generation_records`."""
    records = []
    for group, tokens_G in zip(groups, credit.tokens_PG, strict=True):
        for completion, token_credit in zip(group.completions, tokens_G, strict=True):
            action_T = completion.action_T
            found = {name: getattr(completion, name) for name in OPTIONAL if name != "planning_T"}
            optional = {name: None if values_T is None else values_T[action_T] for name, values_T in found.items()}
            records.append(
                TokenRecord(
                    tokens_T=completion.tokens_T[action_T],
                    logprobs_T=completion.logprobs_T[action_T],
                    advantages_T=token_credit.advantages_A,
                    planning_T=token_credit.planning_A,
                    kl_coef=completion.kl_coef,
                    row=RowRecord(tokens_T=completion.tokens_T, action_T=action_T, starts=completion.starts),
                    **optional,
                )
            )
    return records


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


def turns_of(record: Mapping[str, Any]) -> Turns:
    """Return the turns in a record of `generation_records`."""
    found = record.get("by_turn", {"lengths": [record["num_tokens"]]})
    return Turns(**{name: tuple(values) for name, values in found.items()})


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
    # stable: equal surprisals keep one order on every machine
    order = np.argsort(-surprisals_A, kind="stable")[:TOP_SURPRISALS]
    names = tokenizer.convert_ids_to_tokens(tokens_A[order].tolist())
    return [
        {"pos": int(position), "surprisal": round(float(surprisals_A[position]), 6), "token": name}
        for position, name in zip(order, names, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRecord:
    """A completion's whole row: all tokens, a mask of those the policy sampled, the starts of fresh contexts."""

    tokens_T: Tokens
    action_T: Mask
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenRecord:
    """One completion's action tokens; named as in `Completion`, None where the run had no such numbers."""

    tokens_T: Tokens
    logprobs_T: Floats
    advantages_T: Floats
    entropies_T: Floats | None = None
    planning_T: Mask | None = None
    engine_logprobs_T: Floats | None = None
    reference_logprobs_T: Floats | None = None
    rewards_T: Floats | None = None
    squared_probs_T: Floats | None = None
    kl_coef: float = 0.0
    row: RowRecord | None = None


# The optional arrays, by the field of `TokenRecord`: stored where every completion has one. Inputs of credit are
# float64, because replayed credit must be equal to the bit; the others were computed in float32 or less.
OPTIONAL: dict[str, tuple[str, type[np.generic], type[np.generic]]] = {
    "entropies_T": ("entropies", np.float32, np.float64),
    "planning_T": ("planning", np.uint8, np.bool_),
    "engine_logprobs_T": ("engine_logprobs", np.float32, np.float64),
    "reference_logprobs_T": ("reference_logprobs", np.float32, np.float64),
    "rewards_T": ("rewards", np.float64, np.float64),
    "squared_probs_T": ("squared_probs", np.float64, np.float64),
}


def write_tokens(run: Path, step: int, records: Sequence[TokenRecord]) -> dict[str, Any]:
    """Write the records of a step, all or nothing; return the line of `token_files.jsonl` about the file."""
    arrays: dict[str, np.ndarray] = {
        "lengths": np.array([len(record.tokens_T) for record in records], dtype=np.int64),
        "tokens": np.concatenate([record.tokens_T for record in records]).astype(np.int32),
        "logprobs": np.concatenate([record.logprobs_T for record in records]).astype(np.float32),
        "advantages": np.concatenate([record.advantages_T for record in records]).astype(np.float32),
    }
    for field, (name, stored, _) in OPTIONAL.items():
        found = [values for record in records if (values := getattr(record, field)) is not None]
        if len(found) == len(records):
            arrays[name] = np.concatenate(found).astype(stored)
    if any(record.kl_coef for record in records):
        arrays["kl_coefs"] = np.array([record.kl_coef for record in records])
    rows = [record.row for record in records if record.row is not None]
    if len(rows) == len(records):
        arrays |= row_arrays(rows)
    file = token_file(run, step)
    file.parent.mkdir(parents=True, exist_ok=True)
    from safetensors.numpy import save  # only a run needs it, and checks of a configuration import this module

    content = save(arrays)
    write_bytes(file, content)
    return {"step": step, "bytes": len(content), "blake2b": new_digest(content).hexdigest()}


def row_arrays(rows: Sequence[RowRecord]) -> dict[str, np.ndarray]:
    """Return everything but the action tokens, as flat arrays."""
    prompts: dict[bytes, int] = {}
    prompt_of, others, runs, num_runs = [], [np.zeros(0, np.int64)], [], []
    for row in rows:
        # A row alternates: its prompt up to the first action, then runs of actions and of environment tokens in turn.
        edges = [0, *(np.flatnonzero(np.diff(row.action_T)) + 1).tolist(), len(row.tokens_T)]
        first = edges[1] if not row.action_T[:1].any() else 0
        prompt = row.tokens_T[:first].astype(np.int64).tobytes()
        prompt_of.append(prompts.setdefault(prompt, len(prompts)))
        lengths = [end - begin for begin, end in pairwise(edges) if begin >= first and end > begin]
        runs += lengths
        num_runs.append(len(lengths))
        others.append(row.tokens_T[first:][~row.action_T[first:]])
    texts = [np.frombuffer(prompt, np.int64) for prompt in prompts]
    return {
        "prompts": np.concatenate([np.zeros(0, np.int64), *texts]).astype(np.int32),
        "prompt_lengths": np.array([len(text) for text in texts], dtype=np.int64),
        "prompt_of": np.array(prompt_of, dtype=np.int64),
        "environment": np.concatenate(others).astype(np.int32),
        "runs": np.array(runs, dtype=np.int64),
        "num_runs": np.array(num_runs, dtype=np.int64),
        "starts": np.array([start for row in rows for start in row.starts], dtype=np.int64),
        "num_starts": np.array([len(row.starts) for row in rows], dtype=np.int64),
    }
