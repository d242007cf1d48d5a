"""Parts of a replay: gradients whose cosine is known, what --try may change, and a page with texts that mean harm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.inspect.replay.command import lines, render
from retrain.inspect.replay.gradients import FOLDED, Folding, StepGradient, Turn, inner, interval, largest, turn_of
from retrain.inspect.replay.job import ONE_STEP, changed_tables, parse_settings
from retrain.inspect.replay.position import agreement
from retrain.kernel.errors import ConfigError
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from tests.kit.problems import codes_in

SEEDS = Seeds(3)


def gradient(shares_PN: Floats) -> StepGradient:
    """A step whose groups have these shares; a group of zeros has none, like one that is not trained."""
    shares = {group: share_N for group, share_N in enumerate(shares_PN) if share_N.any()}
    return StepGradient(whole_N=shares_PN.sum(0).astype(np.float32), loss=0.0, clipped=0, shares=shares)


def turn(taken_PN: Floats, other_PN: Floats, resamples: int = 200) -> Turn:
    given = {"seeds": SEEDS, "step": 0, "groups": len(taken_PN), "resamples": resamples}
    return turn_of(gradient(taken_PN), gradient(other_PN), **given)  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_parts_of_the_groups_add_up_to_the_turn(seed: int, groups: int) -> None:
    stream = np.random.default_rng(seed)
    taken_PN, other_PN = stream.normal(size=(2, groups, 9))
    taken_PN[0], other_PN[-1] = 0.0, (0.0 if groups > 1 else other_PN[-1])
    found = turn(taken_PN, other_PN, resamples=0)
    if found.cosine is None:
        assert groups == 1
        return
    a_N, b_N = taken_PN.sum(0), other_PN.sum(0)
    assert found.cosine == pytest.approx(a_N @ b_N / np.linalg.norm(a_N) / np.linalg.norm(b_N), abs=1e-5)
    assert sum(found.parts.values()) == pytest.approx(1.0 - found.cosine, abs=1e-5)
    assert found.norm_ratio == pytest.approx(np.linalg.norm(b_N) / np.linalg.norm(a_N), rel=1e-5)


def test_a_scaled_gradient_does_not_turn_a_zero_one_has_no_cosine_and_the_one_group_that_turned_is_named() -> None:
    taken_PN = np.random.default_rng(0).normal(size=(4, 30))
    found = turn(taken_PN, 3.0 * taken_PN)
    assert (found.cosine, found.norm_ratio) == (pytest.approx(1.0), pytest.approx(3.0))
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (found.turns, found.parts) == (False, {})
    found = turn(taken_PN, np.zeros((4, 30)))
    assert (found.cosine, found.low, found.parts, found.norm_ratio) == (None, None, {}, 0.0)
    taken_PN = np.eye(3)
    other_PN = taken_PN * [[1.0], [-1.0], [1.0]]
    found = turn(taken_PN, other_PN)
    assert found.cosine == pytest.approx(1 / 3)
    assert largest(found.parts, 5) == [(1, pytest.approx(2 / 3))]
    assert (found.low or 0.0) < found.cosine < (found.high or 0.0)


def test_resamples_without_a_direction_give_no_interval() -> None:
    one_PP = np.diag([1.0, 0.0, 0.0])  # one group of three has a gradient: (2/3)^3 = 30 % of the draws have none
    assert interval(one_PP, one_PP, one_PP, SEEDS.stream("test"), 500) == (None, None)
    assert interval(one_PP, one_PP, one_PP, SEEDS.stream("test"), 0) == (None, None)


def test_folded_vectors_keep_their_inner_products() -> None:
    size, folding = 2**12, Folding(SEEDS, size=2**12)
    errors = []
    for seed in range(20):
        a_N, noise_N = np.random.default_rng(seed).normal(size=(2, 40_000)).astype(np.float32)
        b_N = 0.8 * a_N + 0.6 * noise_N
        scale = np.sqrt(inner(a_N, a_N) * inner(b_N, b_N))
        errors.append((folding.of(a_N) @ folding.of(b_N) - inner(a_N, b_N)) / scale)
    spread = np.sqrt(2.0 / size)  # 2.2 % here, 0.3 % with `FOLDED` numbers
    assert np.abs(errors).max() < 4 * spread
    assert np.std(errors) < 1.5 * spread
    assert np.sqrt(2.0 / FOLDED) < 0.003
    short_N = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(Folding(SEEDS).of(short_N), short_N)


TABLES = {
    "algorithm": {"loss": "ppo", "clip_eps": 0.1, "advantage_mode": "maxrl", "algorithm_mode": "mine", "recipe": ""},
    "training": {"lr": 1.0},
}


def test_bare_names_are_of_algorithm_and_short_ones_are_known() -> None:
    found = parse_settings("loss=gspo, advantage = rloo,gtpo.beta=0.3,is_bounds=[0.5, 2.0],params={a = 1, b = 'x,y'}")
    assert found == {
        "algorithm.loss": "gspo",
        "algorithm.advantage_mode": "rloo",
        "gtpo.beta": "0.3",
        "algorithm.is_bounds": "[0.5, 2.0]",
        "algorithm.params": "{a = 1, b = 'x,y'}",
    }


@pytest.mark.parametrize(
    ("code", "text"),
    [
        *(("bad-condition", text) for text in ("loss", "=gspo", "", ",,")),
        *(("foreign-key", text) for text in ("training.lr=1", "model.model=x", "data.source=\x1b[2J")),
    ],
)
def test_a_condition_that_changes_neither_credit_nor_loss_is_refused(code: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(text)
    assert codes_in(caught) == [f"replay.{code}"]
    assert "\x1b" not in str(caught.value)


def test_parameters_go_with_their_part_and_values_of_a_recipe_with_the_recipe() -> None:
    other = changed_tables(TABLES, {"algorithm.loss": "gspo"}, {})
    assert "clip_eps" not in other["algorithm"]
    assert other["training"] == TABLES["training"]
    same = changed_tables(TABLES, {"algorithm.loss": "ppo"}, {})
    assert same["algorithm"]["clip_eps"] == 0.1
    kept = changed_tables(TABLES, {"algorithm.loss": "gspo", "algorithm.clip_eps": "0.3"}, {})
    assert kept["algorithm"]["clip_eps"] == 0.1, "the flag replaces it"
    assert TABLES["algorithm"]["clip_eps"] == 0.1
    assert "algorithm_mode" not in changed_tables(TABLES, {"algorithm.advantage_mode": "rloo"}, {})["algorithm"]
    assert "algorithm_mode" in changed_tables(TABLES, {"algorithm.loss": "gspo"}, {})["algorithm"]
    origins = {"algorithm.clip_eps": "recipe dapo", "training.lr": "retrain.toml:3"}
    assert "clip_eps" not in changed_tables(TABLES, {"algorithm.batch_norm": "true"}, origins)["algorithm"]
    assert changed_tables(TABLES, {"algorithm.recipe": "rloo"}, origins)["algorithm"] == {}


LINE = {"loss": 0.5, "grad_norm": 0.25, "ratio_mean": 1.0, "trained_tokens": 40, "updates": 1, "logprob_gap_max": 1e-6}


@pytest.mark.parametrize(
    ("change", "is_close"),
    [
        ({"loss": 0.5000001}, True),
        ({"grad_norm": 0.2501}, True),
        ({"grad_norm": 0.26}, False),
        ({"loss": 0.6}, False),
        ({"trained_tokens": 41}, False),
        ({"logprob_gap_max": 0.5}, False),
        ({"loss": None}, False),
        ({"grad_norm": None}, False),
        ({"loss": float("nan")}, False),
        ({"loss": None, "trained_tokens": 0, "updates": 0}, False),
    ],
)
def test_rounding_is_told_from_another_policy(change: dict[str, float | None], is_close: bool) -> None:
    found = agreement(LINE, {**LINE, **change})
    assert (found.is_exact, found.is_close) == (False, is_close)
    assert next(iter(change)) in found.worst
    same = agreement({**LINE, "step": 3, "condition": "x"}, LINE)
    assert (same.is_exact, same.is_close, set(same.compared)) == (True, True, set(LINE))


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

    assert any(line.startswith("loss=mine") and " - " in line for line in lines(data(nothing)))


def test_what_differs_is_named_and_without_conditions_nothing_is_said_of_directions() -> None:
    different = [{"step": 1, "field": "grad_norm", "was": 0.5, "now": 0.51}]
    was = {**data()["as_it_was"], "is_exact": False, "different": different}
    told = "\n".join(lines(data(as_it_was=was | {"after": "final", "files": {"adapter_model.safetensors": False}})))
    assert "step 1 grad_norm: 0.51, recorded 0.5" in told
    assert "adapter_model.safetensors differs from the file of final" in told
    assert not any(word in told for word in (ONE_STEP, "cosine"))
