"""The handshake before a run, and what it refuses."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError
from retrain.engines.policy_check import _after_temperature
from tests.kit.inference_server import changed, serving
from tests.kit.toy_policy import ToyModel


def test_the_log_says_what_was_found(make_engine, server, caplog) -> None:
    caplog.set_level(logging.INFO, logger="retrain")
    make_engine(server)
    (line,) = [record.getMessage() for record in caplog.records if "vllm at" in record.getMessage()]
    assert line.startswith(f"vllm at {server.url}: toy, context 640, log-probabilities after temperature, ")
    assert "nats from the trainer's" in line


def test_log_probabilities_before_temperature_are_refused_with_the_option(make_engine) -> None:
    with serving(ToyModel(), processed=False) as server:
        with pytest.raises(ConfigError) as caught:
            make_engine(server, temperature=0.7)
        text = str(caught.value)
        assert "reports log-probabilities before temperature, and [training] temperature = 0.7" in text
        assert "--logprobs-mode processed_logprobs" in text
        assert 'logprobs = "trainer"' in text
        assert not server.adapters
        make_engine(server, temperature=1.0)
        make_engine(server, temperature=0.7, logprobs="trainer")
        with pytest.raises(ConfigError, match="tis_cap"):
            make_engine(server, temperature=0.7, logprobs="trainer", tis_cap=2.0)
        with pytest.raises(ConfigError, match=r"\[algorithm\] is_bounds"):
            make_engine(server, temperature=0.7, logprobs="trainer", is_bounds=[0.5, 2.0])


def test_servers_that_differ_in_their_distribution_are_refused(make_engine) -> None:
    with serving(ToyModel(), processed=False) as one, serving(ToyModel()) as two, pytest.raises(ConfigError) as caught:
        make_engine(one, two)
    assert "some servers" in str(caught.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"token_logprobs": None}, "the answer holds no log-probabilities"),
        ({"token_ids": None}, "the answer holds no token ids"),
        ({"logprobs": None}, "the answer holds no log-probabilities"),
    ],
)
def test_a_server_that_answers_without_what_training_needs_is_refused(make_engine, server, parts, said) -> None:
    server.always = changed(**parts)
    with pytest.raises(ConfigError) as caught:
        make_engine(server)
    assert said in str(caught.value)
    assert "exact ids that were sampled" in str(caught.value)


def test_another_model_is_refused_by_its_numbers(make_engine) -> None:
    with serving(ToyModel(seed=5)) as server, pytest.raises(ConfigError) as caught:
        make_engine(server)
    assert "nats from the trainer's" in str(caught.value)
    assert "serve the model of [model] model" in str(caught.value)


def test_another_model_is_refused_by_its_name_where_no_trainer_can_compare(make_engine, policy) -> None:
    policy.is_remote = True
    with serving(ToyModel(root="/models/other"), model_name="other") as server, pytest.raises(ConfigError) as caught:
        make_engine(server)
    assert "the server has 'other', not 'toy'" in str(caught.value)


def test_several_models_and_none_by_that_name(make_engine, server) -> None:
    server.entries = lambda: [{"id": "one", "root": "/one"}, {"id": "two", "root": "/two"}]
    with pytest.raises(ConfigError, match="'one', 'two', not 'toy'"):
        make_engine(server)
    server.entries = list
    with pytest.raises(ConfigError, match="no model"):
        make_engine(server)


def test_no_server_is_told_at_once(make_context, policy) -> None:
    from retrain.engines.engine import create
    from retrain.engines.vllm import VLLM

    with pytest.raises(BackendError) as caught:
        create(VLLM(), make_context(["http://127.0.0.1:9"], retry_s=300.0), policy)
    assert "start the server, or correct [inference] url" in str(caught.value)


@pytest.mark.parametrize("body", [{}, [], {"data": 3}, {"data": [{"name": "x"}]}, "text"])
def test_a_page_that_is_no_list_of_models(make_engine, server, body) -> None:
    server.entries = lambda: body.get("data") if isinstance(body, dict) else body
    with pytest.raises((BackendError, ConfigError)):
        make_engine(server)


def test_the_smaller_context_counts(make_engine) -> None:
    with serving(ToyModel(context_limit=100)) as server:
        engine = make_engine(server)
        assert engine._caller.context_limit == 100
        assert max(len(body["prompt"]) for body in server.completions) <= 100 - 16


def test_which_distribution_is_seen_from_two_answers() -> None:
    logits = np.array([3.0, 1.0, 0.5, -2.0, -4.0])

    def shown(temperature: float) -> dict[str, float]:
        scaled = logits / temperature
        values = scaled - np.log(np.exp(scaled).sum())
        return {f"t{n}": float(value) for n, value in enumerate(values)}

    raw, warm = shown(1.0), shown(0.7)
    assert _after_temperature(raw, warm) is True
    assert _after_temperature(raw, raw) is False
    assert _after_temperature(raw, shown(0.5)) is None  # neither: a server with a temperature of its own
    assert _after_temperature({"t0": -0.1}, {"t0": -0.2}) is None
    assert _after_temperature(raw, {}) is None
    assert _after_temperature({"a": -1.0, "b": -1.0}, {"a": -1.0, "b": -1.0}) is None
    assert _after_temperature({"a": float("-inf"), "b": -1.0}, {"a": -2.0, "b": -1.0}) is None
