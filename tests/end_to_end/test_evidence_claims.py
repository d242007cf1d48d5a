"""The table of simulated claims: what counts as a miss, and that a miss is the exit code."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a module of `benchmarks` as its command sees it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("hits", "bounds", "is_met"),
    [
        (950, {"at_least": 0.95}, True),
        (938, {"at_least": 0.95}, True),  # two standard errors are 1.5 points
        (934, {"at_least": 0.95}, False),
        (985, {"at_least": 0.94, "at_most": 0.975}, False),
        (60, {"at_most": 0.055}, True),
        (75, {"at_most": 0.055}, False),
        (75, {}, True),
    ],
)
def test_a_share_may_be_two_standard_errors_off(load: Any, hits: int, bounds: dict[str, float], is_met: bool) -> None:
    claim = load("claims.claim")
    measured = claim.share("x", np.arange(1000) < hits, **bounds)
    assert measured.is_met is is_met
    assert measured.error == pytest.approx(2 * math.sqrt(hits / 1000 * (1 - hits / 1000) / 1000))


def test_means_have_the_error_of_a_mean_and_nan_is_a_miss(load: Any) -> None:
    claim = load("claims.claim")
    measured = claim.mean("x", np.array([10.0, 12.0, 11.0, 13.0]), at_most=11.0)
    assert (measured.figure, measured.is_met) == (11.5, True)
    assert measured.error == pytest.approx(2 * math.sqrt(5 / 3) / 2)
    assert not claim.mean("x", np.array([math.nan, 1.0])).is_met


def test_every_claim_is_found_and_a_miss_is_the_exit_code(
    load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evidence, claim = load("evidence"), load("claims.claim")
    known = evidence.all_claims()
    assert {"flip-coverage", "binomial-coverage", "false-verdicts", "disagreements"} <= set(known)
    assert evidence.main(["--only", "disagreements", "--simulations", "5"]) == 0
    assert "| 0.00 % | 0.00 % | at most 0.00 % | yes |" in capsys.readouterr().out

    def missing(simulations: int, seeds: Any) -> Iterator[Any]:
        yield claim.share("never", np.zeros(simulations, dtype=bool), at_least=0.5)

    monkeypatch.setattr(evidence, "all_claims", lambda: {"missing": missing})
    assert evidence.main(["--simulations", "10"]) == 1
    assert "| never | 0.00 % | 0.00 % | at least 50.00 % | NO |" in capsys.readouterr().out
