"""Real runs of the toy policy in which tokens are lost in every way there is; the engine's own count is the referee."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from retrain.inspect.signal.account import Account, read_account
from retrain.inspect.signal.drawn import Cause
from retrain.kernel.errors import NonFiniteError, Problem
from retrain.records.runs.source import find_runs
from tests.kit.tables import cells

REWARD = """
from retrain.api import Score

class Reward:
    def __init__(self, context):
        pass

    def score(self, example, text):
        kind, words = int(example.prompt.split()[4]), text.split()
        if kind < 3:
            return (0.0, 1.0, 0.5)[kind]
        digit = sum(map(ord, text)) % 6
        if kind in (3, 4) and digit:
            return Score.no_verdict("cannot tell")
        if kind == 5 and digit == 0:
            raise RuntimeError("broken")
        return (0.0, 0.5, 1.0)[digit % 3]
"""
BASE = ("--backend", "toy", "--data-source", "toy", "--set", "data.options.count=60", "--reward-type", "kinds.Reward")
BASE += ("--max-steps", "3", "--batch-size", "6", "--group-size", "6", "--max-tokens", "25", "--seed", "1")
BASE += (
    *cells("""
    --advantage-mode  grpo  --transform-mode  toy_flat  --uncertainty-kind  toy_nll  --eval-every  2
"""),
)
BASE += ("--data-instruction", "", "--temperature", "1.0", "--save-every", "0", "--scoring-audit", "off")
BASE += ("--eval-examples", "2", "--eval-samples", "2", "--set", "scoring.max_failed_frac=1.0")
BASE += ("--set", "scoring.retries=0")


@dataclass
class Counted:
    """What the engine drew, token by token, and the steps at which training is not finite."""

    tokens: int = 0
    bad: set[int] = field(default_factory=set)


@pytest.fixture
def engine(toys: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """The toy backend, which counts."""
    backend, counted = importlib.import_module("toy_parts").ToyBackend, Counted()
    sample, train = backend.sample, backend.train

    def counting(self: Any, requests: Any, params: Any) -> Any:
        found = sample(self, requests, params)
        counted.tokens += sum(len(each.tokens_T) for group in found for each in group)
        return found

    def training(self: Any, batch: Any) -> Any:
        if batch.step in counted.bad:
            raise NonFiniteError(Problem(what="the loss is not finite"))
        return train(self, batch)

    monkeypatch.setattr(backend, "sample", counting)
    monkeypatch.setattr(backend, "train", training)
    return counted


@pytest.fixture
def account(
    command: Callable[..., Any], engine: Counted, tokenizer_folder: Path, tmp_path: Path
) -> Callable[..., Account]:
    """`account("--refill", "1")`: a run, whose account adds up to what the engine counted."""
    (tmp_path / "kinds.py").write_text(REWARD, encoding="utf-8")

    def run(*arguments: str) -> Account:
        engine.tokens = 0
        result = command(*BASE, "--model", str(tokenizer_folder), *arguments, "--log-dir", "run")
        assert result.code == 0, result.err
        found = read_account(find_runs([tmp_path / "run"]).candidates[0])
        assert found.drawn_tokens == engine.tokens > 0
        assert found.step_tokens == found.stated_tokens
        assert not found.notes
        return found

    return run


@pytest.mark.slow
def test_tokens_by_cause_add_up_to_what_the_engine_drew(account: Callable[..., Account], engine: Counted) -> None:
    found = account("--refill", "3", "--batch-size", "4", "--overlong", "drop")
    seen = set(found.tallies)
    engine.bad = {2}
    found = account("--overlong", "mask")
    assert found.tallies[Cause.TRUNCATED].completions
    seen |= set(found.tallies)
    engine.bad = set()
    found = account("--set", "training.control=no_update")
    assert not {Cause.TAUGHT, Cause.ZERO_CREDIT, Cause.REJECTED} & set(found.tallies)
    assert seen | set(found.tallies) == set(Cause) - {Cause.TRAINED, Cause.UNRECORDED, Cause.OTHER}
