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
from retrain.verdicts.study.study import Study
from retrain.verdicts.wording.sentences import explanation
from retrain.verdicts.wording.verdict_line import answer, verdict_line

AS_THEY_ARE = (
    *("direction", "alpha", "baseline", "align", "budget", "shortest", "standing", "exploratory", "undeclared"),
    *("notices", "collapses", "sets", "left_out", "campaign"),
)


def study_data(study: Study) -> dict[str, Any]:
    """Return the documented JSON: numbers that do not exist are null, never NaN."""
    looks = study.looks
    data: dict[str, Any] = {"answer": answer(study), "metric": str(study.metric)}
    data |= {name: plain_data(getattr(study, name)) for name in AS_THEY_ARE}
    return data | {
        "unknown_inputs": study.unknown,
        "shopping": looks
        and {
            "looks": len(looks.looks),
            "metrics": list(looks.metrics),
            "choices": looks.num_choices,
            "registered_in": looks.registered_in or None,
        },
        "plan": study.plan and _plan(study.plan),
        "conditions": [
            {
                "condition": each.label,
                "seeds": list(each.seeds),
                "num_runs": each.num_runs,
                "metrics": plain_data(each.estimates),
            }
            for each in study.conditions
        ],
        "comparisons": [
            plain_data(each) | {"line": verdict_line(each, study), "explanation": explanation(each, study)}
            for each in study.comparisons
        ],
        "two_runs": study.two_runs and plain_data(study.two_runs) | {"metric": str(study.metric)},
    }


def plain_data(value: Any) -> Any:
    """Return a study's values as plain data: dataclasses by their fields; an infinite limit is null."""
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


def _plan(plan: Plan) -> dict[str, Any]:
    names = ("hypothesis", "alpha", "stop_rule", "baseline", "direction", "margin", "written", "sha256")
    metric = str(plan.metric) if plan.metric else None
    plain: dict[str, Any] = {name: plain_data(getattr(plan, name)) for name in names}
    return plain | {"primary_metric": metric, "intact": plan.is_intact}
