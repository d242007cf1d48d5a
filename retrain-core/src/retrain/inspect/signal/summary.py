"""Accounts side by side: runs of one condition pooled, prompts pooled by difficulty, and all of it as plain data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from retrain.inspect.signal.account import Account, CostPerPoint, Gain, Tally, cost_per_point, mean_gain
from retrain.inspect.signal.drawn import Cause, Share
from retrain.inspect.signal.prompts import RATE_LABELS, Checked, Forecasts, PromptAccount, checked
from retrain.kernel.types import Floats, prefix_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyAccount:
    """The prompts of one difficulty: `chance` and `rate` are means over prompts, None without verdicts."""

    difficulty: str
    prompts: int
    groups: int
    teaching_groups: int
    rate: float | None
    chance: float | None
    tokens: int
    taught_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool:
    """Runs of one condition, or a single run: their tokens together, and a gain with the cost of its points."""

    condition: str
    accounts: Sequence[Account]
    tallies: Mapping[Cause, Tally]
    checked: Checked | None
    gain: Gain | str
    tokens_per_point: CostPerPoint | None
    seconds_per_point: CostPerPoint | None

    @property
    def drawn_tokens(self) -> int:
        return sum(tally.tokens for tally in self.tallies.values())

    def share(self, *causes: Cause) -> float:
        return sum(self.tallies[c].tokens for c in causes if c in self.tallies) / max(1, self.drawn_tokens)

    @property
    def teaching_share(self) -> float | None:
        """Return the share of groups whose scores differ; None without groups, or where nothing is judged."""
        groups = sum(each.num_groups for each in self.accounts if each.forecasts.taught_F.size)
        return sum(each.teaching_groups for each in self.accounts) / groups if groups else None


def pooled(condition: str, accounts: Sequence[Account]) -> Pool:
    tallies: dict[Cause, Tally] = {}
    for cause in Cause:
        found = [each.tallies[cause] for each in accounts if cause in each.tallies]
        counts = [each.completions for each in found if each.completions is not None]
        if found:
            tallies[cause] = Tally(tokens=sum(t.tokens for t in found), completions=sum(counts) if counts else None)
    known = [each for each in accounts if isinstance(each.gain, Gain)]
    gains = [each.gain for each in known if isinstance(each.gain, Gain)]
    gain = (gains[0] if len(accounts) == 1 else mean_gain(gains)) if gains else accounts[0].gain
    training = np.array([each.step_tokens for each in known], dtype=np.float64)
    seconds = np.array([each.seconds for each in known])
    return Pool(
        condition=condition,
        accounts=accounts,
        tallies=tallies,
        checked=checked(Forecasts.joined(each.forecasts for each in accounts)),
        gain=gain,
        tokens_per_point=_cost(training, gain),
        seconds_per_point=_cost(seconds, gain),
    )


def _cost(costs: Floats, gain: Gain | str) -> CostPerPoint | None:
    return cost_per_point(costs, gain) if isinstance(gain, Gain) and costs.any() else None


def by_condition(accounts: Sequence[Account]) -> list[Pool]:
    labels = dict.fromkeys(each.condition for each in accounts)
    return [pooled(label, [each for each in accounts if each.condition == label]) for label in labels]


def by_difficulty(prompts: Iterable[PromptAccount]) -> list[DifficultyAccount]:
    """Pool prompts by difficulty, in the order of its text and of the numbers in it."""
    pools: dict[str, list[PromptAccount]] = {}
    for each in prompts:
        pools.setdefault(each.difficulty, []).append(each)
    found = []
    for label in sorted(pools, key=_order):
        chances = [each.chance for each in pools[label] if each.chance is not None]
        rates = [each.rate[0] / sum(each.rate) for each in pools[label] if each.rate is not None]
        found.append(
            DifficultyAccount(
                difficulty=label,
                prompts=len(pools[label]),
                groups=sum(each.groups for each in pools[label]),
                teaching_groups=sum(each.teaching_groups for each in pools[label]),
                rate=fmean(rates) if rates else None,
                chance=fmean(chances) if chances else None,
                tokens=sum(each.tokens for each in pools[label]),
                taught_tokens=sum(each.taught_tokens for each in pools[label]),
            )
        )
    return found


def by_task(account: Account) -> list[DifficultyAccount]:
    """Pool the prompts of each of `[[data.tasks]]`, under its name."""
    pairs = ((task, each) for task in account.tasks for each in account.prompts)
    return by_difficulty(replace(each, difficulty=t) for t, each in pairs if each.example.startswith(prefix_of(t)))


def _order(label: str) -> tuple[Any, ...]:
    if label in RATE_LABELS:
        return (RATE_LABELS.index(label),)
    parts = re.split(r"(\d+)", label)
    return (len(RATE_LABELS), *((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts))


def share_of_top_prompts(prompts: Sequence[PromptAccount]) -> float | None:
    """Return the credit of the trained prompts' top tenth as a share of all; None without credit."""
    sums = sorted((each.credit for each in prompts if each.credit), reverse=True)
    return sum(sums[: -(-len(sums) // 10)]) / sum(sums) if sums else None


def as_data(account: Account) -> dict[str, Any]:
    pool, credit = pooled(account.condition, [account]), account.credit
    return {
        "run": account.name,
        "condition": account.condition,
        "seed": account.seed,
        "status": account.state,
        "steps": account.num_steps,
        "tokens": {cause.value: asdict(tally) for cause, tally in account.tallies.items()},
        "drawn_tokens": account.drawn_tokens,
        "stated_tokens": account.stated_tokens,
        "supervised_tokens": account.sft_tokens,
        "groups": account.num_groups,
        "teaching_groups": account.teaching_groups,
        "forecast": _checked(pool.checked),
        "difficulties": [asdict(each) for each in by_difficulty(account.prompts)],
        "tasks": [asdict(each) for each in by_task(account)],
        "prompts": [asdict(each) for each in account.prompts],
        "credit": {
            "all": asdict(credit.total),
            "surprisal_tenths": list(map(asdict, credit.surprisal)),
            "entropy_tenths": list(map(asdict, credit.entropy)),
            "planning": asdict(credit.planning) if credit.planning else None,
            "top_tenth_of_prompts": share_of_top_prompts(account.prompts),
        },
        "held_out": _gain(account.gain),
        "tokens_per_point": pool.tokens_per_point and asdict(pool.tokens_per_point),
        "seconds_per_point": pool.seconds_per_point and asdict(pool.seconds_per_point),
        "notes": list(account.notes),
    }


def pool_data(pool: Pool) -> dict[str, Any]:
    return {
        "condition": pool.condition,
        "runs": [each.name for each in pool.accounts],
        "tokens": {cause.value: tally.tokens for cause, tally in pool.tallies.items()},
        "teaching_share": pool.teaching_share,
        "forecast": _checked(pool.checked),
        "held_out": _gain(pool.gain),
        "tokens_per_point": pool.tokens_per_point and asdict(pool.tokens_per_point),
        "seconds_per_point": pool.seconds_per_point and asdict(pool.seconds_per_point),
    }


def share(part: Share, whole: Share) -> tuple[float, float, float]:
    """Return the shares of some tokens: of tokens, of |A|, of |A| (1 - p); 0 of nothing."""
    return (
        part.tokens / max(1, whole.tokens),
        part.credit / whole.credit if whole.credit else 0.0,
        part.pull / whole.pull if whole.pull else 0.0,
    )


def _checked(found: Checked | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "expected_calibration_error": found.calibration.error,
        "interval": list(found.interval),
        "bins": [dict(zip(("forecast", "happened", "groups"), each, strict=True)) for each in found.calibration.bins],
    }


def _gain(gain: Gain | str) -> dict[str, Any]:
    if isinstance(gain, str):
        return {"points": None, "why": gain}
    return {"points": gain.points, "interval": gain.interval, "first_step": gain.first, "last_step": gain.last}
