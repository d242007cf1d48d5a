"""Selection of a step's completions and groups: truncated ones may be dropped, further rounds of prompts drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.parts import Planned, Sample, Sampled
from retrain.kernel.progress import Clock
from retrain.kernel.types import Group, GroupStatus, Score, StopReason, group_status

# Later rounds are drawn because the first taught too little, so their means and rates would be biased by that choice.
OF_FIRST_ROUND, LARGEST = re.compile(r"_(mean|rate)(_|$)"), re.compile(r"_max(_|$)")
TRUNCATED = "truncated: [training] overlong = drop"


def selection(config: Config) -> Callable[[Sample], Sample]:
    """Wrap the sampling of a step as `[training] overlong` and `refill` require."""

    def select(sample: Sample) -> Sample:
        one = _without_truncated(sample) if config.training.overlong == "drop" else sample
        return _in_rounds(one, 1 + config.training.refill) if config.training.refill else one

    return select


def _without_truncated(sample: Sample) -> Sample:
    """The same sampling, but truncated completions have no verdict for credit; their raw scores stay."""

    def dropped(planned: Planned, clock: Clock) -> Sampled:
        sampled, groups, none = sample(planned, clock), list[Group](), Score.no_verdict(TRUNCATED)
        for group in sampled.groups:
            pairs = zip(group.completions, group.scores, strict=True)
            groups.append(group.shaped([none if c.stop_reason is StopReason.LENGTH else score for c, score in pairs]))
        return replace(sampled, groups=tuple(groups))

    return dropped


def _in_rounds(sample: Sample, most: int) -> Sample:
    """At most `most` rounds of prompts, until `batch_size` groups are informative (DAPO, arXiv:2503.14476).

    The prompts of all rounds follow each other in the seeded order, so a resumed run draws the same ones. A round that
    cannot be sampled rejects the step.
    """

    def rounds(planned: Planned, clock: Clock) -> Sampled:
        prompts, groups, metrics = list[Prompt](), list[Group](), dict[str, float]()
        for number in range(most):
            found = sample(replace(planned, cursor=planned.cursor + len(prompts), round=number), clock)
            prompts += found.prompts
            if found.error:
                return Sampled(prompts=prompts, error=found.error)
            groups += found.groups
            metrics = joined_fields(metrics, found.metrics)
            if sum(map(_teaches, groups)) >= planned.batch_size:
                break
        return Sampled(prompts=prompts, groups=_limited(groups, planned.batch_size), metrics=metrics)

    return rounds


def _teaches(group: Group) -> bool:
    return group_status(group) is GroupStatus.INFORMATIVE


def _limited(groups: Sequence[Group], wanted: int) -> tuple[Group, ...]:
    """The groups, in order, with the informative ones after the first `wanted` marked as surplus."""
    teaching = [number for number, group in enumerate(groups) if _teaches(group)]
    surplus = frozenset(teaching[wanted:])
    return tuple(replace(group, is_surplus=number in surplus) for number, group in enumerate(groups))


def joined_fields(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Join the fields of two rounds: means and rates of the first, the larger maxima, sums of all others."""
    joined = dict(before)
    for name, value in after.items():
        if name not in before:
            joined[name] = value
        elif not OF_FIRST_ROUND.search(name):
            joined[name] = max(before[name], value) if LARGEST.search(name) else before[name] + value
    return joined
