"""Stored steps again: the flow tried before a run, its credit replayed, gradients compared, and a hostile page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages import TransformContext, TransformSpec
from retrain.credit.flow import CreditFlow, build_flow
from retrain.inspect.credit_command import replay
from retrain.inspect.replay.command import lines, render
from retrain.inspect.replay.gradients import FOLDED, Folding, StepGradient, Turn, inner, interval, largest, turn_of
from retrain.inspect.replay.job import ONE_STEP, changed_tables, parse_settings
from retrain.inspect.replay.position import agreement
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.record_names import token_file
from retrain.records.run import Run
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
    assert (not found.different, found.is_close) == (False, is_close)
    assert next(iter(change)) in found.worst
    same = agreement({**LINE, "step": 3, "condition": "x"}, LINE)
    assert (same.different, same.is_close, set(same.compared)) == ({}, True, set(LINE))


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


def record(length: int) -> TokenRecord:
    stream = np.random.default_rng(length)
    return TokenRecord(
        tokens_T=stream.integers(0, 2**31 - 1, length),
        logprobs_T=-stream.exponential(size=length).astype(np.float32).astype(np.float64),
        advantages_T=stream.normal(size=length).astype(np.float32).astype(np.float64),
        entropies_T=stream.exponential(size=length).astype(np.float32).astype(np.float64),
        planning_T=stream.random(length) < 0.3,
    )


def store(run: Path, rewards: list[float | None], records: list[TokenRecord], *, parts: bool = False) -> None:
    write_tokens(run, 0, records)
    lines = [
        {"step": 0, "group": i // 2, "index": i % 2, "example_id": "e", "reward": reward, "trained": True}
        | {"num_tokens": len(tokens.tokens_T)}
        for i, (reward, tokens) in enumerate(zip(rewards, records, strict=False))
    ]
    for line in lines if parts else ():
        line["reward_parts"] = {"b": -line["reward"]}
    (run / "emergence/generations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "metrics.jsonl").write_text(json.dumps({"step": -1}) + "\n" + json.dumps({"step": 0}) + "\n")


@pytest.fixture(scope="module")
def flow() -> CreditFlow:
    table = AlgorithmTable(advantage_mode="maxrl", transform_mode="gtpo_sepa", uncertainty_kind="surprisal")
    return build_flow(Config(tables={"algorithm": table}), load_plugins())


def test_a_step_is_replayed_under_an_advantage_that_sees_all_of_it(tmp_path: Path) -> None:
    store(tmp_path, [1.0, 1.0, 1.0, 0.0], [record(3), record(4), record(5), record(6)], parts=True)
    table = AlgorithmTable(advantage_mode="reinforce_pp", transform_mode="none", uncertainty_kind="surprisal")
    flow = build_flow(Config(tables={"algorithm": table}), load_plugins())
    _, _, result = replay(Run(tmp_path).step(None), flow, None, sepa_lambda=0.0)
    shown = [[round(advs_T[0], 6) for advs_T in advs_G] for advs_G in result.token_advs]
    assert shown == [[0.57735, 0.57735], [0.57735, -1.732051]]
    gdpo = table.model_copy(update={"advantage_mode": "gdpo", "advantage_params": {"weights": {"b": 1.0}}})
    flow = build_flow(Config(tables={"algorithm": gdpo}), load_plugins())
    _, _, result = replay(Run(tmp_path).step(None), flow, None, sepa_lambda=0.0)
    shown = [[float(np.sign(advs_T[0])) for advs_T in advs_G] for advs_G in result.token_advs]
    assert shown == [[0.0, 0.0], [-1.0, 1.0]]  # by the stored reward b, the negative of the sum


def test_texts_are_decoded_for_a_transform_that_reads_them(tmp_path: Path, flow: CreditFlow) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int], **_: object) -> str:
            return "".join(f"<{token}>" for token in tokens)

    seen = []

    def credit(ctx: TransformContext) -> list[np.ndarray]:
        seen.append(ctx)
        return [np.zeros(len(logprobs)) for logprobs in ctx.logprobs_G]

    tokens = [record(2), record(3)]
    store(tmp_path, [1.0, 0.0], tokens)
    reading = replace(flow, transform=TransformSpec(name="reads", compute_context=credit, needs_text=True))
    replay(Run(tmp_path).step(None), reading, None, sepa_lambda=0.0, tokenizer=Tokenizer())
    assert seen[0].texts_G == [[f"<{token}>" for token in each.tokens_T] for each in tokens]


def test_completions_without_a_verdict_are_left_out(tmp_path: Path, flow: CreditFlow) -> None:
    store(tmp_path, [1.0, None, 1.0, 0.0], [record(3), record(4), record(5), record(6)])
    groups, masks, result = replay(Run(tmp_path).step(None), flow, None, sepa_lambda=0.0)
    assert [len(group) for group in groups] == [1, 2]
    assert [[len(mask) for mask in group] for group in masks] == [[3], [5, 6]]
    assert [advs.shape for advs in result.token_advs[1]] == [(5,), (6,)]


def test_missing_steps_and_runs_and_records_that_do_not_belong_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        Run(tmp_path).step(None)
    store(tmp_path, [1.0, 0.0], [record(3), record(4)])
    with pytest.raises(ConfigError, match="holds no step 9"):
        Run(tmp_path).step(9)
    first = token_file(tmp_path, 0).read_bytes()
    store(tmp_path, [1.0, 0.0], [record(3), record(4)])
    assert token_file(tmp_path, 0).read_bytes() == first, "the same records are the same bytes"
    store(tmp_path, [1.0, 0.0], [record(3), record(4), record(5)])
    with pytest.raises(ConfigError, match="2 completions but 3 token records"):
        Run(tmp_path).step(0)


@pytest.mark.parametrize("transform", ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"])
@pytest.mark.parametrize("uncertainty", ["surprisal", "predictive_variance", "shannon_entropy"])
def test_every_built_in_flow_passes(transform: str, uncertainty: str, command: Callable[..., Any]) -> None:
    content = json.loads(
        command("trace", "--json", "--transform-mode", transform, "--uncertainty-kind", uncertainty).out
    )
    assert content["ok"] is True
    assert content["probe_cases_passed"] == content["probe_cases_run"] == 2
    assert content["flow"]["condition_label"] == f"maxrl+{transform}"
    assert content["flow"]["needs_planning"] is (transform in ("gtpo_hicra", "gtpo_sepa"))
    assert content["flow"]["uses_sepa_controller"] is (transform == "gtpo_sepa")
    assert ("entropies of the sampling distribution" in content["flow"]["needs"]) is (uncertainty == "shannon_entropy")
    means = {(row["group"], row["reward"]): row["credit_mean"] for row in content["example"]}
    if transform != "gtpo_hicra":  # its planning tokens drift upwards, the others keep the episode advantage
        assert means[(1, 1.0)] == pytest.approx(3.0, abs=1e-4)


def test_a_plugin_that_breaks_its_contract_fails_with_its_name(tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "short_advantage.py").write_text("def one(rewards):\n    return rewards[:1]\n")
    result = command("trace", "--advantage-mode", "short_advantage.one")
    assert (result.code, result.out.endswith("FAIL\n")) == (1, True)
    for part in ("[ERROR] [probe]", "short_advantage.one", "has length 1, expected 4"):
        assert part in result.out


def test_config_problems_are_shown_not_raised(command: Callable[..., Any]) -> None:
    content = json.loads(command("trace", "--json", "--advantage-mode", "gpro", "--lr", "-1").out)
    messages = " ".join(issue["message"] for issue in content["issues"])
    assert (content["ok"], "did you mean 'grpo'" in messages, "lr" in messages) == (False, True, True)


def test_a_group_of_one_fails_where_the_advantage_needs_a_group(tmp_path: Path, command: Callable[..., Any]) -> None:
    refused = command("trace", "--group-size", "1")
    assert refused.code == 1
    assert "[ERROR] [config] --group-size [training] group_size: advantage 'maxrl'" in refused.out
    (tmp_path / "alone.py").write_text("def raw(rewards):\n    return rewards\n")
    assert (
        "[WARN] [config] group_size = 1" in command("trace", "--group-size", "1", "--advantage-mode", "alone.raw").out
    )
    # Over the step, a completion has others to be compared with.
    over_step = command("trace", "--group-size", "1", "--advantage-mode", "reinforce_pp")
    assert (over_step.code, "group_size" in over_step.out) == (0, False)
