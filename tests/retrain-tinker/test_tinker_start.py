"""What is refused, and reported, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrain.api import BackendError, PluginContext
from retrain_tinker.backend import TinkerBackend, create_backend
from tests.kit.problems import codes_in, refused
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
