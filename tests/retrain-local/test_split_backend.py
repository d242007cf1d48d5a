"""Devices of their own for sampling and training: what is drawn with what, what it is trained with, what is saved."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError, Kind, OverlapsTraining, PluginSpec, SamplingParams
from retrain.kernel.registry import Owner
from retrain_local.backend import LIMITS_FILE, LocalBackend
from retrain_local.factory import create_backend
from retrain_local.model.checkpoint import PUBLISHED_FILE, STATE_FILE
from tests.kit.local_backend import Local, saved
from tests.kit.plain_path import distance, gradient, joined, plain_gradient, plain_model
from tests.kit.shared import first_or_long

PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
Drawn = list[tuple[int, list[int], bytes]]


@pytest.fixture
def split(local: Local) -> LocalBackend:
    return local.make(devices="cpu,cpu")


def drawn(backend: LocalBackend, local: Local) -> Drawn:
    """Version, tokens and log-probabilities of every completion."""
    groups = backend.sample(local.requests, PARAMS)
    return [(s.policy_version, s.tokens_T.tolist(), s.logprobs_T.tobytes()) for group in groups for s in group]


def stepped(backend: LocalBackend, local: Local, steps: int) -> list[Drawn]:
    """So many steps with one of overlap; what each version draws."""
    versions, batch = [drawn(backend, local)], local.roll(backend)
    for step in range(steps):
        coming = local.roll(backend, step=step + 1)
        backend.train(batch)
        assert backend.publish() == step + 1
        versions.append(drawn(backend, local))
        batch = coming
    return versions


def test_only_split_devices_sample_ahead_and_only_local_engines(local: Local, split: LocalBackend) -> None:
    assert isinstance(split, OverlapsTraining)
    assert split.overlaps_training
    assert not local.make().overlaps_training
    assert not local.make(devices="cpu,cpu", max_staleness=0).overlaps_training
    context = local.context(devices="cpu,cpu", inference={"engine": "remote"})
    spec = PluginSpec(name="remote", summary="", factory=lambda context, policy: None)
    context.plugins.registries[Kind.INFERENCE_ENGINE].add(spec, Owner(distribution="test"))
    with pytest.raises(ConfigError, match="engine 'remote' does not sample on any of them"):
        create_backend(context)


def test_a_stale_batch_has_its_gradient(split: LocalBackend, local: Local, model_folder: Path, tmp_path: Path) -> None:
    batch, stale = local.roll(split), local.roll(split, step=1)
    split.train(batch)
    assert {row.logprobs_T.tobytes() for row in stale.rows} == {row.logprobs_T.tobytes() for row in batch.rows}
    split.save_adapter(tmp_path)
    wanted = joined(plain_gradient(stale, plain_model(model_folder, tmp_path)))
    found = gradient(split, stale)
    assert distance(found, wanted) < 1e-4
    now = split.logprobs(stale.rows, 1.0)
    as_if_new = replace(stale, rows=tuple(replace(r, logprobs_T=p) for r, p in zip(stale.rows, now, strict=True)))
    assert distance(gradient(split, as_if_new), wanted) > 1e-2
    ratios = np.exp(np.concatenate([(p - r.logprobs_T)[r.action_T] for r, p in zip(stale.rows, now, strict=True)]))
    report = split.train(stale)
    assert report.ratio_max == pytest.approx(ratios.max(), rel=1e-4)
    assert report.ratio_mean == pytest.approx(ratios.mean(), rel=1e-4)
    assert report.ratio_max > 1.01


def test_sampling_while_training_gives_what_each_gives_alone(local: Local) -> None:
    alone, together = local.make(devices="cpu,cpu"), local.make(devices="cpu,cpu")
    batch = local.roll(alone)
    local.roll(together)
    before, report = drawn(alone, local), alone.train(batch)
    reports: list[Any] = []
    training = threading.Thread(target=lambda: reports.append(together.train(batch)))
    training.start()
    meanwhile = [drawn(together, local)]
    while training.is_alive():
        meanwhile.append(drawn(together, local))
    assert all(each == before for each in meanwhile)
    assert reports == [report]
    assert (alone.publish(), together.publish()) == (1, 1)
    assert drawn(alone, local) == drawn(together, local) != before


@pytest.mark.parametrize("devices", first_or_long(["cpu,cpu", "cpu,cpu,cpu"]))
def test_a_resumed_run_draws_with_the_policy_before(local: Local, tmp_path: Path, devices: str) -> None:
    first = local.make(devices=devices)
    versions = stepped(first, local, 2)
    first._policies[-1].limits.cache_tokens = 4096
    first.save(tmp_path)
    state = json.loads((tmp_path / STATE_FILE).read_text())
    assert (state["policy_version"], state["published_version"]) == (2, 1)
    second = local.make(devices=devices)
    second.load(tmp_path)
    assert second._policies[-1].limits.cache_tokens == 4096
    assert drawn(second, local) == versions[1]
    again = saved(tmp_path / "again", second.save)  # stopped before it could publish
    assert {f.name: f.read_bytes() for f in again.iterdir()} == {
        f.name: f.read_bytes() for f in tmp_path.iterdir() if f.is_file()
    }
    assert second.publish() == 2
    assert drawn(second, local) == versions[2]
    assert (tmp_path / LIMITS_FILE).exists() == (devices.count("cpu") > 2)


def test_the_last_policies_are_kept_to_sample_from_and_saved(local: Local, tmp_path: Path) -> None:
    def ahead() -> LocalBackend:
        return local.make(devices="cpu,cpu", max_staleness=2)

    first, second = ahead(), ahead()
    for step in range(4):
        first.use_version(max(0, step - 2))
        assert first.publish() == step
        batch = local.roll(first, step=step)
        assert {version for version, *_ in drawn(first, local)} == {max(0, step - 2)}
        first.train(batch)
    first.publish()
    first.save(tmp_path)
    second.load(tmp_path)
    assert second.publish() == 4
    kept = []
    for version in (2, 3, 4):
        for backend in (first, second):
            backend.use_version(version)
        assert drawn(first, local) == drawn(second, local)
        kept.append(drawn(first, local))
    assert [found[0][0] for found in kept] == [2, 3, 4]
    assert len({logprobs for ((_, _, logprobs), *_) in kept}) == 3
    with pytest.raises(BackendError, match="policy version 1 is not kept, only 2, 3, 4"):
        second.use_version(1)


def test_one_device_takes_over_from_split_ones_and_back(local: Local, split: LocalBackend, tmp_path: Path) -> None:
    versions = stepped(split, local, 1)
    split.save(tmp_path)
    one = local.make()
    one.load(tmp_path)
    assert drawn(one, local) == versions[1]
    other = local.make(devices="cpu,cpu")
    other.load(saved(tmp_path / "one", one.save))
    assert not (tmp_path / "one" / PUBLISHED_FILE).exists(), "what is trained is not saved twice"
    assert drawn(other, local) == versions[1]


def test_every_device_that_samples_gets_each_version(local: Local) -> None:
    many, two = local.make(devices="cpu,cpu,cpu,cpu"), local.make(devices="cpu,cpu")
    for ours, theirs in zip(stepped(many, local, 1), stepped(two, local, 1), strict=True):
        assert [(version, tokens) for version, tokens, _ in ours] == [(v, tokens) for v, tokens, _ in theirs]
    assert {policy.version for policy in many._policies} == {1}
