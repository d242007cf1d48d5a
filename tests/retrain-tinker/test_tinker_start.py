"""What is refused, and told, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrain.api import BackendError, ConfigError, PluginContext
from retrain_tinker.backend import TinkerBackend, create_backend
from tests.kit.shared import first_or_long
from tests.kit.tinker_toy import MODEL, Toy

Make = Callable[..., TinkerBackend]


def test_nobody_listening_is_told_at_once(context: Callable[..., PluginContext]) -> None:
    with pytest.raises(BackendError) as caught:
        create_backend(context(model__base_url="http://user:hunter22@127.0.0.1:9"))
    assert "no Tinker service answers" in str(caught.value)
    assert "[model] base_url" in str(caught.value)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("base_url", ["not a url", "ftp://127.0.0.1:9", "http://"])
def test_what_is_no_address_is_told(context: Callable[..., PluginContext], base_url: str) -> None:
    with pytest.raises(BackendError, match="no Tinker service answers"):
        create_backend(context(model__base_url=base_url))


def test_the_address_may_come_from_the_environment(
    context: Callable[..., PluginContext], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", url)
    create_backend(context(model__base_url="")).close()


def test_a_service_that_accepts_and_never_answers_meets_our_own_deadline(
    context: Callable[..., PluginContext], toy: Toy
) -> None:
    toy.faults.hang.add("create_session")
    with pytest.raises(BackendError, match=r"connecting: no answer within 0\.5 s") as caught:
        create_backend(context(options__connect_timeout_s=0.5))
    assert "connect_timeout_s" in str(caught.value)


@pytest.mark.parametrize("key", [None, "sk-something"])
def test_a_missing_or_foreign_key_is_a_config_error(
    context: Callable[..., PluginContext], monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.delenv("TINKER_API_KEY")
    if key:
        monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(ConfigError, match="TINKER_API_KEY") as caught:
        create_backend(context())
    assert "no usable key" in str(caught.value)


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "refuses the key"), (402, "no credit"), (403, "may not do this"), (422, "does not understand")],
)
def test_a_refusal_is_told_with_its_way_out(
    context: Callable[..., PluginContext], toy: Toy, status: int, words: str
) -> None:
    toy.faults.statuses["create_model"] = [status] * 3
    with pytest.raises(BackendError, match=words) as caught:
        create_backend(context())
    assert "fix: " in str(caught.value)
    assert "made to fail" in str(caught.value)


def test_a_rank_that_the_service_does_not_have(context: Callable[..., PluginContext]) -> None:
    with pytest.raises(BackendError, match="no adapter of this rank") as caught:
        create_backend(context(model__lora_rank=64))
    assert "lower [model] lora_rank" in str(caught.value)


def test_a_model_that_the_service_does_not_have(context: Callable[..., PluginContext]) -> None:
    with pytest.raises(ConfigError, match="has no model 'other'") as caught:
        create_backend(context(model__model="other"))
    assert f"it has {MODEL}" in str(caught.value)
    create_backend(context(model__model="other", options__base_model=MODEL)).close()


@pytest.mark.parametrize(
    ("changes", "words"),
    first_or_long(
        [
            ({"lora__alpha": 8}, "sets LoRA's alpha itself"),
            ({"optimizer__grad_clip_norm": 1.0}, "cannot clip a gradient"),
            ({"algorithm__loss": "cispo"}, "does not compute the loss 'cispo'"),
            ({"algorithm__loss": "ppo", "algorithm__clip_eps": 0.1}, "computes another loss"),
            ({"algorithm__loss": "ppo", "algorithm__clip_eps_high": 0.3}, "computes another loss"),
        ]
    ),
    ids=str,
)
def test_what_the_service_would_silently_ignore_is_refused(
    context: Callable[..., PluginContext], toy: Toy, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        create_backend(context(**changes))
    assert not toy.adapters, "a refused run must leave no adapter behind"


def test_ppo_with_the_bounds_that_the_service_has_is_taken(backend: Make, toy: Toy) -> None:
    backend(algorithm__loss="ppo")
    toy.faults.clip_bounds = None  # a service that heeds the request's own
    backend(algorithm__loss="ppo", algorithm__clip_eps=0.1, algorithm__clip_eps_high=0.3)


def test_at_another_temperature_the_run_is_told_that_its_gradient_is_that_of_one(
    backend: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="retrain"):
        backend(training__temperature=0.7)
    assert "the gradient are of T = 1" in caplog.text


def test_a_sampler_whose_logprobs_are_of_another_distribution_is_refused(
    context: Callable[..., PluginContext], toy: Toy
) -> None:
    toy.faults.logprobs_after_temperature = True
    with pytest.raises(BackendError, match=r"nats off the trainer's") as caught:
        create_backend(context(training__temperature=0.5))
    assert "temperature = 1.0" in str(caught.value)
