"""The alarm of a run with a shadow: its fields, and `gaming.jsonl` with the completions that were paid unconfirmed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.views import GroupsView, RunView
from retrain.kernel.types import Floats, Group, Tokens
from retrain.observe.gaming.alarm import GamingAlarm, verdicts_of
from retrain.records.files import write_text
from retrain.records.reading import read_records
from retrain.records.record_names import GAMING
from retrain.records.run import Run
from retrain.text.secrets import redacted_json

MOST_CHARS = 160  # of an example in a line


class AlarmWatch:
    """The alarm, the fields that it adds to a step's line, and its record when it begins."""

    def __init__(self, tokenizer_of: Callable[[], Any]) -> None:
        self._tokenizer_of, self._alarm = tokenizer_of, GamingAlarm()
        self._is_new = False  # the alarm began at the step under way

    def state(self) -> dict[str, Any]:
        """The state of the alarm."""
        return self._alarm.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._alarm.restore(state)

    def observe(self, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        """The fields of a step."""
        verdicts = verdicts_of(groups.groups)
        if not verdicts:
            return {}
        was_on = self._alarm.is_on
        self._alarm.observe(groups.step, verdicts)
        self._is_new = self._alarm.is_on and not was_on
        fields: dict[str, Any] = {"gaming_evidence": self._alarm.evidence}
        if paid := sum(each.paid for each in verdicts):
            fields["gaming_unconfirmed"] = 1.0 - sum(each.confirmed for each in verdicts) / paid
        if self._alarm.is_on:
            fields |= {"gaming_since": self._alarm.since, **self._example(groups, credit)}
        return fields

    def _example(self, groups: GroupsView, credit: Credit) -> dict[str, str]:
        """The most credited completion of the step that was paid and not confirmed, and the tokens it is known by."""
        paid = paid_in(groups.groups, credit)
        tokens = [self._tokenizer_of().decode([token]) for token in telling_tokens(paid)]
        found = {"gaming_tokens": " | ".join(map(repr, tokens))} if tokens else {}
        for each in unconfirmed(paid)[:1]:
            text = " ".join(each.fields["completion"].split())
            where = f"group {each.fields['group']}, completion {each.fields['index']}"
            found["gaming_example"] = f"{where}: {text[:MOST_CHARS]}{'...' if len(text) > MOST_CHARS else ''}"
        return found

    def rewind(self, run: RunView) -> None:
        """Leave out the alarms from the run's first step on, because a resumed run comes to them again."""
        file = run.folder / GAMING
        if file.exists():
            kept = redacted_json(each for each in read_alarms(run.folder) if each["step"] < run.first_step)
            write_text(file, "".join(f"{line}\n" for line in kept))

    def write_new(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Append an alarm that began at this step to `gaming.jsonl`; known secrets are left out."""
        if not self._is_new:
            return
        self._is_new = False
        record = alarm_record(run.folder, metrics, run.config.scoring.correct_above, self._tokenizer_of())
        with (run.folder / GAMING).open("a", encoding="utf-8") as stream:
            stream.write(f"{redacted_json([record])[0]}\n")


MOST_NAMED = 100  # completions of an alarm
MOST_TOKENS = 8
MOST_STEPS = 40  # whose records are read
LEAST_SHARE = 1e-3
Weights = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaidCompletion:
    """A completion that the reward calls correct, `is_confirmed` by the shadow or not; `fields` say which one it is."""

    is_confirmed: bool
    fields: Mapping[str, Any]
    tokens_A: Tokens
    positive_A: Floats

    @property
    def credit(self) -> float:
        """The sum of its positive advantages."""
        return float(self.positive_A.sum())


def paid_in(groups: Sequence[Group], credit: Credit) -> list[PaidCompletion]:
    """The paid completions of a step that both verifiers scored."""
    return [
        PaidCompletion(
            is_confirmed=raw.shadow.value > group.correct_above,
            fields={"group": number, "index": index, "completion": completion.text},
            tokens_A=completion.tokens_T[completion.action_T],
            positive_A=np.maximum(token_credit.advantages_A, 0.0),
        )
        for number, (group, credit_G) in enumerate(zip(groups, credit.tokens_PG, strict=True))
        for index, (completion, raw, token_credit) in enumerate(
            zip(group.completions, group.raw_scores, credit_G, strict=True)
        )
        if raw.shadow is not None and raw.shadow.value is not None
        if raw.value is not None and raw.value > group.correct_above
    ]


def paid_on_disk(run: Path, first: int, last: int, correct_above: float) -> Iterator[PaidCompletion]:
    """The same of several steps, from a run's records; they are streamed."""
    by_step: dict[int, list[Mapping[str, Any]]] = {step: [] for step in range(first, last + 1)}
    for record in Run(run).completions_of(*by_step):
        by_step[record["step"]].append(record)
    kept = ("step", "group", "index", "example_id", "reward", "shadow_reward", "completion")
    for step, records in by_step.items():
        for record, tokens in zip(records, Run(run).tokens(step) if records else (), strict=True):
            reward, shadow = record.get("reward"), record.get("shadow_reward")
            if reward is not None and shadow is not None and reward > correct_above:
                yield PaidCompletion(
                    is_confirmed=shadow > correct_above,
                    fields={name: record[name] for name in kept},
                    tokens_A=tokens.tokens_T,
                    positive_A=np.maximum(tokens.advantages_T, 0.0),
                )


def telling_tokens(paid: Iterable[PaidCompletion]) -> Weights:
    """Token ids by which unconfirmed completions differ from confirmed ones: their share of the credit times its log.

    p ln(p / q), in nats: p is an id's share of the credit of the unconfirmed ones, q that of the confirmed ones, both
    with `LEAST_SHARE` added. Only positive ones, the largest first.
    """
    by_token: dict[bool, dict[int, float]] = {True: defaultdict(float), False: defaultdict(float)}
    for each in paid:
        for token, credit in zip(each.tokens_A.tolist(), each.positive_A.tolist(), strict=True):
            by_token[each.is_confirmed][token] += credit
    total, other = (sum(by_token[key].values()) or 1.0 for key in (False, True))
    weights = {}
    for token, credit in by_token[False].items():
        p, q = credit / total + LEAST_SHARE, by_token[True].get(token, 0.0) / other + LEAST_SHARE
        weights[token] = p * math.log(p / q)
    ordered = sorted(weights, key=lambda token: -weights[token])
    return {token: weights[token] for token in ordered[:MOST_TOKENS] if weights[token] > 0.0}


def unconfirmed(paid: Iterable[PaidCompletion]) -> list[PaidCompletion]:
    """The ones that the shadow did not confirm, the most credited first."""
    return sorted((each for each in paid if not each.is_confirmed), key=lambda each: -each.credit)


def alarm_record(run: Path, metrics: Mapping[str, Any], correct_above: float, tokenizer: Any) -> dict[str, Any]:
    """What was paid and not confirmed from the estimated change to this step, and its `telling_tokens`."""
    step, since = int(metrics["step"]), int(metrics["gaming_since"])
    paid = [*paid_on_disk(run, max(since, step - MOST_STEPS + 1), step, correct_above)]
    named, weights = unconfirmed(paid), telling_tokens(paid)
    return {
        "step": step,
        "since": since,
        "evidence": metrics["gaming_evidence"],
        "num_completions": len(named),
        "tokens": [
            {"token": tokenizer.decode([token]), "weight": round(weight, 4)} for token, weight in weights.items()
        ],
        "completions": [_named(each, weights, tokenizer) for each in named[:MOST_NAMED]],
    }


def read_alarms(run: Path) -> list[Mapping[str, Any]]:
    """The alarms of a run; ConfigError when the file is damaged."""
    return [record for _, record in read_records(run / GAMING)] if (run / GAMING).exists() else []


def _named(paid: PaidCompletion, weights: Weights, tokenizer: Any) -> dict[str, Any]:
    """A completion with its most credited tokens; of equal ones those that unconfirmed completions are known by."""
    ids, credits_A = paid.tokens_A.tolist(), paid.positive_A.tolist()
    order = sorted(range(len(ids)), key=lambda at: (-credits_A[at], -weights.get(ids[at], 0.0)))
    tokens = [{"pos": at, "token": tokenizer.decode([ids[at]]), "credit": round(credits_A[at], 6)} for at in order]
    return {**paid.fields, "credit": round(paid.credit, 6), "tokens": tokens[:MOST_TOKENS]}
