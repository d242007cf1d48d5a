"""Scores a policy on the held-out examples and on every further set, as metrics and as a record per example."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.contracts.views import EvalView
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Completion, Example, Outcome, Score
from retrain.tasks.tasks import Tasks
from retrain.use.evaluate.sets import HELD_OUT, LoadedSet, held_out_set, load_set, read_sets

Record = Mapping[str, Any]
MEANS = ("correct_rate", "mean_reward", *(f"pass_at_{2**k}" for k in range(11)))
Scored = tuple[Sequence[Sequence[Completion]], Sequence[Sequence[Score]]]  # by example, then by sample


class SetEvaluation:
    """The evaluation of a run: all its sets, one after another; a `retrain.kernel.contracts.tasks.Evaluation`."""

    def __init__(self, context: PluginContext) -> None:
        self.sets: tuple[LoadedSet, ...] = ()
        self._context = context
        self._records: list[Record] = []

    def is_due(self, step: int) -> bool:
        every, last = self._context.config.eval.every, self._context.config.training.max_steps
        return step + 1 == last or (every > 0 and step >= 0 and (step + 1) % every == 0)

    def measure(self, step: int, backend: Backend, failures: Path | None) -> dict[str, Any]:
        started = time.perf_counter()
        fields: dict[str, Any] = {}
        records: list[Record] = []
        weights = dict[str, float]()
        for each in self.sets:
            label = f"eval_{step + 1:06d}" + ("" if each.name == HELD_OUT else f"_{each.name}")
            found = evaluate(each, each.prompts, backend, label=label, failures=failures)
            fields |= set_fields(each, found[1], self._context.plugins)
            records += set_records(each, each.prompts, found, step)
            weights |= {each.prefix: each.weight} if each.is_task else {}
        fields |= over_tasks(fields, weights)
        self._records = records
        return fields | {"eval_time_s": time.perf_counter() - started}

    def records(self) -> list[Record]:
        found, self._records = self._records, []
        return found

    def close(self) -> None:
        for each in self.sets:
            if not each.is_shared:
                each.verifier.close()


def evaluation_of(context: PluginContext, tasks: Tasks) -> SetEvaluation | None:
    evaluation = SetEvaluation(context)
    try:
        evaluation.sets += tuple(held_out_set(each.context, each) for each in tasks.each if each.pool.held_out)
        for each in read_sets(context.config)[0]:
            evaluation.sets += (load_set(each, context, tasks),)
    except BaseException:
        evaluation.close()
        raise
    return evaluation if evaluation.sets else None


def evaluate(
    each: LoadedSet, prompts: Sequence[Prompt], backend: Backend, *, label: str, failures: Path | None = None
) -> Scored:
    """Sample and score some of a set's prompts; each completion's random stream depends only on its example."""
    # Only held-out examples are sampled exactly as in training, entropies included.
    is_held_out = each.is_task or each.name == HELD_OUT
    params = replace(each.params, entropy=is_held_out and backend.capabilities.provides_entropy)
    rollouts = each.verifier.rollouts(backend, each.context, params, each.context_length)
    with rollouts.batch(label, failures) as batch:
        completions_EG = batch.sample(prompts, each.samples, Streams(seeds=each.seeds, purpose="eval"))
        return completions_EG, batch.scores()


def set_fields(each: LoadedSet, scores_EG: Sequence[Sequence[Score]], plugins: Plugins) -> dict[str, Any]:
    above = each.context.config.scoring.correct_above
    clusters_E = [_cluster(prompt.example, each.cluster) for prompt in each.prompts]
    found: dict[str, Any] = {}
    view = EvalView(scores_EG=scores_EG, correct_above=above, clusters_E=clusters_E)
    absent = dict.fromkeys(("run", "groups", "credit", "report"))
    for added in plugins.notify("retrain_extra_metrics", evaluation=view, **absent):
        found |= added or {}
    return {f"{each.prefix}{name.removeprefix('eval_')}": value for name, value in found.items()}


def over_tasks(fields: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
    """Return `eval_*`, means over several tasks (macro), and `eval_weighted_*` from the fields with these prefixes.

    `weights` are the tasks' by prefix. The limits of a mean sum_i w_i p_i of independent rates with limits l_i and u_i
    follow Zou & Donner (2008): sqrt(sum_i w_i^2 (p_i - l_i)^2) below it, and the same of u_i above it.
    """
    found: dict[str, Any] = {}
    names = [name for name in MEANS if weights and all(f"{prefix}{name}" in fields for prefix in weights)]
    counts = {name: [fields[f"{prefix}{name}"] for prefix in weights] for name in ("examples", "samples")}
    for head, given in (("eval_", dict.fromkeys(weights, 1.0)), ("eval_weighted_", weights)):
        shares = {prefix: weight / sum(given.values()) for prefix, weight in given.items()}
        for name in names:
            found[f"{head}{name}"] = sum(share * fields[f"{prefix}{name}"] for prefix, share in shares.items())
        for name, sign in (("ci_low", -1.0), ("ci_high", 1.0)) if names else ():
            gaps = (share * (fields[f"{p}{name}"] - fields[f"{p}correct_rate"]) for p, share in shares.items())
            found[f"{head}{name}"] = found[f"{head}correct_rate"] + sign * math.hypot(*gaps)
        found |= {f"{head}examples": sum(counts["examples"]), f"{head}samples": min(counts["samples"])} if names else {}
    return found


def set_records(each: LoadedSet, prompts: Sequence[Prompt], found: Scored, step: int) -> list[Record]:
    above = each.context.config.scoring.correct_above
    rows = zip(prompts, *found, strict=True)
    return [
        {
            "step": step,
            "set": each.name,
            "example": prompt.example.id,
            "cluster": _cluster(prompt.example, each.cluster),
            "scores": [score.value for score in scores],
            "correct": [score.value is not None and score.value > above for score in scores],
            **_outcomes(scores),
            **_parts_and_shadows(scores),
            "lengths": [completion.num_actions for completion in completions],
            "stops": [completion.stop_reason.value for completion in completions],
        }
        for prompt, completions, scores in rows
    ]


def _outcomes(scores: Sequence[Score]) -> dict[str, list[str]]:
    """Return the outcome of every sample, if one of them has no score."""
    if all(score.outcome is Outcome.SCORED for score in scores):
        return {}
    return {"outcomes": [score.outcome.value for score in scores]}


def _parts_and_shadows(scores: Sequence[Score]) -> dict[str, Any]:
    """Return the rewards whose sum is the score, if several, and the scores of `[reward] shadow`, if any."""
    found: dict[str, Any] = {}
    if names := sorted({name for score in scores for name in score.parts}):
        found["parts"] = {name: [score.parts.get(name) for score in scores] for name in names}
    shadows = [score.shadow for score in scores if score.shadow is not None]
    if len(shadows) == len(scores):
        found["shadow_scores"] = [score.value for score in shadows]
        found |= {f"shadow_{name}": value for name, value in _outcomes(shadows).items()}
    return found


def _cluster(example: Example, column: str) -> str:
    value = example.info.get(column) if column else None
    return example.id if value is None else str(value)
