"""The alarm of a run with a shadow: a change-point test on proxy minus shadow, its fields, and `gaming.jsonl`."""

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
from retrain.kernel.types import Floats, Group, Score, Tokens, groups_of, prefix_of
from retrain.records.files import write_text
from retrain.records.reading import read_records
from retrain.records.record_names import GAMING
from retrain.records.run import Run
from retrain.text.secrets import redacted_json

# At most this share of the runs without a change ever raises an alarm.
ALPHA = 0.05
# The reference of a start is the steps just before it, so that slow drifts of learning are part of it.
WINDOW = 20
LEAST_STEPS, LEAST_GROUPS = 5, 16  # of a reference
# A smaller rise of the unconfirmed share is not worth an alarm.
TOLERANCE = 0.05
SPREADS = 2.0  # standard errors of the reference that are no change either
# A reference above this leaves no room for a rise.
LARGEST = 0.9
# Share of the stake lost on a group that the shadow confirms altogether: small bets find slow changes, large ones
# sudden ones.
BETS = (0.1, 0.3, 0.6)
# Evidence above this is dropped. Without a limit, an alarm of a hundred steps would take as long to end.
MOST_EVIDENCE = 20.0 / ALPHA
# The state is part of every checkpoint, so starts with the least evidence are dropped.
MOST_STARTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A group of `size` completions: `of` are considered, and `part` of these are counted."""

    size: int
    of: int
    part: float


class RiseTest:
    """An e-process against 'a share is no larger than before', for shares of groups of completions.

    Every step j is a possible start. Its reference is the share r = U / K over the `WINDOW` steps up to j (U counted of
    K considered, plus one imaginary group that is counted altogether), with its standard error s clustered by group.
    After j it bets on each group that E[u - m k] > 0, with m = r + TOLERANCE + SPREADS s, u counted of k considered in
    a group of n: its stake is multiplied by 1 + f (u - m k) / (m n), for each bet f. If the share is at most m no bet
    gains on average, so each stake is a nonnegative supermartingale whatever the law of a group. The i-th start has the
    stake 1 / (i (i + 1)); the chance that the sum ever reaches 1 / alpha is at most alpha (Ville; a mixture over
    starts, as in Shin, Ramdas & Rinaldo 2022, arXiv:2203.03532), up to the error of the references. SPREADS covers that
    error; the remainder was simulated.
    """

    def __init__(self, *, alarms: int = 1) -> None:
        self._most = alarms * MOST_EVIDENCE
        self._begun = 0  # starts so far
        self._window: list[list[float]] = []  # per step: groups, and the sums of u, k, u^2, u k, k^2
        self._steps: list[int] = []  # of the starts that are kept
        self._limits_S = np.zeros(0)
        self._stakes_SB = np.zeros((0, len(BETS)))  # each start's weight, divided among its bets

    @property
    def evidence(self) -> float:
        """The sum of all stakes, including starts to come; at most `MOST_EVIDENCE` of each alarm."""
        return float(self._stakes_SB.sum()) + 1.0 / (self._begun + 1)

    @property
    def since(self) -> int | None:
        """The estimated change point: the first step after the start with the largest stake. None before any start."""
        return self._steps[int(self._stakes_SB.sum(axis=1).argmax())] + 1 if self._steps else None

    def observe(self, step: int, groups: Sequence[Count]) -> None:
        """Bet on the groups of a step, then let it be a start; a step without groups changes nothing."""
        if not groups:
            return
        sizes_P, ofs_P, parts_P = np.array([(each.size, each.of, each.part) for each in groups], dtype=float).T
        limits_S1 = self._limits_S[:, None]
        gains_SP = (parts_P - limits_S1 * ofs_P) / (limits_S1 * sizes_P)
        logs_SB = np.log1p(np.array(BETS)[:, None] * gains_SP[:, None, :]).sum(axis=2)
        # exp overflows above 709; beyond 600 the evidence is cut to MOST_EVIDENCE in any case.
        self._stakes_SB = self._stakes_SB * np.exp(np.minimum(logs_SB, 600.0))
        self._stakes_SB /= max(1.0, self.evidence / self._most)
        self._begin(step, ofs_P, parts_P)

    def state(self) -> dict[str, Any]:
        arrays = {"limits": self._limits_S.tolist(), "stakes": self._stakes_SB.tolist()}
        return {"begun": self._begun, "window": self._window, "steps": self._steps, **arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._begun, self._steps = int(state["begun"]), list(state["steps"])
        self._window = [list(step) for step in state["window"]]
        self._limits_S = np.array(state["limits"], dtype=float)
        self._stakes_SB = np.array(state["stakes"], dtype=float).reshape(-1, len(BETS))

    def _begin(self, step: int, ofs_P: Floats, parts_P: Floats) -> None:
        """Let the steps up to this one be a reference, if they are enough, and bet from the next one on."""
        sums = (parts_P.sum(), ofs_P.sum(), parts_P @ parts_P, parts_P @ ofs_P, ofs_P @ ofs_P)
        self._window = [*self._window[1 - WINDOW :], [float(ofs_P.size), *map(float, sums)]]
        groups, part, of, squares, products, of_squares = np.sum(self._window, axis=0)
        if len(self._window) < LEAST_STEPS or groups < LEAST_GROUPS:
            return
        # The imaginary group has the usual size and is counted altogether: it keeps the share of few groups above 0.
        usual = of / groups
        share = (part + usual) / (of + usual)
        spread = squares - 2.0 * share * products + share**2 * of_squares + (usual * (1.0 - share)) ** 2
        limit = share + TOLERANCE + SPREADS * math.sqrt(max(0.0, spread)) / (of + usual)
        if limit > LARGEST:
            return
        self._begun += 1
        stake = 1.0 / (self._begun * (self._begun + 1) * len(BETS))
        self._steps.append(step)
        self._limits_S = np.append(self._limits_S, limit)
        self._stakes_SB = np.append(self._stakes_SB, np.full((1, len(BETS)), stake), axis=0)
        if len(self._steps) > MOST_STARTS:
            least = int(self._stakes_SB[:-1].sum(axis=1).argmin())
            del self._steps[least]
            self._limits_S = np.delete(self._limits_S, least)
            self._stakes_SB = np.delete(self._stakes_SB, least, axis=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """A group's completions that reward and shadow both scored, by which of the two call them correct.

    `judged` in all, `paid` by the reward, `confirmed` by both, `missed`: correct for the shadow only.
    """

    judged: int
    paid: int
    confirmed: int
    missed: int = 0


def judged_by_both(scores: Iterable[Score]) -> list[tuple[float, float]]:
    """Return the reward's value and the shadow's, of the scores that have both."""
    return [
        (score.value, score.shadow.value)
        for score in scores
        if score.value is not None and score.shadow is not None and score.shadow.value is not None
    ]


def verdicts_of(groups: Sequence[Group]) -> list[Verdicts]:
    """The verdicts of a step's first round, group by group; empty without a shadow."""
    found = []
    for group in groups:
        # Further rounds are drawn because the first taught too little: their outcomes are selected.
        if group.round:
            continue
        above = group.correct_above
        pairs = [(value > above, shadow > above) for value, shadow in judged_by_both(group.raw_scores)]
        if pairs:
            paid, confirmed = sum(pays for pays, _ in pairs), sum(pays and confirms for pays, confirms in pairs)
            missed = sum(confirms for _, confirms in pairs) - confirmed
            found.append(Verdicts(judged=len(pairs), paid=paid, confirmed=confirmed, missed=missed))
    return found


class GamingAlarm:
    """An alarm on the change of proxy minus shadow, in two ways that clean learning does not cause.

    1. A larger share than before of the completions that the reward pays is unconfirmed by the shadow. This share is
       the mean gap of verdicts among completions that the reward calls correct. Improving at both, a shadow that is
       stricter throughout, and a lenient one leave it unchanged.
    2. The gap of verdicts over all completions rises, and the shadow's rate falls: the reward never paid for the
       shadow's goal. Either by itself is no gaming: a strict reward catches up, or prompts get harder. A clean run
       leaves one of the two unchanged, so the evidence is the smaller of both.

    Each is a `RiseTest`; `evidence` is the mean of 1 and 2, itself an e-process, so the chance of ever reaching 1 /
    ALPHA is at most ALPHA. An alarm begins there and ends when the evidence has fallen below 1. Several `alarms` of
    a run begin at as many times the evidence, so that the chance of any stays at most ALPHA.
    """

    def __init__(self, *, alarms: int = 1) -> None:
        self.is_on, self._begins_at = False, alarms / ALPHA
        self._tests = {name: RiseTest(alarms=alarms) for name in ("unconfirmed", "gap", "fall")}

    @property
    def evidence(self) -> float:
        by_name = {name: test.evidence for name, test in self._tests.items()}
        return (by_name["unconfirmed"] + min(by_name["gap"], by_name["fall"])) / 2.0

    @property
    def since(self) -> int | None:
        """The first step after the estimated change; None before any possible start."""
        unconfirmed, gap = self._tests["unconfirmed"], self._tests["gap"]
        is_second = min(gap.evidence, self._tests["fall"].evidence) > unconfirmed.evidence
        return (gap if is_second else unconfirmed).since

    def observe(self, step: int, groups: Sequence[Verdicts]) -> None:
        for name, test in self._tests.items():
            test.observe(step, [count for each in groups if (count := _count(name, each)).of])
        self.is_on = self.evidence >= (1.0 if self.is_on else self._begins_at)

    def state(self) -> dict[str, Any]:
        return {"is_on": self.is_on, **{name: test.state() for name, test in self._tests.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.is_on = bool(state["is_on"])
        for name, test in self._tests.items():
            test.restore(state[name])


def _count(name: str, group: Verdicts) -> Count:
    if name == "unconfirmed":
        return Count(size=group.judged, of=group.paid, part=group.paid - group.confirmed)
    # (1 + proxy - shadow) / 2, because the test takes shares between 0 and 1.
    if name == "gap":
        gap = group.paid - group.confirmed - group.missed
        return Count(size=group.judged, of=group.judged, part=(group.judged + gap) / 2.0)
    return Count(size=group.judged, of=group.judged, part=group.judged - group.confirmed - group.missed)


MOST_CHARS = 160  # of an example in a line


class AlarmWatch:
    """The alarm about one `task` or all, the fields that it adds to a step's line, and its record when it begins."""

    def __init__(self, tokenizer_of: Callable[[], Any], task: str = "", *, alarms: int = 1) -> None:
        self._tokenizer_of, self._alarm, self._task = tokenizer_of, GamingAlarm(alarms=alarms), task
        self._is_new = False  # the alarm began at the step under way

    def state(self) -> dict[str, Any]:
        return self._alarm.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._alarm.restore(state)

    def observe(self, groups: GroupsView, credit: Credit) -> dict[str, Any]:
        verdicts = verdicts_of(groups_of(self._task, groups.groups))
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
        """The step's most credited completion that was paid and not confirmed, and the tokens that mark it."""
        paid = paid_in(groups.groups, credit, self._task)
        tokens = [self._tokenizer_of().decode([token]) for token in telling_tokens(paid)]
        found = {"gaming_tokens": " | ".join(map(repr, tokens))} if tokens else {}
        for each in unconfirmed(paid)[:1]:
            text = " ".join(each.fields["completion"].split())
            where = f"group {each.fields['group']}, completion {each.fields['index']}"
            found["gaming_example"] = f"{where}: {text[:MOST_CHARS]}{'...' if len(text) > MOST_CHARS else ''}"
        return found

    def rewind(self, run: RunView) -> None:
        """Drop the alarms from the run's first step on, because a resumed run comes to them again."""
        file = run.folder / GAMING
        if file.exists():
            kept = redacted_json(each for each in read_alarms(run.folder) if each["step"] < run.first_step)
            write_text(file, "".join(f"{line}\n" for line in kept))

    def write_new(self, run: RunView, metrics: Mapping[str, Any]) -> None:
        """Append an alarm that began at this step to `gaming.jsonl`, without known secrets."""
        if not self._is_new:
            return
        self._is_new = False
        prefix = f"task_{self._task}_" if self._task else ""
        own = {**metrics} | {
            name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)
        }
        above, tokenizer = run.config.scoring.correct_above, self._tokenizer_of()
        record = alarm_record(run.folder, own, above, tokenizer, self._task)
        with (run.folder / GAMING).open("a", encoding="utf-8") as stream:
            stream.write(f"{redacted_json([record])[0]}\n")


MOST_NAMED = 100  # completions of an alarm
MOST_TOKENS = 8
# A late alarm must not read the records of the whole run between two steps.
MOST_STEPS = 40
# Keeps the logarithm finite for a token that only unconfirmed completions have.
LEAST_SHARE = 1e-3
Weights = Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PaidCompletion:
    """A completion that the reward calls correct, `is_confirmed` by the shadow or not; `fields` identify it."""

    is_confirmed: bool
    fields: Mapping[str, Any]
    tokens_A: Tokens
    positive_A: Floats

    @property
    def credit(self) -> float:
        """The sum of its positive advantages."""
        return float(self.positive_A.sum())


def paid_in(groups: Sequence[Group], credit: Credit, task: str = "") -> list[PaidCompletion]:
    """The paid completions of a step, or of one task in it, that both verifiers scored."""
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
        if groups_of(task, [group]) and raw.shadow is not None and raw.shadow.value is not None
        if raw.value is not None and raw.value > group.correct_above
    ]


def paid_on_disk(run: Path, first: int, last: int, correct_above: float) -> Iterator[PaidCompletion]:
    """The paid completions of several steps, streamed from a run's records."""
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
    """Token ids that distinguish unconfirmed completions from confirmed ones, with their weights, the largest first.

    The weight is p ln(p / q), in nats: p is an id's share of the credit of the unconfirmed completions, q of the
    confirmed ones, both with `LEAST_SHARE` added. Only positive weights are kept.
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
    """The completions that the shadow did not confirm, the most credited first."""
    return sorted((each for each in paid if not each.is_confirmed), key=lambda each: -each.credit)


def alarm_record(
    run: Path, metrics: Mapping[str, Any], correct_above: float, tokenizer: Any, task: str = ""
) -> dict[str, Any]:
    """The unconfirmed paid completions from the estimated change to this step, and their `telling_tokens`."""
    step, since = int(metrics["step"]), int(metrics["gaming_since"])
    paid = [*paid_on_disk(run, max(since, step - MOST_STEPS + 1), step, correct_above)]
    paid = [each for each in paid if each.fields["example_id"].startswith(prefix_of(task))]
    named, weights = unconfirmed(paid), telling_tokens(paid)
    return {
        "step": step,
        **({"task": task} if task else {}),
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
    """A completion with its most credited tokens; among equal ones the `telling_tokens` come first."""
    ids, credits_A = paid.tokens_A.tolist(), paid.positive_A.tolist()
    order = sorted(range(len(ids)), key=lambda at: (-credits_A[at], -weights.get(ids[at], 0.0)))
    tokens = [{"pos": at, "token": tokenizer.decode([ids[at]]), "credit": round(credits_A[at], 6)} for at in order]
    return {**paid.fields, "credit": round(paid.credit, 6), "tokens": tokens[:MOST_TOKENS]}
