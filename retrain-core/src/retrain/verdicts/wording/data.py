"""A comparison as the documented JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any

from retrain.records.runs.registered import Plan
from retrain.verdicts.ledger.looks import Looks
from retrain.verdicts.study.comparison import Comparison
from retrain.verdicts.study.study import Study
from retrain.verdicts.study.summaries import Condition
from retrain.verdicts.wording.sentences import explanation
from retrain.verdicts.wording.verdict_line import answer, verdict_line


def study_data(study: Study) -> dict[str, Any]:
    """Plain data: numbers that do not exist are null, never NaN."""
    return {
        "answer": answer(study),
        "campaign": str(study.campaign) if study.campaign else None,
        "metric": str(study.metric),
        "direction": study.direction.value,
        "alpha": study.alpha,
        "baseline": study.baseline,
        "align": study.align.value,
        "budget": study.budget,
        "shortest": list(study.shortest),
        "standing": study.standing,
        "exploratory": list(study.exploratory),
        "undeclared": list(study.undeclared),
        "unknown_inputs": study.unknown,
        "notices": list(study.notices),
        "shopping": _looks(study.looks),
        "plan": _plan(study.plan),
        "conditions": [_condition(each) for each in study.conditions],
        "comparisons": [_comparison(each, study) for each in study.comparisons],
        "collapses": plain_data(study.collapses),
        "sets": plain_data(study.sets),
        "two_runs": plain_data(study.two_runs) | {"metric": str(study.metric)} if study.two_runs else None,
        "left_out": [
            {"name": each.name, "condition": each.condition, "seed": each.seed, "reason": each.reason}
            for each in study.left_out
        ],
    }


def plain_data(value: Any) -> Any:
    """Plain data of what a study holds: dataclasses by their fields; an infinite limit is null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain_data(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_data(each) for key, each in value.items()}
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_data(each) for each in value]
    return value


def _comparison(comparison: Comparison, study: Study) -> dict[str, Any]:
    data: dict[str, Any] = plain_data(comparison)
    return data | {"line": verdict_line(comparison, study), "explanation": explanation(comparison, study)}


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        "condition": condition.label,
        "seeds": list(condition.seeds),
        "num_runs": condition.num_runs,
        "metrics": {
            name: {
                "mean": estimate.mean,
                "interval": None if estimate.interval is None else list(estimate.interval),
                "values": {str(seed): value for seed, value in estimate.values.items()},
            }
            for name, estimate in condition.estimates.items()
        },
    }


def _looks(looks: Looks | None) -> dict[str, Any] | None:
    if looks is None:
        return None
    counts = {"looks": len(looks.looks), "metrics": list(looks.metrics), "choices": looks.num_choices}
    return counts | {"registered_in": looks.registered_in or None}


def _plan(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {
        "hypothesis": plan.hypothesis,
        "primary_metric": str(plan.metric) if plan.metric else None,
        "alpha": plan.alpha,
        "stop_rule": plan.stop_rule,
        "baseline": plan.baseline,
        "direction": plan.direction.value if plan.direction else None,
        "margin": plan.margin,
        "written": plan.written.isoformat() if plan.written else None,
        "sha256": plan.sha256,
        "intact": plan.is_intact,
    }
