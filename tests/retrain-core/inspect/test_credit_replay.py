"""`retrain trace` tries a flow before a run, and replaying the run's own flow gives the credit that was trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.advantages import TransformContext, TransformSpec
from retrain.credit.flow import CreditFlow, build_flow
from retrain.inspect.credit_command import replay
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.record_names import token_file
from retrain.records.run import Run


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
        for i, reward in enumerate(rewards)
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
