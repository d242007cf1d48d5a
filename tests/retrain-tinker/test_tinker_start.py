"""What is refused, and reported, before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import BackendError, Config, PluginContext
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable, TeacherTable
from retrain_tinker.adapter import fetch_adapter
from retrain_tinker.backend import TinkerBackend, create_backend
from retrain_tinker.plugin import retrain_check_config
from tests.kit.problems import codes_in, refused
from tests.kit.tinker_rows import batch_of, drawn
from tests.kit.tinker_toy import MODEL, Toy

Make = Callable[..., TinkerBackend]
Contexts = Callable[..., PluginContext]
PPO = {"algorithm__loss": "ppo"}
NIGHTLY = pytest.mark.long


@pytest.mark.parametrize("base_url", ["http://user:hunter22@127.0.0.1:9", "not a url", "ftp://127.0.0.1:9", "http://"])
def test_an_address_where_no_service_answers_is_refused_at_once(context: Contexts, base_url: str) -> None:
    with pytest.raises(BackendError) as caught:
        create_backend(context(model__base_url=base_url))
    assert codes_in(caught) == ["tinker.unreachable"]
    assert "hunter22" not in str(caught.value)


def test_a_service_that_accepts_and_never_answers_meets_our_own_deadline(context: Contexts, toy: Toy) -> None:
    toy.faults.hang.add("create_session")
    with pytest.raises(BackendError, match="connect_timeout_s") as caught:
        create_backend(context(options__connect_timeout_s=0.2))
    assert codes_in(caught) == ["tinker.timeout"]


def test_a_missing_or_foreign_key_is_a_config_error_and_the_address_may_come_from_the_environment(
    context: Contexts, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", url)
    create_backend(context(model__base_url="")).close()
    for key in ("sk-something", ""):
        monkeypatch.setenv("TINKER_API_KEY", key)
        assert refused(create_backend, context()) == ["tinker.no-key"]
    monkeypatch.delenv("TINKER_API_KEY")
    assert refused(create_backend, context()) == ["tinker.no-key"]


@pytest.mark.parametrize(
    ("status", "code"), [(401, "key-refused"), (402, "no-credit"), (403, "forbidden"), (422, "bad-request")]
)
def test_a_refusal_is_reported_in_the_services_words(context: Contexts, toy: Toy, status: int, code: str) -> None:
    toy.faults.statuses["create_model"] = [status] * 3
    with pytest.raises(BackendError, match="made to fail") as caught:
        create_backend(context())
    assert codes_in(caught) == [f"tinker.{code}"]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model__lora_rank": 64}, "bad-rank"),
        ({"model__model": "other"}, "unknown-model"),
        ({"lora__alpha": 8}, "fixed-alpha"),
        ({"optimizer__grad_clip_norm": 1.0}, "no-clipping"),
        pytest.param({"algorithm__loss": "cispo"}, "loss-unsupported", marks=NIGHTLY),
        ({**PPO, "algorithm__clip_eps": 0.1}, "other-loss"),
        pytest.param({**PPO, "algorithm__clip_eps_high": 0.3}, "other-loss", marks=NIGHTLY),
    ],
    ids=str,
)
def test_what_the_service_lacks_or_would_silently_ignore_is_refused(
    context: Contexts, toy: Toy, changes: dict[str, Any], code: str
) -> None:
    assert refused(create_backend, context(**changes)) == [f"tinker.{code}"]
    assert not toy.adapters, "a refused run must leave no adapter behind"


def test_another_name_and_ppo_are_accepted_with_what_the_service_has(backend: Make, toy: Toy) -> None:
    backend(**PPO, model__model="other", options__base_model=MODEL)
    toy.faults.clip_bounds = None  # a service that takes the request's own
    backend(**PPO, algorithm__clip_eps=0.1, algorithm__clip_eps_high=0.3)


def test_at_another_temperature_the_log_probabilities_must_be_those_of_one(
    context: Contexts, toy: Toy, caplog: pytest.LogCaptureFixture
) -> None:
    create_backend(context(training__temperature=0.5)).close()
    assert "the gradient are of T = 1" in caplog.text
    toy.faults.logprobs_after_temperature = True
    with pytest.raises(BackendError, match=r"temperature = 1\.0") as caught:
        create_backend(context(training__temperature=0.5))
    assert codes_in(caught) == ["tinker.logprob-gap"]


# ---------------------------------------------------------------- the plugin


HOSTED = {"backend": schema.BackendTable(backend="tinker"), "lora": schema.LoraTable()}


@pytest.mark.parametrize(
    ("backend", "keys", "refused"),
    [
        ("tinker", {}, []),
        ("tinker", {"engine": "vllm", "url": "http://127.0.0.1:1"}, ["engine", "url"]),
        ("local", {"engine": "vllm"}, []),
    ],
)
def test_sampling_keys_that_the_service_does_not_read_are_refused(
    backend: str, keys: dict[str, str], refused: list[str]
) -> None:
    tables = HOSTED | {"backend": schema.BackendTable(backend=backend), "inference": InferenceTable(**keys)}
    found = [(p.code, p.where) for p in retrain_check_config(Config(tables=tables))]
    assert found == [("tinker.key-without-effect", f"[inference] {key} (default)") for key in refused]


@pytest.mark.parametrize("teacher", [{"model": "other"}, {"adapter": "logs/a"}, {"engine": "vllm"}, {}], ids=str)
def test_a_teacher_is_compared_at_the_temperature_that_the_service_knows(teacher: dict[str, str]) -> None:
    found = []
    for temperature in (0.7, 1.0):
        training = schema.TrainingTable(temperature=temperature)
        tables = HOSTED | {"teacher": TeacherTable(**teacher), "training": training}
        found += [(temperature, problem.code) for problem in retrain_check_config(Config(tables=tables))]
    assert found == ([(0.7, "tinker.teacher-temperature")] if teacher else [])


def trained(made: TinkerBackend, folder: Path) -> dict[str, str]:
    """The state that a trained policy's checkpoint refers to."""
    made.train(batch_of(*drawn(made)))
    made.publish()
    made.save(folder)
    return json.loads((folder / "tinker_state.json").read_text())


def test_an_adapter_on_the_service_is_fetched_once(
    backend: Make, toy: Toy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config(tables={"model": schema.ModelTable(model="toy/bigram", base_url=url)})
    assert fetch_adapter("some/folder", config) is None
    state = trained(backend(), tmp_path)
    for kind in ("adapter_path", "state_path"):
        folder = fetch_adapter(state[kind], config)
        assert folder is not None
        found = (folder / "adapter_model.safetensors").read_bytes()
        assert found == (tmp_path / "adapter_model.safetensors").read_bytes()
        assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
        calls = len(toy.calls)
        assert fetch_adapter(state[kind], config) == folder
        assert len(toy.calls) == calls
    assert len(list((tmp_path / "cache" / "retrain" / "tinker").iterdir())) == 2
    assert len(toy.adapters) == 1
