"""Weights written by a trainer in another process: late files, caches of older weights, failures."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from retrain.api import BackendError


def written(policy, folder: Path) -> Path:
    """The policy after one more step, on a trainer's disk."""
    policy.train()
    folder.mkdir(parents=True)
    policy.save_adapter(folder)
    return folder


def gap(policy, requests, groups) -> float:
    """Largest difference between what the engine reports and the trainer's own, in nats."""
    pairs = [(request.prompt_T, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
    rows = [
        (np.concatenate([prompt_T, sample.tokens_T]), np.arange(len(prompt_T) + len(sample.tokens_T)) >= len(prompt_T))
        for prompt_T, sample in pairs
    ]
    ours = policy.logprobs(rows, 0.7)
    return max(
        float(np.abs(all_T[action_T] - sample.logprobs_T).max())
        for all_T, (_, action_T), (_, sample) in zip(ours, rows, pairs, strict=True)
    )


def test_keys_and_values_of_the_weights_before_are_not_read_after_all_were_replaced(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine = make_engine(server)
    engine.load_weights(written(policy, tmp_path / "step_1"), policy.version)
    salts = set()
    for step in (2, 3):
        engine.sample(requests, params)  # fills the cache: one prompt is longer than three of its blocks
        engine.load_weights(written(policy, tmp_path / f"step_{step}"), policy.version)
        server.requests.clear()
        groups = engine.sample(requests, params)
        assert gap(policy, requests, groups) < 1e-9
        assert {sample.policy_version for group in groups for sample in group} == {step}
        salts |= {body["cache_salt"] for body in server.completions}
    assert len(salts) == 2


def test_an_adapter_that_reaches_the_servers_disk_late_is_waited_for(
    make_engine, server, policy, requests, params, tmp_path
) -> None:
    engine, there = make_engine(server), tmp_path / "step_1"
    hidden = written(policy, tmp_path / "on its way")
    threading.Timer(0.6, lambda: hidden.rename(there)).start()
    engine.load_adapter(there, policy.version)
    assert gap(policy, requests, engine.sample(requests, params)) < 1e-9


def test_an_adapter_that_never_arrives_is_named(make_engine, server, policy, tmp_path) -> None:
    engine = make_engine(server, retry_s=0.5)
    policy.train()
    with pytest.raises(BackendError, match="step_9"):
        engine.load_adapter(tmp_path / "step_9", policy.version)


def test_servers_go_on_after_weights_that_could_not_be_read(make_engine, server, policy, requests, tmp_path) -> None:
    engine = make_engine(server, retry_s=0.5)
    folder = written(policy, tmp_path / "step_1")
    shutil.rmtree(folder)
    with pytest.raises(BackendError, match="the weights of version 1"):
        engine.load_weights(folder, policy.version)
    engine.close()
    paths = [path for path, _ in server.requests if not path.startswith("/v1")]
    assert paths[0] == "/pause?mode=keep&clear_cache=false"
    assert paths[-1] == "/resume"
