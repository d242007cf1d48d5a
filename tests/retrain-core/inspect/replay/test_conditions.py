"""What a user writes after --try, and what of the run's configuration it leaves."""

from __future__ import annotations

import pytest

from retrain.inspect.replay.job import changed_tables, parse_settings
from retrain.inspect.replay.position import agreement
from retrain.kernel.errors import ConfigError
from tests.kit.problems import codes_in

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


def test_parameters_go_with_their_part() -> None:
    other = changed_tables(TABLES, {"algorithm.loss": "gspo"}, {})
    assert "clip_eps" not in other["algorithm"]
    assert other["training"] == TABLES["training"]
    same = changed_tables(TABLES, {"algorithm.loss": "ppo"}, {})
    assert same["algorithm"]["clip_eps"] == 0.1
    kept = changed_tables(TABLES, {"algorithm.loss": "gspo", "algorithm.clip_eps": "0.3"}, {})
    assert kept["algorithm"]["clip_eps"] == 0.1, "the flag replaces it"
    assert TABLES["algorithm"]["clip_eps"] == 0.1


def test_a_mode_does_not_hide_behind_a_whole_algorithm() -> None:
    assert "algorithm_mode" not in changed_tables(TABLES, {"algorithm.advantage_mode": "rloo"}, {})["algorithm"]
    assert "algorithm_mode" in changed_tables(TABLES, {"algorithm.loss": "gspo"}, {})["algorithm"]


def test_values_of_a_recipe_come_with_it_and_another_recipe_starts_anew() -> None:
    origins = {"algorithm.clip_eps": "recipe dapo", "training.lr": "retrain.toml:3"}
    assert "clip_eps" not in changed_tables(TABLES, {"algorithm.batch_norm": "true"}, origins)["algorithm"]
    assert changed_tables(TABLES, {"algorithm.recipe": "rloo"}, origins)["algorithm"] == {}


LINE = {"loss": 0.5, "grad_norm": 0.25, "ratio_mean": 1.0, "trained_tokens": 40, "updates": 1, "logprob_gap_max": 1e-6}


def test_the_same_numbers_agree_exactly() -> None:
    found = agreement({**LINE, "step": 3, "condition": "x"}, LINE)
    assert (found.is_exact, found.is_close) == (True, True)
    assert set(found.compared) == set(LINE)


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
    ],
)
def test_rounding_is_told_from_another_policy(change: dict[str, float | None], is_close: bool) -> None:
    found = agreement(LINE, {**LINE, **change})
    assert not found.is_exact
    assert found.is_close is is_close
    assert next(iter(change)) in found.worst


def test_a_step_that_trained_nothing_now_is_not_the_one_on_record() -> None:
    found = agreement(LINE, {"loss": None, "trained_tokens": 0, "updates": 0})
    assert not found.is_close
