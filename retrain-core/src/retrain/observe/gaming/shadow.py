"""`[reward] shadow`: its fields on a run's lines, its sections of the report, and the checks of its configuration.

`tasks/scoring` scores each completion with the reward and the shadow, in separate processes; the shadow's score is
`score.shadow` of the raw score.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import ValidationError

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Group, Outcome, Score, groups_of
from retrain.observe.gaming.alarm import judged_by_both, read_alarms
from retrain.records.reading import Record, number
from retrain.records.run import Run
from retrain.tasks.scoring.build import NO_REWARD, brings_tasks, has_verifier, shadow_keys
from retrain.tasks.scoring.shadow import SHADOW, SHADOW_PARAMS, shadow_config


def step_fields(groups: Sequence[Group]) -> dict[str, float]:
    """The fields of a step's line; empty where no completion was shown to a shadow.

    Means and rates are over the completions of the first round that both scored, as for the reward (see
    `observe/metrics`), and absent without such completions. The counts cover all rounds.
    """
    outcomes = Counter(score.shadow.outcome for group in groups for score in group.raw_scores if score.shadow)
    if not outcomes:
        return {}
    first = [group for group in groups if not group.round]
    pairs = judged_by_both(score for group in first for score in group.raw_scores)
    fields: dict[str, float] = {"shadow_judged_count": len(pairs)}
    if pairs:
        mean, rate, gap = _compared(pairs, first[0].correct_above)
        fields |= {"shadow_mean_reward": mean, "shadow_correct_rate": rate, "shadow_gap": gap}
    return fields | {
        "shadow_no_verdict_count": outcomes[Outcome.NO_VERDICT],
        "shadow_failed_count": outcomes[Outcome.FAILED],
    }


def fields_of_tasks(tasks: Sequence[str], groups: Sequence[Group]) -> dict[str, float]:
    """The fields of a step's line, and of each of `[[data.tasks]]`."""
    found = {f"task_{task}_{name}": x for task in tasks for name, x in step_fields(groups_of(task, groups)).items()}
    return step_fields(groups) | found


def eval_fields(scores_EG: Sequence[Sequence[Score]], correct_above: float) -> dict[str, float]:
    """`eval_shadow_rate`, `eval_shadow_reward` and `eval_shadow_gap`, over the completions that both scored."""
    pairs = judged_by_both(score for scores in scores_EG for score in scores)
    if not pairs:
        return {}
    mean, rate, gap = _compared(pairs, correct_above)
    return {"eval_shadow_rate": rate, "eval_shadow_reward": mean, "eval_shadow_gap": gap}


def _compared(pairs: Sequence[tuple[float, float]], correct_above: float) -> tuple[float, float, float]:
    """The shadow's mean and correct rate, and the mean of the reward's score minus the shadow's."""
    shadows = [shadow for _, shadow in pairs]
    gap = math.fsum(proxy - shadow for proxy, shadow in pairs)
    rate = sum(shadow > correct_above for shadow in shadows)
    return math.fsum(shadows) / len(pairs), rate / len(pairs), gap / len(pairs)


# Keys of [reward] that describe the run's reward and its shadow, so a shadow cannot have them.
RUN_ONLY = ("type", "weights", "shadow", "shadow_params")


def shadow_problems(config: Config, plugins: Plugins) -> Iterator[Problem]:
    """Every problem with `[reward] shadow` except an unknown name; that is reported like any part's."""
    keys = shadow_keys(config)
    name, params = keys.shadow, keys.shadow_params
    if not name:
        if params:
            what, fix = "are the keys of a shadow, but none is configured", 'set shadow = "NAME", or remove them'
            yield Problem(code="reward.no-shadow", where=config.place(SHADOW_PARAMS), what=what, fix=fix)
        return
    where = config.place(SHADOW)
    if name == NO_REWARD:
        what, fix = "reward 'none' judges nothing", "name a reward that judges, or remove the key"
        yield Problem(code="reward.judges-nothing", where=where, what=what, fix=fix)
    elif brings_tasks(config, plugins):
        provider = config.environment.provider
        what = f"environment {provider!r} scores its own episodes, so a shadow reward has no text to score"
        fix = "remove the shadow, or let [data] and [reward] give tasks and scores"
        yield Problem(code="reward.no-text-to-shadow", where=where, what=what, fix=fix)
    elif not has_verifier(config):
        what, fix = "reward 'none' is trained on no score, so a shadow has nothing to confirm", "remove the shadow"
        yield Problem(code="reward.no-score-to-shadow", where=where, what=what, fix=fix)
    if of_run := [key for key in RUN_ONLY if key in params]:
        what, fix = "is not a key of a shadow", "remove it: `shadow` names the shadow's reward"
        where = f"{config.place(SHADOW_PARAMS)}.{of_run[0]}"
        yield Problem(code="reward.key-of-run", where=where, what=what, fix=fix)
        return
    try:
        shadow_config(config)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            what = "unknown key" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
            where, fix = f"{config.place(SHADOW_PARAMS)}.{key}", "write it in the form that [reward] accepts"
            yield Problem(code="reward.bad-shadow-params", where=where, what=what, fix=fix)


NO_ALARM_YET = "on a rejected step; without [reward] shadow; when no completion has both scores"
NO_ALARM = "unless the alarm is on"
UNPAID = "when the reward calls no completion correct"
UNCONFIRMED = f"{NO_ALARM_YET}; {UNPAID}"
EARLY = "on a rejected step; in the first 5 steps"
NO_NGRAM, NO_CREDIT = f"{EARLY}; {UNPAID}", f"{EARLY}; without positive credit"
TREND = "on a rejected step; in the first 12 steps"
LN = "ln of {} of the last three steps over the prediction of a line through the logarithms of the ten before."

BOTH = "over the completions that reward and shadow both gave a score"
NO_SHADOW = "without [reward] shadow"
UNPAIRED = f"{NO_SHADOW}; when no completion has both scores"
NOT_EVALUATED = f"except on lines with an evaluation; {UNPAIRED}"
SHADOW_FIELDS = (  # name, meaning, unit, when it is absent
    ("shadow_mean_reward", f"Mean score of the shadow {BOTH}, of the first round.", "", UNPAIRED),
    ("shadow_correct_rate", f"Share that the shadow scores above `[scoring] correct_above`, {BOTH}.", "", UNPAIRED),
    ("shadow_gap", f"Mean of the reward's score minus the shadow's {BOTH}.", "", UNPAIRED),
    ("shadow_judged_count", "Completions of the first round with both scores.", "completions", NO_SHADOW),
    ("shadow_no_verdict_count", "Completions for which the shadow gave no verdict.", "completions", NO_SHADOW),
    ("shadow_failed_count", "Completions on which the shadow failed.", "completions", NO_SHADOW),
    ("shadow_{field}", "`{field}` of an asynchronous shadow, such as `judge_calls`.", "", NO_SHADOW),
    ("eval_shadow_rate", "`shadow_correct_rate` on the held-out examples.", "", NOT_EVALUATED),
    ("eval_shadow_reward", "`shadow_mean_reward` on the held-out examples.", "", NOT_EVALUATED),
    ("eval_shadow_gap", "`shadow_gap` on the held-out examples.", "", NOT_EVALUATED),
)
FIELDS = (
    *SHADOW_FIELDS,
    ("gaming_unconfirmed", "Share of rewarded completions that the shadow does not confirm.", "", UNCONFIRMED),
    ("gaming_evidence", "E-value against an unchanged gap to the shadow; the alarm begins at 20.", "", NO_ALARM_YET),
    ("gaming_since", "First step after the estimated change.", "", NO_ALARM),
    ("gaming_example", "The most credited unconfirmed completion of the step, shortened.", "text", NO_ALARM),
    ("gaming_tokens", "Tokens that get credit in such completions, and not in confirmed ones.", "text", NO_ALARM),
    ("gaming_length_shift", LN.format("the mean length"), "", TREND),
    ("gaming_entropy_shift", LN.format("the mean entropy"), "", TREND),
    (
        "gaming_ngram_share",
        "Largest share of a 4-gram among rewarded completions, less among others or early.",
        "",
        NO_NGRAM,
    ),
    ("gaming_answer_shift", "Share of the text by which rewarded answers begin earlier than at first.", "", EARLY),
    ("gaming_prompt_answers", "Share of rewarded answers that repeat the prompt, less that at the start.", "", EARLY),
    ("gaming_format_credit", "Share of credit on the start's 8 commonest tokens, less the early share.", "", NO_CREDIT),
    ("gaming_suspected", "Those of these that were beyond their thresholds for three steps.", "text", "unless one was"),
    ("gaming_ngram", "That 4-gram.", "text", "unless ngram_share is suspected"),
)


MOST_SHOWN = 5  # completions of an alarm
MOST_CHARS = 300


def alarm_text(run: Path) -> str:
    """Every alarm with its most credited completions; empty without one. A damaged file is reported."""
    try:
        return "\n\n".join("\n".join(_lines(alarm)) for alarm in read_alarms(run))
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        return f"gaming.jsonl cannot be read: {error}"


def _lines(alarm: Mapping[str, Any]) -> Iterator[str]:
    task = f", task {alarm['task']}" if "task" in alarm else ""
    yield (
        f"Step {alarm['step']}{task}: since step {alarm['since']} the reward paid {alarm['num_completions']} "
        f"completions that its shadow does not confirm (evidence {alarm['evidence']:.3g}; the alarm begins at 20)."
    )
    if alarm["tokens"]:
        yield f"Their credit is on {' | '.join(repr(each['token']) for each in alarm['tokens'])}"
    for each in alarm["completions"][:MOST_SHOWN]:
        text = " ".join(str(each["completion"]).split())
        place = f"step {each['step']}, group {each['group']}, completion {each['index']}"
        yield f"{place}, reward {each['reward']:g}, shadow {each['shadow_reward']:g}: {text[:MOST_CHARS]}"
    yield "All of them are in gaming.jsonl."


MOST_POINTS = 200
PLOTS = (  # title, note, the reward's field and the shadow's
    ("Correct rate, training batches", "each step has other prompts", "correct_rate", "shadow_correct_rate"),
    ("Mean reward, training batches", "each step has other prompts", "mean_reward", "shadow_mean_reward"),
    ("Held-out correct rate", "on examples that are never trained on", "eval_correct_rate", "eval_shadow_rate"),
)


def report_section(run: RunView) -> Mapping[str, ReportSection] | None:
    """The curves of reward and shadow; None before the run's first line."""
    try:
        lines = [line for _, line in Run(run.folder).steps()]
    except ConfigError:
        return None
    plots = [plot for spec in PLOTS if (plot := _plot(lines, *spec)) is not None]
    if not plots:
        return None
    name = shadow_keys(run.config).shadow
    text = f"The shadow {name!r} scored the same completions as the reward, but was not trained on."
    return {"Reward and shadow": ReportSection(name="shadow", text=text, plots=plots)}


def _plot(lines: Sequence[Record], title: str, note: str, reward: str, shadow: str) -> ReportPlot | None:
    found = [(line["step"], number(line.get(reward)), number(line.get(shadow))) for line in lines if shadow in line]
    if not found:
        return None
    bins = np.array_split(np.arange(len(found)), min(MOST_POINTS, len(found)))
    points = []
    for part in bins:
        columns = ([found[each][column] for each in part] for column in range(3))
        known = [[value for value in column if value is not None] for column in columns]
        points.append([fmean(values) if values else None for values in known])
    steps, rewards, shadows = zip(*points, strict=True)
    return ReportPlot(
        title=title,
        note=note if len(points) == len(found) else f"{note}; means of {len(bins[0])} steps",
        x=[0.0 if step is None else step + 1 for step in steps],
        lines={"reward": rewards, "shadow": shadows},
        x_title="step",
        is_share=shadow.endswith("_rate"),
    )
