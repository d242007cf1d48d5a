"""The page and the console of a replay, with texts that mean harm."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.inspect.replay.command import lines, render
from retrain.inspect.replay.job import ONE_STEP

EVIL = "<script>alert(1)</script>\x1b[2J"


def condition(name: str, **given: Any) -> dict[str, Any]:
    """A condition as `as_data` gives it."""
    numbers = {"cosine": 0.9, "low": 0.8, "high": 0.95, "norm": 2.0, "norm_ratio": 0.5, "loss": 0.1}
    counts = {"clip_fraction": 0.0, "trained_tokens": 9, "trained_groups": 2}
    return {"name": name, **numbers, **counts, "parts": [0.07, 0.03], "prompts": [], "tokens": [], **given}


def data(*others: dict[str, Any], **given: Any) -> dict[str, Any]:
    """A replay as `as_data` gives it."""
    was = {
        "start": "",
        "forward": [0],
        "is_exact": True,
        "compared": ["loss"],
        "different": [],
        "after": "",
        "files": {},
    }
    conditions = [condition("as taken", cosine=1.0, parts=[]), *others]
    found = {"run": f"logs/{EVIL}", "step": 1, "updates": 1, "as_it_was": was, "conditions": conditions}
    return {**found, "resamples": 9, "passes": 3, "note": ONE_STEP, **given}


@pytest.mark.slow
def test_names_prompts_and_tokens_are_escaped() -> None:
    prompt = {"group": 0, "example_id": EVIL, "part": 0.07, "prompt": EVIL}
    token = {"group": 0, "index": 1, "position": 2, "before": -1.0, "after": 1.0, "token": EVIL, "reward": None}
    nothing = condition("loss=mine", cosine=None, low=None, high=None, norm_ratio=0.0, parts=[])
    page = render(data(condition(f"loss={EVIL}", prompts=[prompt], tokens=[token]), nothing))
    assert "<script>alert" not in page
    assert "\x1b" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 4
    assert ONE_STEP in page
    assert "no direction" in page
    assert "src=" not in page.partition("<body>")[0], "nothing is fetched"


def test_a_replay_without_conditions_has_no_table_and_no_word_on_directions() -> None:
    told = lines(data())
    assert ONE_STEP not in told
    assert not any("cosine" in line for line in told)
    assert "plotly" not in render(data()).partition("<script>")[0]


def test_a_gradient_of_zero_and_no_interval_are_shown_as_that() -> None:
    nothing = condition("loss=mine", cosine=None, low=None, high=None, norm_ratio=0.0, parts=[])
    told = lines(data(nothing))
    row = next(line for line in told if line.startswith("loss=mine"))
    assert " - " in row


def test_what_differs_is_named() -> None:
    was = {
        **data()["as_it_was"],
        "is_exact": False,
        "different": [{"step": 1, "field": "grad_norm", "was": 0.5, "now": 0.51}],
        "after": "final",
        "files": {"adapter_model.safetensors": False},
    }
    told = "\n".join(lines(data(as_it_was=was)))
    assert "not the same bits" in told
    assert "step 1 grad_norm: 0.51, recorded 0.5" in told
    assert "adapter_model.safetensors differs from the file of final" in told
