"""The handshake before a run, and what it refuses."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from retrain.api import BackendError, ConfigError
from retrain.engines.engine import create
from retrain.engines.policy_check import _after_temperature
from retrain.engines.vllm import VLLM
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


def test_a_missing_server_is_told_at_once(make_context, policy) -> None:
    with pytest.raises(BackendError, match=r"start the server, or correct \[inference\] url"):
        create(VLLM(), make_context(["http://127.0.0.1:9"], retry_s=300.0), policy)


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
