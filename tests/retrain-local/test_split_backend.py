"""Devices of their own for sampling and training: what is drawn with what, what it is trained with, what is saved."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain.api import (
    BackendError,
    ConfigError,
    Kind,
    OverlapsTraining,
    PluginContext,
    PluginSpec,
    SampleRequest,
    SamplingParams,
    TrainBatch,
)
from retrain.kernel.registry import Owner
from retrain_local.backend import LIMITS_FILE, LocalBackend
from retrain_local.factory import create_backend
from retrain_local.model.checkpoint import PUBLISHED_FILE, STATE_FILE
from tests.kit.shared import first_or_long

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
Drawn = list[tuple[int, list[int], bytes]]


@pytest.fixture
def split(make_backend: MakeBackend) -> LocalBackend:
    return make_backend(devices="cpu,cpu")


def drawn(backend: LocalBackend, requests: Sequence[SampleRequest]) -> Drawn:
    """Version, tokens and log-probabilities of every completion."""
    groups = backend.sample(requests, PARAMS)
    return [(s.policy_version, s.tokens_T.tolist(), s.logprobs_T.tobytes()) for group in groups for s in group]


def stepped(backend: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, steps: int) -> list[Drawn]:
    """So many steps with one of overlap; what each version draws."""
    versions, batch = [drawn(backend, requests)], roll(backend, requests)
    for step in range(steps):
        coming = roll(backend, requests, step=step + 1)
        backend.train(batch)
        assert backend.publish() == step + 1
        versions.append(drawn(backend, requests))
        batch = coming
    return versions


def test_only_split_devices_sample_ahead(make_backend: MakeBackend, split: LocalBackend) -> None:
    assert isinstance(split, OverlapsTraining)
    assert split.overlaps_training
    assert not make_backend().overlaps_training
    assert not make_backend(devices="cpu,cpu", max_staleness=0).overlaps_training


def plain_gradient(batch: TrainBatch, model: Any) -> dict[str, Tensor]:
    """Of -(1 / N) sum exp(log p now - log p when sampled) A, a row at a time, through transformers and PEFT."""
    total = torch.zeros(())
    for row in batch.rows:
        tokens_T = torch.from_numpy(row.tokens_T)
        logits = model(input_ids=tokens_T[None]).logits[0, :-1] / batch.temperature
        logp = torch.log_softmax(logits, -1).gather(1, tokens_T[1:, None])[:, 0]
        ratios = (logp - torch.from_numpy(row.logprobs_T)[1:]).exp()
        total = total - (ratios * torch.from_numpy(row.advantages_T * row.action_T)[1:]).sum() / batch.num_actions
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient(backend: LocalBackend, batch: TrainBatch) -> Tensor:
    trainer = backend._trainer
    assert trainer is not None
    trainer.accumulate(batch)
    found = [p.grad.clone().flatten() for _, p in sorted(trainer.parameters.items()) if p.grad is not None]
    trainer.optimizer.zero_grad()
    return torch.cat(found)


def test_a_stale_batch_is_trained_with_the_gradient_that_its_old_policy_asks_for(
    split: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, model_folder: Path, tmp_path: Path
) -> None:
    batch, stale = roll(split, requests), roll(split, requests, step=1)
    split.train(batch)
    assert {row.logprobs_T.tobytes() for row in stale.rows} == {row.logprobs_T.tobytes() for row in batch.rows}
    split.save_adapter(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path), is_trainable=True)
    wanted = torch.cat([grad.flatten() for _, grad in sorted(plain_gradient(stale, model).items())])
    found = gradient(split, stale)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    now = split.logprobs(stale.rows, 1.0)
    as_if_new = replace(stale, rows=tuple(replace(r, logprobs_T=p) for r, p in zip(stale.rows, now, strict=True)))
    assert float((found - gradient(split, as_if_new)).norm() / wanted.norm()) > 1e-2
    ratios = np.exp(np.concatenate([(p - r.logprobs_T)[r.action_T] for r, p in zip(stale.rows, now, strict=True)]))
    report = split.train(stale)
    assert report.ratio_max == pytest.approx(ratios.max(), rel=1e-4)
    assert report.ratio_mean == pytest.approx(ratios.mean(), rel=1e-4)
    assert report.ratio_max is not None
    assert report.ratio_max > 1.01


def test_sampling_while_training_gives_what_each_gives_alone(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    alone, together = make_backend(devices="cpu,cpu"), make_backend(devices="cpu,cpu")
    batch = roll(alone, requests)
    roll(together, requests)
    before, report = drawn(alone, requests), alone.train(batch)
    reports: list[Any] = []
    training = threading.Thread(target=lambda: reports.append(together.train(batch)))
    training.start()
    meanwhile = [drawn(together, requests)]
    while training.is_alive():
        meanwhile.append(drawn(together, requests))
    assert all(each == before for each in meanwhile)
    assert reports == [report]
    assert (alone.publish(), together.publish()) == (1, 1)
    assert drawn(alone, requests) == drawn(together, requests) != before


@pytest.mark.parametrize("devices", first_or_long(["cpu,cpu", "cpu,cpu,cpu"]))
def test_a_resumed_run_draws_with_the_policy_before_until_it_publishes(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path, devices: str
) -> None:
    first = make_backend(devices=devices)
    versions = stepped(first, requests, roll, 2)
    first._policies[-1].limits.cache_tokens = 4096
    first.save(tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    assert (state["policy_version"], state["published_version"]) == (2, 1)
    second = make_backend(devices=devices)
    second.load(tmp_path)
    assert second._policies[-1].limits.cache_tokens == 4096
    assert drawn(second, requests) == versions[1]
    again = tmp_path / "again"
    again.mkdir()
    second.save(again)  # stopped before it could publish
    assert {f.name: f.read_bytes() for f in again.iterdir()} == {
        f.name: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()
    }
    assert second.publish() == 2
    assert drawn(second, requests) == versions[2]
    assert (tmp_path / LIMITS_FILE).exists() == (devices.count("cpu") > 2)


@pytest.mark.long
def test_the_last_policies_are_kept_to_sample_from_and_saved(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    def ahead() -> LocalBackend:
        return make_backend(devices="cpu,cpu", max_staleness=2)

    first, second = ahead(), ahead()
    for step in range(4):
        first.use_version(max(0, step - 2))
        assert first.publish() == step
        batch = roll(first, requests, step=step)
        assert {version for version, *_ in drawn(first, requests)} == {max(0, step - 2)}
        first.train(batch)
    first.publish()
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.publish() == 4
    kept = []
    for version in (2, 3, 4):
        for backend in (first, second):
            backend.use_version(version)
        assert drawn(first, requests) == drawn(second, requests)
        kept.append(drawn(first, requests))
    assert [found[0][0] for found in kept] == [2, 3, 4]
    assert len({logprobs for ((_, _, logprobs), *_) in kept}) == 3
    with pytest.raises(BackendError, match="policy version 1 is not kept, only 2, 3, 4"):
        second.use_version(1)


def test_what_is_trained_is_not_saved_twice(split: LocalBackend, tmp_path: Path) -> None:
    split.publish()
    split.save(tmp_path)
    assert not (tmp_path / PUBLISHED_FILE).exists()


@pytest.mark.long
def test_one_device_takes_over_from_split_ones_and_the_other_way_round(
    make_backend: MakeBackend, split: LocalBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    versions = stepped(split, requests, roll, 1)
    split.save(tmp_path)
    one = make_backend()
    one.load(tmp_path)
    assert drawn(one, requests) == versions[1]
    folder = tmp_path / "one"
    folder.mkdir()
    one.save(folder)
    other = make_backend(devices="cpu,cpu")
    other.load(folder)
    assert drawn(other, requests) == versions[1]


def test_every_device_that_samples_gets_each_version(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    many, two = make_backend(devices="cpu,cpu,cpu,cpu"), make_backend(devices="cpu,cpu")
    for ours, theirs in zip(stepped(many, requests, roll, 1), stepped(two, requests, roll, 1), strict=True):
        assert [(version, tokens) for version, tokens, _ in ours] == [(v, tokens) for v, tokens, _ in theirs]
    assert {policy.version for policy in many._policies} == {1}


def test_an_engine_that_samples_elsewhere_is_refused(make_context: Callable[..., PluginContext]) -> None:
    context = make_context(devices="cpu,cpu", inference={"engine": "remote"})
    spec = PluginSpec(name="remote", summary="", factory=lambda context, policy: None)
    context.plugins.registries[Kind.INFERENCE_ENGINE].add(spec, Owner(distribution="test"))
    with pytest.raises(ConfigError, match="engine 'remote' does not sample on any of them"):
        create_backend(context)
