"""The fields of `[reward] shadow` on a run's lines, and the configurations of a shadow that are refused.

The shadow's score of a completion is `score.shadow` of its raw score: `tasks/scoring` has it scored with the
reward, in separate processes, wherever a run scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pydantic import ValidationError

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Group, Outcome, Score
from retrain.tasks.scoring.build import (
    NO_REWARD,
    SHADOW,
    SHADOW_PARAMS,
    brings_tasks,
    has_verifier,
    shadow_config,
    shadow_keys,
)


def step_fields(groups: Sequence[Group]) -> dict[str, float]:
    """The fields of a step's line; none where no completion was shown to a shadow.

    Means and rates are over the completions of the first round that both gave a score, as those of the reward are
    (see `observe/metrics`), and absent where there is none. The counts cover all rounds.
    """
    outcomes = Counter(score.shadow.outcome for group in groups for score in group.raw_scores if score.shadow)
    if not outcomes:
        return {}
    first = [group for group in groups if not group.round]
    pairs = _pairs(score for group in first for score in group.raw_scores)
    fields: dict[str, float] = {"shadow_judged_count": len(pairs)}
    if pairs:
        mean, rate, gap = _compared(pairs, first[0].correct_above)
        fields |= {"shadow_mean_reward": mean, "shadow_correct_rate": rate, "shadow_gap": gap}
    return fields | {
        "shadow_no_verdict_count": outcomes[Outcome.NO_VERDICT],
        "shadow_failed_count": outcomes[Outcome.FAILED],
    }


def eval_fields(scores_EG: Sequence[Sequence[Score]], correct_above: float) -> dict[str, float]:
    """`eval_shadow_rate`, `eval_shadow_reward` and `eval_shadow_gap`, over the completions that both gave a score."""
    pairs = _pairs(score for scores in scores_EG for score in scores)
    if not pairs:
        return {}
    mean, rate, gap = _compared(pairs, correct_above)
    return {"eval_shadow_rate": rate, "eval_shadow_reward": mean, "eval_shadow_gap": gap}


def _pairs(scores: Iterable[Score]) -> list[tuple[float, float]]:
    """The values of reward and shadow where both gave one."""
    return [
        (score.value, score.shadow.value)
        for score in scores
        if score.value is not None and score.shadow is not None and score.shadow.value is not None
    ]


def _compared(pairs: Sequence[tuple[float, float]], correct_above: float) -> tuple[float, float, float]:
    """The shadow's mean and correct rate, and the mean of the reward's score minus the shadow's."""
    shadows = [shadow for _, shadow in pairs]
    gap = math.fsum(proxy - shadow for proxy, shadow in pairs)
    rate = sum(shadow > correct_above for shadow in shadows)
    return math.fsum(shadows) / len(pairs), rate / len(pairs), gap / len(pairs)


OF_THE_RUN = ("type", "weights", "shadow", "shadow_params")  # keys of [reward] that no shadow has


def shadow_problems(config: Config, plugins: Plugins) -> Iterator[Problem]:
    """Every problem with `[reward] shadow` but an unknown name, which is reported as that of any part."""
    keys = shadow_keys(config)
    name, params = keys.shadow, keys.shadow_params
    if not name:
        if params:
            what, fix = "are the keys of a shadow, and there is none", 'set shadow = "NAME", or remove them'
            yield Problem(where=config.place(SHADOW_PARAMS), what=what, fix=fix)
        return
    where = config.place(SHADOW)
    if name == NO_REWARD:
        fix = "name a reward that judges, or remove the key"
        yield Problem(where=where, what=f"reward {NO_REWARD!r} judges nothing", fix=fix)
    elif brings_tasks(config, plugins):
        provider = config.environment.provider
        what = f"environment {provider!r} scores its own episodes, and gives no text that a shadow could score"
        yield Problem(where=where, what=what, fix="remove the shadow, or let [data] and [reward] give tasks and scores")
    elif not has_verifier(config):
        what = f"reward {NO_REWARD!r} is trained on no score, so there is none that a shadow could stand beside"
        yield Problem(where=where, what=what, fix="remove the shadow")
    if of_run := [key for key in OF_THE_RUN if key in params]:
        fix = "remove it: `shadow` names the shadow's reward"
        yield Problem(where=f"{config.place(SHADOW_PARAMS)}.{of_run[0]}", what="is not a key of a shadow", fix=fix)
        return
    try:
        shadow_config(config)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            what = "unknown key" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
            yield Problem(where=f"{config.place(SHADOW_PARAMS)}.{key}", what=what, fix="give it as [reward] takes it")
