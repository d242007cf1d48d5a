"""One training client on a Tinker service: every call of the SDK, each with a deadline and clear errors.

Everything that depends on the SDK is here, for releases 0.16 (the wire of SkyRL-tx) to 0.38. In between, calls that
returned a client return a future of one, `load_state` gave way to a new client made from the state, and adapters leave
the service file by file instead of as an archive.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from retrain.api import BackendError, Floats, Problem, SamplingParams
from retrain_tinker.faults import bad_answer, explained, safe_url, timed_out, unreachable
from retrain_tinker.losses import CROSS_ENTROPY, Datum, PolicyLoss
from retrain_tinker.options import TinkerOptions

T = TypeVar("T")
PROBE_S = 5.0  # enough to learn whether anything listens
GOODBYE_S, RELEASE_S = 5.0, 3.0  # for closing, and for each answer of the service meanwhile
# Weights that are stored only for a download need not stay, but a slow download must end first.
TEMPORARY_TTL_S = 24 * 3600
# SkyRL-tx keeps a seed in 32 bits, with a sign.
SEED_BITS = 31


class Service:
    """A connection, its training client, and the sampling client of the current weights.

    The SDK retries for a long time, and some releases never give up on an unreachable server. Each call therefore runs
    in a thread that is abandoned at its deadline. Every method may raise BackendError or ConfigError.
    """

    def __init__(self, base_url: str, options: TinkerOptions) -> None:
        self.base_url = base_url
        self.options = options
        self._base_model = ""
        self._client: Any = None
        self._trainer: Any = None
        self._sampler: Any = None
        self._base: Any = None

    def connect(self) -> None:
        """Open a session without telemetry, unless it is requested; fails immediately if nothing is listening."""
        # The SDK would retry for minutes if nothing is listening.
        if self.base_url:
            import httpx

            try:
                httpx.get(f"{self.base_url.rstrip('/')}/api/v1/healthz", timeout=PROBE_S)
            except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
                raise unreachable(self.base_url, str(error)) from error
            except httpx.HTTPError:
                # Slow or unusual, but something answers: the deadlines cover the rest.
                pass

        def session() -> Any:
            os.environ.setdefault("TINKER_TELEMETRY", "0")
            import tinker

            # it logs a warning per download
            logging.getLogger("tinker.lib.public_interfaces.rest_client").setLevel(logging.ERROR)
            return tinker.ServiceClient(base_url=self.base_url or None)

        self._client = self._call("connecting", session, at_start=True)

    def supported_models(self) -> list[str]:
        def asked() -> Any:
            import tinker

            # Since 0.30 or so; the service client's own method is deprecated there.
            if hasattr(tinker, "RestClient"):
                return tinker.RestClient(base_url=self.base_url or None).get_server_capabilities().result()
            return self._client.get_server_capabilities()

        models = self._call("asking for its models", asked, at_start=True).supported_models
        return [model.model_name for model in models if model.model_name]

    def create(self, base_model: str, *, rank: int, seed: int) -> None:
        """Make a new adapter on attention and MLP of a base model, without the head like the local backend."""
        self._base_model = base_model
        doing, seed = f"creating an adapter of rank {rank} on {base_model}", seed % 2**SEED_BITS
        make = partial(self._client.create_lora_training_client, base_model, rank=rank, seed=seed, train_unembed=False)
        self.replace_trainer(self._call(doing, make, at_start=True))

    def restore(self, path: str) -> None:
        """Make a new training client with the weights and the optimizer of a saved state, replacing the present one.

        The present one is released once the new one is ready, so that a failure changes nothing.
        """
        make = self._client.create_training_client_from_state_with_optimizer
        self.replace_trainer(self._call(f"loading {path}", lambda: make(path)))

    def replace_trainer(self, trainer: Any) -> None:
        """Use another training client, or none; the slot of the earlier one is released."""
        before, self._trainer, self._sampler = self._trainer, trainer, None
        if before is not None:
            _release(self._client, before)

    def close(self) -> None:
        client, trainer = self._client, self._trainer
        self._client = self._trainer = self._sampler = self._base = None
        if client is None:
            return

        def leave() -> None:
            if trainer is not None:
                _release(client, trainer)
            with suppress(Exception):
                # Newer releases also end the session on the service.
                if hasattr(client, "close"):
                    client.close("success").result(timeout=RELEASE_S)
                else:
                    client.holder.close()

        leaving = threading.Thread(target=leave, name="tinker: closing", daemon=True)
        leaving.start()
        # Closing a client that never connected can block on its own locks.
        leaving.join(GOODBYE_S)

    def publish(self) -> None:
        """Make a sampling client of the trainer's present weights.

        The earlier one must never be used again: on SkyRL-tx, sampling from older weights overwrites the ones in
        training.
        """
        self._sampler = None
        self._sampler = self._call("publishing the weights", self.opened().save_weights_and_get_sampling_client)

    def start_sample(
        self, prompt: Sequence[int], seed: int, params: SamplingParams, stop: Sequence[int]
    ) -> Future[Any]:
        from tinker import types

        if self._sampler is None:
            what = "no weights are published: there is nothing to sample from"
            fix = "call publish() before sample()"
            raise BackendError(Problem(code="tinker.not-published", where="sampling", what=what, fix=fix))
        sampling = types.SamplingParams(
            max_tokens=params.max_tokens,
            seed=seed % 2**SEED_BITS,
            stop=list(stop) or None,
            temperature=0.0 if params.greedy else params.temperature,
        )
        return _future(self._sampler.sample(types.ModelInput.from_ints(list(prompt)), 1, sampling))

    def start_logprobs(self, tokens: Sequence[int]) -> Future[Any]:
        """Request the base model's log-probability of each token; None for a token without one."""
        from tinker import types

        self.opened()
        if self._base is None:
            make, name = self._client.create_sampling_client, self._base_model
            self._base = self._call(f"opening the base model {name}", lambda: make(base_model=name))
        return _future(self._base.compute_logprobs(types.ModelInput.from_ints(list(tokens))))

    def forward(self, datums: Sequence[Datum], loss: PolicyLoss, *, with_gradient: bool = False) -> Any:
        """Compute log-probabilities and losses, and add the gradient on the service if requested."""
        trainer = self.opened()
        call = trainer.forward_backward if with_gradient else trainer.forward
        doing = f"{'training on' if with_gradient else 'computing log-probabilities of'} {len(datums)} rows"
        return self._call(doing, lambda: call(inputs_of(datums, loss.kind), loss.kind, loss.service_config))

    def logprobs(self, datums: Sequence[Datum]) -> list[Floats]:
        return self.checked(self.forward(datums, PolicyLoss()), datums)

    def optim_step(self, **params: float) -> Mapping[str, float]:
        from tinker import types

        call = self.opened().optim_step
        return self._call("the optimizer step", lambda: call(types.AdamParams(**params))).metrics or {}

    def checked(self, output: Any, datums: Sequence[Datum]) -> list[Floats]:
        """Return the log-probabilities of an answer; BackendError unless each target of each datum has one."""
        found = [np.asarray(entry["logprobs"].to_numpy(), dtype=np.float64) for entry in output.loss_fn_outputs]
        if [len(values) for values in found] != [len(datum.targets_T) for datum in datums]:
            raise bad_answer(safe_url(self.base_url), "the log-probabilities have other lengths than the rows")
        return found

    def save_state(self, name: str, *, is_temporary: bool = False) -> str:
        save, ttl_seconds = self.opened().save_state, TEMPORARY_TTL_S if is_temporary else None
        return str(self._call("saving the state", lambda: save(name, ttl_seconds=ttl_seconds)).path)

    def export_adapter(self, name: str) -> str:
        trainer = self.opened()
        save = getattr(trainer, "save_weights_external", None) or trainer.save_weights_for_sampler
        return str(self._call("exporting the adapter", lambda: save(name)).path)

    def download_urls(self, path: str) -> dict[str, str]:
        """Return the URLs of an exported adapter's files, by name; a single archive has the name ""."""

        def asked() -> dict[str, str]:
            import tinker

            if "/external_weights/" in path:
                rest = tinker.RestClient(base_url=self.base_url or None)
                return {str(k): str(url) for k, url in rest.get_external_weights_urls(path).result().urls.items()}
            rest = self._client.create_rest_client()
            run, _, name = path.removeprefix("tinker://").partition("/")
            try:
                answer = rest.get_checkpoint_archive_url(run, name).result()
            except tinker.NotFoundError:
                # SkyRL-tx names the archive without the kind in its path.
                kind, _, last = name.rpartition("/")
                if not kind:
                    raise
                answer = rest.get_checkpoint_archive_url(run, last).result()
            return {"": str(answer.url)}

        return self._call(f"asking for {path}", asked)

    def opened(self) -> Any:
        """Return the training client; BackendError after `close`, or when a checkpoint failed to load."""
        if self._trainer is None:
            what = "there is no training client: the tinker backend is closed, or a checkpoint failed to load"
            raise BackendError(Problem(code="tinker.closed", what=what, fix="create another one"))
        return self._trainer

    def _call(self, doing: str, call: Callable[[], T], *, at_start: bool = False) -> T:
        key = "connect_timeout_s" if at_start else "timeout_s"
        timeout_s: float = getattr(self.options, key)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(resolved(call()))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"tinker: {doing}", daemon=True).start()
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            # The SDK has raised it; our own deadline leaves the call running.
            if future.done():
                raise explained(error, doing, self.base_url) from error
            raise timed_out(doing, self.base_url, timeout_s, key) from None
        except Exception as error:
            raise explained(error, doing, self.base_url) from error


def total_loss(output: Any) -> float | None:
    """Return the sum of all token losses as the service reports it; None where it reports none."""
    if "loss:sum" in output.metrics:
        return float(output.metrics["loss:sum"])
    if all("elementwise_loss" in entry for entry in output.loss_fn_outputs):
        return float(sum(entry["elementwise_loss"].to_numpy().sum() for entry in output.loss_fn_outputs))
    return None


def inputs_of(datums: Sequence[Datum], loss: str) -> list[Any]:
    """Return datums in the SDK's form: cross_entropy takes a weight per token, the other losses advantages."""
    from tinker import types

    def tensor(values: Any, dtype: type) -> Any:
        return types.TensorData.from_numpy(np.asarray(values, dtype=dtype))

    made = []
    for datum in datums:
        inputs = {"target_tokens": tensor(datum.targets_T, np.int64)}
        if loss != CROSS_ENTROPY:
            inputs["logprobs"] = tensor(datum.logprobs_T, np.float32)
        inputs["weights" if loss == CROSS_ENTROPY else "advantages"] = tensor(datum.advantages_T, np.float32)
        made.append(types.Datum(model_input=types.ModelInput.from_ints(datum.inputs_T.tolist()), loss_fn_inputs=inputs))
    return made


def resolved(answer: Any) -> Any:
    return answer.result() if hasattr(answer, "result") else answer


def _future(started: Any) -> Future[Any]:
    future: Future[Any] = started.future() if hasattr(started, "future") else started
    return future


def _release(client: Any, trainer: Any) -> None:
    """Unload a training client; failures are ignored, since the service cleans up by itself."""
    with suppress(Exception):
        from tinker import types
        from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

        async def unload() -> None:
            with client.holder.aclient(ClientConnectionPoolType.TRAIN) as connection:
                await connection.models.unload(request=types.UnloadModelRequest(model_id=trainer.model_id))

        client.holder.run_coroutine_threadsafe(unload()).result(timeout=RELEASE_S)
