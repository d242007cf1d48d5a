"""What a campaign found, as the pack keeps it and as a rerun computes it again; no look is recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options


def verdict_of(campaign: Path) -> dict[str, Any]:
    """The metric, how it stands, and each comparison; `problem` says why nothing could be compared."""
    try:
        study = comparison_with_ledger([campaign], Options(), is_recorded=False)
    except ConfigError as error:
        return {"problem": error.problems[0].what}
    comparisons = [
        {
            "condition": each.condition,
            "baseline": each.baseline,
            "verdict": str(each.verdict),
            "cause": str(each.cause),
            "difference": each.difference,
            "interval": [_finite(limit) for limit in each.interval] if each.interval else None,
            "seeds": list(each.seeds),
        }
        for each in study.comparisons
    ]
    return {"metric": str(study.metric), "standing": study.standing, "comparisons": comparisons}


def _finite(limit: float) -> float | None:
    return limit if math.isfinite(limit) else None


def verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """For people: a line for each comparison."""
    if problem := verdict.get("problem"):
        return [f"no verdict: {problem}"]
    return [
        f"{each['condition']} against {each['baseline']}: {each['verdict']} ({each['cause']}), "
        f"{verdict['metric']} {each['difference'] if each['difference'] is not None else 'unknown'}"
        for each in verdict.get("comparisons", ())
    ]
