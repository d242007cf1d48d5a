"""A step of a real run again: to the bit as it was, under other credit and losses, and refused where it is another."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from retrain.inspect.replay.command import command
from retrain.inspect.replay.job import Replay, replay_step
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.records.completions import TokenRecord, write_tokens
from retrain.records.stored_tokens import read_tokens
from retrain_local.model.load import bf16_refusal
from tests.end_to_end.running import records, tiny

pytestmark = pytest.mark.timeout(900)

SMALL = ("--max-steps", "3", "--batch-size", "4", "--group-size", "8", "--eval-every", "0", "--save-every", "2")
WEIGHTS = {"adapter_model.safetensors", "optimizer.safetensors"}
FIVE = (
    "loss=gspo,advantage=rloo",
    "recipe=dapo",
    "transform=none",
    "surprisal_mask_rho=0.2",
    "uncertainty=shannon_entropy",
)
SETTINGS = {
    "fp32": (),
    "many packs": ("--set", "backend.options.micro_batch_tokens=128"),
    "bf16": ("--set", "model.dtype=bf16"),
    "all weights": ("--lora-rank", "0", "--lr", "1e-4"),
    "eight updates": ("--minibatches", "4", "--epochs", "2", "--loss", "ppo", "--tis-cap", "2"),
    "divergence in the loss": ("--kl-coef", "0.05"),
    "masked": ("--overlong", "mask", "--max-tokens", "20"),
    "dropped": ("--overlong", "drop", "--max-tokens", "30"),
    "rounds": ("--refill", "2"),
    "two devices": ("--devices", "cpu,cpu"),
    "a falling rate": ("--optim-schedule", "cosine"),
    "a greedy baseline": ("--advantage-mode", "remax", "--transform-mode", "none"),
    "a baseline by token": ("--advantage-mode", "otb", "--transform-mode", "none"),
    "tokens left out": ("--recipe", "m2po", "--set", "algorithm.loss_params.tau=1e-5", "--minibatches", "2"),
}


def again(run: Path, step: int, *tries: str, resamples: int = 0) -> Replay:
    return replay_step(run, step, tries, load_plugins({}), resamples=resamples, most=3)


def check(run: Path) -> None:
    """Each step that trained has the bits of its line, weights and moments those of the checkpoint after it, if any."""
    after = {1: "checkpoint_step_2", 2: "final"}
    trained = [line["step"] for line in records(run / "metrics.jsonl") if line.get("loss") is not None]
    assert len(trained) > 1
    for step in trained:
        found = again(run, step).as_it_was
        assert found.is_exact, (step, found)
        assert "grad_norm" in found.compared
        assert found.after == after.get(step, "")
        assert bool(found.files) == (step in after)


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    tiny(*SMALL, "--log-dir", "run", "--set", "backend.options.micro_batch_tokens=128", cwd=folder)
    return folder / "run"


@pytest.fixture
def changed(packs: Path) -> Any:
    """`changed(change)`: the same run with other token records of step 1."""
    was = read_tokens(packs, 1)

    def write(change: Callable[[TokenRecord], TokenRecord]) -> Path:
        write_tokens(packs, 1, list(map(change, was)))
        return packs

    yield write
    write_tokens(packs, 1, was)


@pytest.mark.long
def test_a_step_of_many_packs_is_what_it_was(packs: Path) -> None:
    found = again(packs, 1).as_it_was
    assert found.is_exact
    assert (found.start, list(found.forward)) == ("", [0])
    assert set(found.files) == WEIGHTS


@pytest.mark.long
@pytest.mark.parametrize("name", SETTINGS)
def test_each_step_is_what_it_was_with(name: str, tmp_path: Path) -> None:
    if name == "bf16" and (why := bf16_refusal()):
        pytest.skip(why)
    tiny(*SMALL, "--log-dir", "run", *SETTINGS[name], cwd=tmp_path)
    check(tmp_path / "run")


@pytest.mark.long
def test_five_conditions_in_one_command_with_a_page(packs: Path, tmp_path: Path, capsys: Any) -> None:
    before = {file: file.stat().st_mtime_ns for file in packs.rglob("*")}
    page = tmp_path / "replay.html"
    tries = [word for each in FIVE for word in ("--try", each)]
    with pytest.raises(SystemExit, match="0"):
        command([str(packs), "--step", "2", *tries, "--html", str(page), "--json"], obj=load_plugins({}))
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["conditions"]] == ["as taken", *FIVE]
    for each in found["conditions"][1:]:
        assert -1.0 <= each["low"] <= each["high"] <= 1.0
        assert each["low"] - 0.05 < each["cosine"] < 1.0
        assert sum(each["parts"]) == pytest.approx(1.0 - each["cosine"], abs=1e-5)
        assert each["prompts"][0]["prompt"].startswith("What is")
        assert each["tokens"]
    taken = found["conditions"][0]
    line = [json.loads(each) for each in (packs / "metrics.jsonl").read_text().splitlines()][-1]
    assert taken["norm"] == pytest.approx(line["grad_norm"], rel=1e-6)
    assert taken["loss"] == line["loss"]
    assert found["as_it_was"]["is_exact"], "gradients change nothing"
    assert found["note"].startswith("One step:")
    assert all(each in page.read_text() for each in FIVE)
    assert {file: file.stat().st_mtime_ns for file in packs.rglob("*")} == before


@pytest.mark.slow
def test_another_step_than_the_one_on_record_is_refused(packs: Path, changed: Any) -> None:
    def other_token(record: TokenRecord) -> TokenRecord:
        tokens_T = record.tokens_T.copy()
        tokens_T[0] = 5
        assert record.row
        row_T = record.row.tokens_T.copy()
        row_T[record.row.action_T] = tokens_T
        return replace(record, tokens_T=tokens_T, row=replace(record.row, tokens_T=row_T))

    with pytest.raises(ConfigError, match=r"step 1 has .* is recorded"):
        again(changed(other_token), 1)
    with pytest.raises(ConfigError, match=r"credit of group 0, completion 0, token 0 was"):
        again(changed(lambda record: replace(record, advantages_T=record.advantages_T + 0.5)), 1)
    with pytest.raises(ConfigError, match="contain no prompt tokens"):
        again(changed(lambda record: replace(record, row=None)), 1)
    again_on = partial(again, packs)
    with pytest.raises(ConfigError, match="step 7 cannot be replayed; those that can: 0 to 2"):
        again_on(7)
    with pytest.raises(ConfigError, match="changes neither the credit"):
        again_on(2, "training.lr=1")
