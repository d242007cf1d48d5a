"""The servers hold the published policy, each version under its own name, or the run stops."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from retrain.api import BackendError, ConfigError, SamplingParams
from retrain.engines.policy_check import WEIGHTS, write_probe_adapter
from tests.kit.inference_server import Handler, InferenceServer, changed, serving
from tests.kit.toy_policy import ToyModel

LOAD = "/v1/load_lora_adapter"


def loads(server: InferenceServer, field: str = "lora_name") -> list[str]:
    return [body[field] for path, body in server.requests if path == LOAD]


def fails(error: Exception) -> Callable[[Path], Any]:
    """A function of a folder that raises."""

    def fail(folder: Path) -> None:
        raise error

    return fail


def test_every_version_has_a_new_name_and_path_and_is_never_loaded_in_place(make_engine, server, policy) -> None:
    engine = make_engine(server)
    for _ in range(4):
        policy.train()
        engine.publish()
    engine.publish()  # the same version once more, as after a resume
    make_engine(server)  # of another run on the same server
    assert len(set(loads(server))) == len(loads(server)) == 1 + 1 + 5 + 2  # one of each handshake has large weights
    assert len(set(loads(server, "lora_path"))) == 9
    assert not any("load_inplace" in body for _, body in server.requests)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_versions_are_unloaded_beyond_keep_versions(make_engine, server, policy, keep) -> None:
    engine = make_engine(server, keep_versions=keep)
    assert list(server.adapters) == [engine._adapters.current.key], "the handshake leaves nothing behind"
    assert [entry.name for entry in engine._adapters.folder.iterdir()] == [engine._adapters.current.key]
    for version in range(1, 6):
        policy.train()
        engine.publish()
        assert len(server.adapters) == min(keep, version + 1)
    kept = [int(name.rpartition("-v")[2]) for name in server.adapters]
    assert kept == list(range(5 - keep + 1, 6))


def test_an_adapter_is_loaded_before_any_request_of_its_version_and_while_nothing_is_generated(
    make_engine, server, policy, requests, params
) -> None:
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
    seen: set[str] = set()
    for path, body in server.requests:
        if path == LOAD:
            seen.add(body["lora_name"])
        elif path == "/v1/completions":
            assert body["model"] == "toy" or body["model"] in seen


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


def test_a_server_that_keeps_old_weights_is_an_error_even_where_the_policy_changed_little(
    make_engine, server, policy
) -> None:
    """Judged by the noise of the handshake, not by max_gap alone."""
    engine = make_engine(server)
    policy.train()
    engine.publish()
    old = server.model.load(engine._adapters.current.folder)
    server.model.load = lambda folder: old  # type: ignore[method-assign]
    policy.version += 1
    policy.weights = {name: 1.003 * value for name, value in policy.weights.items()}
    with pytest.raises(BackendError, match=r"(?s)does not sample from policy version 2.*restart the server"):
        engine.publish()


def test_a_restarted_server_gets_its_adapters_once_however_late_its_refusals_come(
    make_engine, server, policy, requests, params
) -> None:
    engine = make_engine(server, max_concurrent=2)
    policy.train()
    engine.publish()
    server.requests.clear()

    def late(handler: Handler, answer: object) -> None:
        server.adapters.clear()
        server.caches.clear()
        while len(loads(server)) < 2 or server.busy > 2:  # until the other requests have had it loaded again
            server.released.wait(0.005)
        handler.error(404, "The model does not exist.")

    server.faults.append(late)
    groups = engine.sample(requests, params)
    assert [len(group) for group in groups] == [4, 3, 1, 5]
    assert len(loads(server)) == 2  # of both versions that are kept
    assert sum(body["max_tokens"] == 2 for body in server.completions) >= 2  # compared before anything is trained on


def test_a_server_that_restarts_between_load_and_probe_or_loses_its_answer_is_no_error(
    make_engine, server, policy
) -> None:
    engine = make_engine(server)

    def restarts(handler: Handler, answer: object) -> None:
        server.adapters.clear()
        handler.error(404, "The model does not exist.")

    server.faults.append(restarts)
    policy.train()
    engine.publish()
    assert engine._adapters.current.key in server.adapters
    server.requests.clear()
    change = server.model.load

    def cut(folder: Path) -> object:
        if len(loads(server)) == 1:
            for connection in list(server.connections):
                connection.shutdown(2)
        return change(folder)

    server.model.load = cut  # type: ignore[method-assign]
    policy.train()
    engine.publish()
    assert len(loads(server)) == 2  # one whose answer was lost, one that heard "already"


def test_an_adapter_that_cannot_be_written_or_read_is_one_clear_error(make_engine, server, policy, tmp_path) -> None:
    engine = make_engine(server, adapter_dir=str(tmp_path / "shared"))
    save = policy.save_adapter
    policy.save_adapter = fails(SafetensorError("Error while serializing: I/O error: No space left on device"))
    policy.train()
    with pytest.raises(BackendError, match=r"version 1 cannot be written: .*No space left"):
        engine.publish()
    policy.save_adapter = save
    server.model.load = fails(PermissionError("permission denied"))  # type: ignore[method-assign]
    said = r"(?s)loading the adapter of version 1 was refused with HTTP 404.*must be able to read.*adapter_dir"
    with pytest.raises(BackendError, match=said):
        engine.publish()
    shutil.rmtree(tmp_path / "shared")
    with pytest.raises(BackendError, match="adapter of version 1 cannot be written"):
        engine.publish()
    (tmp_path / "file").write_text("x")
    with pytest.raises(BackendError, match="no folder for adapters can be made"):
        make_engine(server, adapter_dir=str(tmp_path / "file"))


def test_a_backend_may_say_that_the_base_model_is_the_policy(make_engine, server, policy, requests, params) -> None:
    policy.save_adapter = lambda folder: None  # type: ignore[method-assign]
    engine = make_engine(server)
    groups = engine.sample(requests, params)
    assert {body["model"] for body in server.completions} == {"toy"}
    assert {sample.policy_version for group in groups for sample in group} == {0}


def test_a_server_that_ignores_adapters_is_refused_at_the_start(make_engine, server) -> None:
    server.deaf = True
    with pytest.raises(ConfigError, match=r"(?s)ignores the adapter.*--enable-lora"):
        make_engine(server)
    assert not server.adapters


def test_numbers_that_numpy_does_not_have_skip_the_probe_with_large_weights(tmp_path) -> None:
    source = tmp_path / "quiet"
    source.mkdir()
    assert not write_probe_adapter(source, tmp_path / "loud")
    save_file({"b": np.zeros((2, 3), np.float32)}, source / WEIGHTS)
    (source / "adapter_config.json").write_text("{}")
    assert write_probe_adapter(source, tmp_path / "loud")
    assert np.abs(load_file(tmp_path / "loud" / WEIGHTS)["b"]).min() > 0
    assert (tmp_path / "loud" / "adapter_config.json").read_text() == "{}"


def test_the_probe_sends_what_rollouts_send(make_engine, server, policy, requests) -> None:
    engine = make_engine(server)
    server.requests.clear()
    policy.train()
    engine.publish()
    probe = set(server.completions[0])
    server.requests.clear()
    engine.sample(requests[:1], SamplingParams(max_tokens=4, temperature=0.7))
    assert probe == set(server.completions[0])


# ---------------------------------------------------------------- the handshake before a run


def test_log_probabilities_before_temperature_are_refused_with_the_option(make_engine) -> None:
    with serving(ToyModel(), processed=False) as server:
        said = "reports log-probabilities before temperature, and [training] temperature = 0.7"
        with pytest.raises(ConfigError, match=re.escape(said)) as caught:
            make_engine(server, temperature=0.7)
        assert "--logprobs-mode processed_logprobs" in str(caught.value)
        assert 'logprobs = "trainer"' in str(caught.value)
        assert not server.adapters
        make_engine(server, temperature=1.0)
        make_engine(server, temperature=0.7, logprobs="trainer")
        with pytest.raises(ConfigError, match="tis_cap"):
            make_engine(server, temperature=0.7, logprobs="trainer", tis_cap=2.0)
        with pytest.raises(ConfigError, match=r"\[algorithm\] is_bounds"):
            make_engine(server, temperature=0.7, logprobs="trainer", is_bounds=[0.5, 2.0])


def test_servers_that_differ_in_their_distribution_are_refused(make_engine, server) -> None:
    with serving(ToyModel(), processed=False) as other, pytest.raises(ConfigError, match="some servers"):
        make_engine(other, server)


@pytest.mark.parametrize(
    ("parts", "said"),
    [({"token_logprobs": None}, "log-probabilities"), ({"token_ids": None}, "token ids"), ({"logprobs": None}, "log-")],
)
def test_a_server_that_answers_without_what_training_needs_is_refused(make_engine, server, parts, said) -> None:
    server.always = changed(**parts)
    with pytest.raises(ConfigError, match=rf"(?s)the answer holds no {said}.*exact ids that were sampled"):
        make_engine(server)


def test_another_model_is_refused_by_its_numbers_or_where_no_trainer_can_compare_by_its_name(
    make_engine, policy
) -> None:
    said = r"(?s)nats from the trainer's.*serve the model of \[model\] model"
    with serving(ToyModel(seed=5)) as server, pytest.raises(ConfigError, match=said):
        make_engine(server)
    policy.is_remote, said = True, "the server has 'other', not 'toy'"
    other = serving(ToyModel(root="/models/other"), model_name="other")
    with other as server, pytest.raises(ConfigError, match=said):
        make_engine(server)


def test_a_list_without_the_model_and_a_page_that_is_no_list_are_refused(make_engine, server) -> None:
    server.entries = lambda: [{"id": "one", "root": "/one"}, {"id": "two", "root": "/two"}]
    with pytest.raises(ConfigError, match="'one', 'two', not 'toy'"):
        make_engine(server)
    server.entries = list
    with pytest.raises(ConfigError, match="no model"):
        make_engine(server)
    for body in (None, 3, [{"name": "x"}], "text"):
        server.entries = lambda body=body: body
        with pytest.raises((BackendError, ConfigError)):
            make_engine(server)


def test_the_smaller_context_counts(make_engine) -> None:
    with serving(ToyModel(context_limit=100)) as server:
        engine = make_engine(server)
        assert engine._caller.context_limit == 100
        assert max(len(body["prompt"]) for body in server.completions) <= 100 - 16
