"""`[kl]` in whole runs of the toy backend, with a reference of its own: the uniform policy that it began with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.overlapped import steps

Command = Callable[..., Any]
BACKEND = """
from dataclasses import replace
import numpy as np
from retrain.api import PluginSpec, hookimpl
from toy_parts import CAPABILITIES, VOCABULARY, Options, ToyBackend

OFFERED = replace(CAPABILITIES, regularisers=frozenset({"kl_log", "kl_reward", "kl_loss"}))

class Anchored(ToyBackend):
    capabilities = OFFERED
    def reference_logprobs(self, rows, temperature):
        return [np.where(row.action_T, -np.log(VOCABULARY), 0.0) for row in rows]
    def train(self, batch):
        for row in batch.rows:
            assert (row.reference_logprobs_T is not None) == (row.kl_coef > 0)
        return super().train(batch)

@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="anchored", summary="A toy.", factory=Anchored, params=Options, traits=OFFERED))
"""
TIMED = ("time_s",)


@pytest.fixture
def run(
    command: Command, distribution: Callable[..., Path], toy_arguments: list[str], tmp_path: Path
) -> Callable[..., list[dict[str, Any]]]:
    """`run("name", "--kl-coef", "0.1")`: the lines of a run without times."""
    distribution("retrain-anchored", {"anchored": BACKEND})
    own = [*toy_arguments, "--backend", "anchored", "--save-every", "2"]

    def train(name: str, *arguments: str) -> list[dict[str, Any]]:
        result = command(*own, "--log-dir", name, *arguments)
        assert result.code == 0, result.err
        lines = steps(tmp_path / name)
        return [{key: value for key, value in line.items() if not key.endswith(TIMED)} for line in lines]

    return train


def test_measuring_it_changes_nothing(run: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    size = ("--max-steps", "3", "--batch-size", "6", "--group-size", "8")
    with_it, without = run("with", *size), run("without", *size, "--kl-log", "false")
    assert any("kl_mean" in line for line in with_it)
    assert [{k: v for k, v in line.items() if k not in ("kl_mean", "kl_k1_mean")} for line in with_it] == without
    adapters = [(tmp_path / name / "adapter" / "final" / "logits.json").read_bytes() for name in ("with", "without")]
    assert adapters[0] == adapters[1]


@pytest.mark.long
def test_a_steered_coefficient_is_the_same_after_a_resume(
    run: Callable[..., list[dict[str, Any]]], command: Command, tmp_path: Path
) -> None:
    keys = ("--kl-coef", "0.1", "--kl-target", "1e-6", "--kl-horizon", "64")
    size = ("--batch-size", "6", "--group-size", "8")
    straight = run("straight", *keys, *size, "--max-steps", "4")
    coefs = [line["kl_coef"] for line in straight]
    assert coefs[0] == 0.1
    assert len(set(coefs)) == 4
    run("halves", *keys, *size, "--max-steps", "2")
    result = command("--resume", "halves", "--log-dir", "halves", "--max-steps", "4")
    assert result.code == 0, result.err
    resumed = [{k: v for k, v in line.items() if not k.endswith(TIMED)} for line in steps(tmp_path / "halves")]
    assert resumed == straight
