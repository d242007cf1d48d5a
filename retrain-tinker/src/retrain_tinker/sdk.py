"""Everything that depends on the Tinker SDK: releases 0.16, which speaks the wire of SkyRL-tx, to 0.38.

From 0.16 to 0.38 calls that returned a client return a future of one, `load_state` gave way to a new client made from
the state, and adapters left the service as an archive and now leave it file by file. Every function here blocks, has
no deadline and raises whatever the SDK raises; `retrain_tinker.service` adds deadlines and clear errors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np

from retrain.api import Floats
from retrain_tinker.datums import Datum
from retrain_tinker.losses import CROSS_ENTROPY

TEMPORARY_TTL_S = 24 * 3600  # of weights that are stored on the service only for a moment
GOODBYE_S = 3.0  # to wait for the service when a client is released


def connect(base_url: str) -> Any:
    """A service client; empty = `TINKER_BASE_URL`, or the hosted service. Telemetry is off unless it is requested."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    logging.getLogger("tinker.lib.public_interfaces.rest_client").setLevel(logging.ERROR)  # a warning per download
    return tinker.ServiceClient(base_url=base_url or None)


def supported_models(service: Any, base_url: str) -> list[str]:
    """Names of the base models that the service offers."""
    import tinker

    rest = getattr(tinker, "RestClient", None)
    if rest is not None:  # since 0.30 or so; the service client's own method is deprecated there
        answer = rest(base_url=base_url or None).get_server_capabilities().result()
    else:
        answer = service.get_server_capabilities()
    return [model.model_name for model in answer.supported_models if model.model_name]


def new_trainer(service: Any, base_model: str, *, rank: int, seed: int) -> Any:
    """A training client with a new LoRA adapter on attention and MLP; like the local backend, it excludes the head."""
    client = service.create_lora_training_client(base_model, rank=rank, seed=seed, train_unembed=False)
    return _resolved(client)


def trainer_from_state(service: Any, path: str) -> Any:
    """A new training client with the weights and the optimizer of a saved state."""
    return _resolved(service.create_training_client_from_state_with_optimizer(path))


def sampler_of(trainer: Any) -> Any:
    """A sampling client of the trainer's weights as they are now."""
    return _resolved(trainer.save_weights_and_get_sampling_client())


def release(service: Any, trainer: Any) -> None:
    """Unload a training client; failures are ignored, since the service cleans up by itself."""
    with suppress(Exception):
        from tinker import types
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

        holder = service.holder

        async def unload() -> None:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                await client.models.unload(request=types.UnloadModelRequest(model_id=trainer.model_id))

        holder.run_coroutine_threadsafe(unload()).result(timeout=GOODBYE_S)


def disconnect(service: Any) -> None:
    """Stop the heartbeats; newer releases also end the session on the service."""
    with suppress(Exception):
        if hasattr(service, "close"):
            service.close("success").result(timeout=GOODBYE_S)
        else:
            service.holder.close()


def sample(sampler: Any, prompt: Sequence[int], **params: Any) -> Future[Any]:
    """Start drawing one completion; `params` are `max_tokens`, `seed`, `stop`, `temperature`."""
    from tinker import types

    started = sampler.sample(types.ModelInput.from_ints(list(prompt)), 1, types.SamplingParams(**params))
    future: Future[Any] = started.future() if hasattr(started, "future") else started
    return future


def base_sampler(service: Any, base_model: str) -> Any:
    """A sampling client of a model without any adapter."""
    return _resolved(service.create_sampling_client(base_model=base_model))


def logprobs_of_tokens(sampler: Any, tokens: Sequence[int]) -> Future[Any]:
    """Start computing the log-probability of each token of a text; None for those that have none."""
    from tinker import types

    started = sampler.compute_logprobs(types.ModelInput.from_ints(list(tokens)))
    future: Future[Any] = started.future() if hasattr(started, "future") else started
    return future


def forward(trainer: Any, datums: Sequence[Datum], loss: str, config: Mapping[str, float] | None) -> Any:
    """Log-probabilities and losses, without a gradient."""
    return trainer.forward(_datums(datums, loss), loss, config).result()


def forward_backward(trainer: Any, datums: Sequence[Datum], loss: str, config: Mapping[str, float] | None) -> Any:
    """The same, and the gradient is accumulated on the service."""
    return trainer.forward_backward(_datums(datums, loss), loss, config).result()


def optim_step(trainer: Any, **params: float) -> Mapping[str, float]:
    """One AdamW step with the accumulated gradient; returns the metrics of the service."""
    from tinker import types

    return trainer.optim_step(types.AdamParams(**params)).result().metrics or {}


def save_state(trainer: Any, name: str, *, is_temporary: bool = False) -> str:
    """Keep weights and optimizer on the service; returns their `tinker://` path."""
    saved = trainer.save_state(name, ttl_seconds=TEMPORARY_TTL_S if is_temporary else None).result()
    return str(saved.path)


def export_adapter(trainer: Any, name: str) -> str:
    """Keep the adapter on the service in a form that can be downloaded; returns its `tinker://` path."""
    if hasattr(trainer, "save_weights_external"):
        return str(trainer.save_weights_external(name).result().path)
    return str(trainer.save_weights_for_sampler(name).result().path)


def download_urls(service: Any, path: str, base_url: str) -> dict[str, str]:
    """Where the files of an exported adapter are, by name; under the name "" where all are in one archive."""
    import tinker

    if "/external_weights/" in path:
        rest = tinker.RestClient(base_url=base_url or None)
        return {str(name): str(url) for name, url in rest.get_external_weights_urls(path).result().urls.items()}
    rest = service.create_rest_client()
    run, _, name = path.removeprefix("tinker://").partition("/")
    kind, _, last = name.rpartition("/")
    try:
        answer = rest.get_checkpoint_archive_url(run, name).result()
    except tinker.NotFoundError:  # SkyRL-tx names it without the kind in its path
        if not kind:
            raise
        answer = rest.get_checkpoint_archive_url(run, last).result()
    return {"": str(answer.url)}


def logprobs_of(output: Any) -> list[Floats]:
    """The trainer's log-probabilities of the targets of each datum, as float64."""
    return [np.asarray(entry["logprobs"].to_numpy(), dtype=np.float64) for entry in output.loss_fn_outputs]


def total_loss(output: Any) -> float | None:
    """Sum of the losses of all tokens as the service reports it; None where it reports none."""
    if "loss:sum" in output.metrics:
        return float(output.metrics["loss:sum"])
    if all("elementwise_loss" in entry for entry in output.loss_fn_outputs):
        return float(sum(entry["elementwise_loss"].to_numpy().sum() for entry in output.loss_fn_outputs))
    return None


def reports_sum(output: Any) -> bool:
    """Whether the service reports its loss as a sum: the hosted one does, SkyRL-tx does not."""
    return "loss:sum" in output.metrics


def _resolved(client: Any) -> Any:
    return client.result() if hasattr(client, "result") else client


def _datums(datums: Sequence[Datum], loss: str) -> list[Any]:
    """What the service asks for with this loss: cross_entropy takes a weight per token, the others advantages."""
    from tinker import types

    def tensor(values: Any, dtype: type) -> Any:
        return types.TensorData.from_numpy(np.asarray(values, dtype=dtype))

    def inputs(datum: Datum) -> dict[str, Any]:
        targets, advantages = tensor(datum.targets_T, np.int64), tensor(datum.advantages_T, np.float32)
        if loss == CROSS_ENTROPY:
            return {"target_tokens": targets, "weights": advantages}
        return {"target_tokens": targets, "logprobs": tensor(datum.logprobs_T, np.float32), "advantages": advantages}

    return [
        types.Datum(model_input=types.ModelInput.from_ints(datum.inputs_T.tolist()), loss_fn_inputs=inputs(datum))
        for datum in datums
    ]
