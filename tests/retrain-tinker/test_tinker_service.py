"""The calls of the SDK that `retrain_tinker.service` makes: releases 0.16.1 and 0.38 both pass."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from retrain_tinker.losses import Datum
from retrain_tinker.service import inputs_of, resolved


def test_every_call_that_is_made_exists() -> None:
    service, trainer, sampler = tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (service, (), {"base_url": None}),
        (service.create_lora_training_client, ("model",), {"rank": 1, "seed": 1, "train_unembed": False}),
        (service.create_training_client_from_state_with_optimizer, ("tinker://a/weights/b",), {}),
        (service.create_sampling_client, (), {"base_model": ""}),
        (trainer.forward, ([], "ppo", {"clip_low_threshold": 0.8}), {}),
        (trainer.forward_backward, ([], "ppo", None), {}),
        (trainer.optim_step, (types.AdamParams(),), {}),
        (trainer.save_state, ("name",), {"ttl_seconds": None}),
        (trainer.save_weights_and_get_sampling_client, (), {}),
        (sampler.sample, (None, 1, types.SamplingParams(max_tokens=1)), {}),
        (sampler.compute_logprobs, (types.ModelInput.from_ints([1]),), {}),
    ]
    if exports := hasattr(trainer, "save_weights_external") and hasattr(tinker, "RestClient"):
        calls += [
            (tinker.RestClient.get_external_weights_urls, ("path",), {}),
            (tinker.RestClient, (), {"base_url": None}),
        ]
    for function, arguments, named in calls:
        bound = () if inspect.isclass(function) else (object(),)
        inspect.signature(function).bind(*bound, *arguments, **named)
    assert exports or (hasattr(service, "create_rest_client") and hasattr(trainer, "save_weights_for_sampler"))
    assert hasattr(tinker, "RestClient") or hasattr(service, "get_server_capabilities")


def test_every_loss_and_number_of_adamw_is_known() -> None:
    numbers = {"learning_rate": 1.0, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4, "grad_clip_norm": 0.5}
    params = types.AdamParams(**numbers)
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert {"importance_sampling", "ppo", "cispo", "dro"} <= set(types.LossFnType.__args__)
    params = types.SamplingParams(max_tokens=3, seed=2**31 - 1, stop=[5, 6], temperature=0.7)
    assert (params.max_tokens, params.seed, list(params.stop), params.temperature) == (3, 2**31 - 1, [5, 6], 0.7)
    with pytest.raises(Exception, match="grad_clip"):
        types.AdamParams(grad_clip=1.0)


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("ppo", {"logprobs": [0.0, -0.5, -1.5], "advantages": [0.0, 1.25, -2.0]}),
        ("cross_entropy", {"weights": [0.0, 1.25, -2.0]}),  # which takes no other inputs
    ],
)
def test_datums_keep_their_numbers(loss: str, wanted: dict[str, list[float]]) -> None:
    arrays = ([1, 2, 3], [2, 3, 4], [False, True, True], [0.0, -0.5, -1.5], [0.0, 1.25, -2.0])
    names = ("inputs_T", "targets_T", "action_T", "logprobs_T", "advantages_T")
    datum = Datum(**dict(zip(names, map(np.array, arrays), strict=True)))
    (made,) = inputs_of([datum], loss)
    assert made.model_input.to_ints() == [1, 2, 3]
    found = {name: tensor.to_numpy().tolist() for name, tensor in made.loss_fn_inputs.items()}
    assert found == {"target_tokens": [2, 3, 4]} | wanted
    assert {tensor.dtype for tensor in made.loss_fn_inputs.values()} == {"int64", "float32"}
    assert resolved(tinker) is tinker
    coming = SimpleNamespace(result=lambda: "client")
    assert resolved(coming) == "client", "results of either kind of call"
