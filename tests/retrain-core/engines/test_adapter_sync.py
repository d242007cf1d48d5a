"""The servers hold the published policy, each version under its own name, or the run stops."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from retrain.api import BackendError, ConfigError, SampleRequest, SamplingParams
from retrain.engines.policy_check import WEIGHTS
from tests.kit.inference_server import Handler, InferenceServer, serving
from tests.kit.toy_policy import ToyModel

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def names(server: InferenceServer, route: str) -> list[str]:
    return [body["lora_name"] for path, body in server.requests if path == route]


def paths(server: InferenceServer) -> list[str]:
    return [body["lora_path"] for path, body in server.requests if path == LOAD]


def test_every_version_has_a_new_name_and_path_and_is_never_loaded_in_place(make_engine, server, policy) -> None:
    engine = make_engine(server)
    for _ in range(4):
        policy.train()
        engine.publish()
    engine.publish()  # the same version once more, as after a resume
    assert len(set(names(server, LOAD))) == len(names(server, LOAD)) == 1 + 1 + 5  # the loud one of the handshake
    assert len(set(paths(server))) == 7
    assert not any("load_inplace" in body for _, body in server.requests)


def test_another_run_on_the_same_server_uses_other_names(make_engine, server, policy) -> None:
    make_engine(server)
    first = set(names(server, LOAD))
    make_engine(server)
    assert len(set(names(server, LOAD))) == 2 * len(first)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_versions_are_unloaded_beyond_keep_versions(make_engine, server, policy, keep) -> None:
    engine = make_engine(server, keep_versions=keep)
    for version in range(1, 6):
        policy.train()
        engine.publish()
        assert len(server.adapters) == min(keep, version + 1)
    kept = [int(name.rpartition("-v")[2]) for name in server.adapters]
    assert kept == list(range(5 - keep + 1, 6))


def test_an_adapter_is_loaded_before_any_request_of_its_version(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    policy.train()
    engine.publish()
    engine.sample(requests, params)
    seen: set[str] = set()
    for path, body in server.requests:
        if path == LOAD:
            seen.add(body["lora_name"])
        elif path == "/v1/completions":
            assert body["model"] == "toy" or body["model"] in seen


def test_nothing_is_loaded_or_unloaded_during_a_generation(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    busy_at_change: list[int] = []
    change = server.model.load

    def noticing(folder: Path) -> object:
        busy_at_change.append(server.busy)
        return change(folder)

    server.model.load = noticing  # type: ignore[method-assign]
    for _ in range(3):
        engine.sample(requests, params)
        policy.train()
        engine.publish()
    assert busy_at_change == [0, 0, 0]


def test_the_probe_has_a_prompt_longer_than_the_blocks_of_a_prefix_cache(make_engine, server, policy) -> None:
    engine = make_engine(server)
    server.requests.clear()
    policy.train()
    engine.publish()
    assert max(len(body["prompt"]) for body in server.completions) > 400


def test_weights_that_change_under_a_name_are_noticed_through_the_stale_cache(make_engine, server, policy) -> None:
    """With one name for all versions, the probe of each publish would detect the stale cache."""
    engine = make_engine(server)
    adapters, (known,) = engine._adapters, engine._caller.servers
    policy.train(0.3)
    engine.publish()
    fixed = adapters.current
    policy.train(0.3)
    shutil.rmtree(fixed.folder)
    fixed.folder.mkdir()
    policy.save_adapter(fixed.folder)
    server.adapters[fixed.key] = server.model.load(fixed.folder)  # in place, as with load_inplace
    with pytest.raises(BackendError, match="does not sample from policy version"):
        adapters.comparison.require_trainers(known, fixed)
    server.caches.clear()
    adapters.comparison.require_trainers(known, fixed)  # without the stale cache the new weights are right


def test_a_server_that_keeps_old_weights_is_an_error(make_engine, server, policy) -> None:
    engine = make_engine(server)
    old = server.model.load(engine._adapters.current.folder)
    server.model.load = lambda folder: old  # type: ignore[method-assign]
    policy.train(0.1)
    with pytest.raises(BackendError) as caught:
        engine.publish()
    assert "does not sample from policy version 1" in str(caught.value)
    assert "restart the server" in str(caught.value)


def test_a_small_change_of_the_policy_is_noticed_too(make_engine, server, policy) -> None:
    """Judged by the noise of the handshake, not by max_gap alone."""
    engine = make_engine(server)
    policy.train()
    engine.publish()
    old = server.model.load(engine._adapters.current.folder)
    server.model.load = lambda folder: old  # type: ignore[method-assign]
    policy.version += 1
    policy.weights = {name: 1.003 * value for name, value in policy.weights.items()}
    with pytest.raises(BackendError, match="does not sample from policy version 2"):
        engine.publish()


def test_a_server_that_was_started_anew_gets_the_adapter_again(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    policy.train()
    engine.publish()
    server.adapters.clear()
    server.caches.clear()
    server.requests.clear()
    groups = engine.sample(requests, params)
    assert [len(group) for group in groups] == [4, 3, 1, 5]
    assert len(names(server, LOAD)) == 2  # of both versions that are kept
    assert sum(body["max_tokens"] == 2 for body in server.completions) >= 2  # compared before anything is trained on


def test_a_server_that_is_started_anew_between_load_and_probe(make_engine, server, policy) -> None:
    engine = make_engine(server)

    def restarts(handler: Handler, answer: object) -> None:
        server.adapters.clear()
        handler.error(404, "The model does not exist.")

    server.faults.append(restarts)
    policy.train()
    engine.publish()
    assert engine._adapters.current.key in server.adapters


def test_a_full_disk_is_one_clear_error(make_engine, server, policy) -> None:
    engine = make_engine(server)

    def full(folder: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    policy.save_adapter = full
    policy.train()
    with pytest.raises(BackendError, match=r"version 1 cannot be written: .*No space left"):
        engine.publish()


def test_a_server_that_comes_back_with_another_model_is_not_trained_on(
    make_engine, server, policy, requests, params
) -> None:
    engine = make_engine(server)
    policy.train()
    engine.publish()
    server.adapters.clear()
    server.model = ToyModel(seed=9)
    with pytest.raises(BackendError, match="does not sample from policy version 1"):
        engine.sample(requests, params)


def test_an_adapter_that_the_server_cannot_read_is_one_clear_error(make_engine, server, policy) -> None:
    engine = make_engine(server)

    def unreadable(folder: Path) -> object:
        raise PermissionError("permission denied")

    server.model.load = unreadable  # type: ignore[method-assign]
    policy.train()
    with pytest.raises(BackendError) as caught:
        engine.publish()
    text = str(caught.value)
    assert "loading the adapter of version 1 was refused with HTTP 404" in text
    assert "must be able to read" in text
    assert "adapter_dir" in text


def test_a_folder_that_cannot_be_written_is_one_clear_error(make_engine, server, policy, tmp_path) -> None:
    engine = make_engine(server, adapter_dir=str(tmp_path / "shared"))
    shutil.rmtree(tmp_path / "shared")
    policy.train()
    with pytest.raises(BackendError, match="adapter of version 1 cannot be written"):
        engine.publish()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendError, match="no folder for adapters can be made"):
        make_engine(server, adapter_dir=str(tmp_path / "file"))


def test_an_answer_lost_after_loading_is_no_error(make_engine, server, policy, requests, params) -> None:
    engine = make_engine(server)
    change, lost = server.model.load, []

    def slow_first(folder: Path) -> object:
        weights = change(folder)
        if not lost:
            lost.append(folder)
            for connection in list(server.connections):
                connection.shutdown(2)
        return weights

    server.model.load = slow_first  # type: ignore[method-assign]
    policy.train()
    engine.publish()
    assert len(names(server, LOAD)) == 4  # two at the handshake, one whose answer was lost, one that heard "already"
    engine.sample(requests, params)


def test_a_backend_may_say_that_the_base_model_is_the_policy(make_engine, server, policy, requests, params) -> None:
    policy.save_adapter = lambda folder: None  # type: ignore[method-assign]
    engine = make_engine(server)
    groups = engine.sample(requests, params)
    assert {body["model"] for body in server.completions} == {"toy"}
    assert {sample.policy_version for group in groups for sample in group} == {0}


def test_a_server_that_ignores_adapters_is_refused_at_the_start(make_engine, server) -> None:
    server.deaf = True
    with pytest.raises(ConfigError) as caught:
        make_engine(server)
    assert "ignores the adapter" in str(caught.value)
    assert "--enable-lora" in str(caught.value)
    assert not server.adapters


def test_the_loud_adapter_leaves_nothing_behind(make_engine, server) -> None:
    engine = make_engine(server)
    assert list(server.adapters) == [engine._adapters.current.key]
    assert [entry.name for entry in engine._adapters.folder.iterdir()] == [engine._adapters.current.key]


@pytest.mark.slow
def test_publish_waits_for_a_server_that_is_away_for_a_moment(make_engine, policy, params) -> None:
    with serving(ToyModel()) as server:
        engine = make_engine(server, retry_s=30.0)
        port = server.server_address[1]
        server.die()
        policy.train()
        again: list[InferenceServer] = []

        def start() -> None:
            again.append(InferenceServer(ToyModel(), port=port))
            again[0].serve_forever(0.01)

        timer = threading.Timer(1.0, start)
        timer.start()
        try:
            engine.publish()
            prompt_T = np.arange(3, 20)
            engine.sample([SampleRequest(prompt_T=prompt_T, seeds_G=(1, 2))], params)
        finally:
            timer.join(0)
            engine.close()
            again[0].die()


def test_numbers_that_numpy_does_not_have_skip_the_loud_probe(tmp_path) -> None:
    from retrain.engines.policy_check import write_probe_adapter

    source = tmp_path / "quiet"
    source.mkdir()
    assert not write_probe_adapter(source, tmp_path / "loud")
    save_file({"b": np.zeros((2, 3), np.float32)}, source / WEIGHTS)
    (source / "adapter_config.json").write_text("{}")
    assert write_probe_adapter(source, tmp_path / "loud")
    assert np.abs(load_file(tmp_path / "loud" / WEIGHTS)["b"]).min() > 0
    assert (tmp_path / "loud" / "adapter_config.json").read_text() == "{}"


def test_sampling_params_are_those_of_the_probe(make_engine, server, policy) -> None:
    """The probe sends what rollouts send, or it would test another path."""
    engine = make_engine(server)
    server.requests.clear()
    policy.train()
    engine.publish()
    probe = set(server.completions[0])
    server.requests.clear()
    engine.sample(
        [SampleRequest(prompt_T=np.arange(3, 9), seeds_G=(1,))], SamplingParams(max_tokens=4, temperature=0.7)
    )
    assert probe == set(server.completions[0])
