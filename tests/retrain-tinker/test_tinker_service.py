"""The calls of the SDK that `retrain_tinker.service` makes: releases 0.16.1 and 0.38 both pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from retrain_tinker.losses import Datum
from retrain_tinker.service import inputs_of, resolved


def takes(function: Callable[..., Any], *arguments: str) -> bool:
    """Whether a call with the first argument by position and these by name would be accepted."""
    inspect.signature(function).bind(object(), **dict.fromkeys(arguments))
    return True


def test_every_call_that_is_made_exists() -> None:
    service, trainer, sampler = tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient
    assert takes(service, "base_url")
    inspect.signature(service.create_lora_training_client).bind(object(), "model", rank=1, seed=1, train_unembed=False)
    inspect.signature(service.create_training_client_from_state_with_optimizer).bind(object(), "tinker://a/weights/b")
    inspect.signature(trainer.forward).bind(object(), [], "ppo", {"clip_low_threshold": 0.8})
    inspect.signature(trainer.forward_backward).bind(object(), [], "ppo", None)
    inspect.signature(trainer.optim_step).bind(object(), types.AdamParams())
    assert takes(trainer.save_state, "name", "ttl_seconds")
    assert takes(trainer.save_weights_and_get_sampling_client)
    inspect.signature(sampler.sample).bind(object(), object(), 1, types.SamplingParams(max_tokens=1))
    assert takes(service.create_sampling_client, "base_model")
    inspect.signature(sampler.compute_logprobs).bind(object(), types.ModelInput.from_ints([1]))
    exports = hasattr(trainer, "save_weights_external") and hasattr(tinker, "RestClient")
    archives = hasattr(service, "create_rest_client") and hasattr(trainer, "save_weights_for_sampler")
    assert exports or archives
    assert hasattr(tinker, "RestClient") or hasattr(service, "get_server_capabilities")
    if exports:
        assert takes(tinker.RestClient.get_external_weights_urls, "tinker_path")
        inspect.signature(tinker.RestClient).bind(base_url=None)


def test_every_loss_and_number_of_adamw_is_known() -> None:
    numbers = {"learning_rate": 1.0, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4, "grad_clip_norm": 0.5}
    params = types.AdamParams(**numbers)
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert {"importance_sampling", "ppo", "cispo"} <= set(types.LossFnType.__args__)
    params = types.SamplingParams(max_tokens=3, seed=2**31 - 1, stop=[5, 6], temperature=0.7)
    assert (params.max_tokens, params.seed, list(params.stop), params.temperature) == (3, 2**31 - 1, [5, 6], 0.7)
    with pytest.raises(Exception, match="grad_clip"):
        types.AdamParams(grad_clip=1.0)


def test_datums_keep_their_numbers() -> None:
    datum = Datum(
        inputs_T=np.array([1, 2, 3]),
        targets_T=np.array([2, 3, 4]),
        action_T=np.array([False, True, True]),
        logprobs_T=np.array([0.0, -0.5, -1.5]),
        advantages_T=np.array([0.0, 1.25, -2.0]),
    )
    (made,) = inputs_of([datum], "ppo")
    assert made.model_input.to_ints() == [1, 2, 3]
    found = {name: tensor.to_numpy().tolist() for name, tensor in made.loss_fn_inputs.items()}
    assert found == {"target_tokens": [2, 3, 4], "logprobs": [0.0, -0.5, -1.5], "advantages": [0.0, 1.25, -2.0]}
    assert {tensor.dtype for tensor in made.loss_fn_inputs.values()} == {"int64", "float32"}
    (answers,) = inputs_of([datum], "cross_entropy")  # which takes no other inputs
    found = {name: tensor.to_numpy().tolist() for name, tensor in answers.loss_fn_inputs.items()}
    assert found == {"target_tokens": [2, 3, 4], "weights": [0.0, 1.25, -2.0]}


def test_results_of_either_kind_of_call_are_settled() -> None:
    class Ready:
        pass

    class Coming:
        def result(self) -> str:
            return "client"

    ready = Ready()
    assert resolved(ready) is ready
    assert resolved(Coming()) == "client"
