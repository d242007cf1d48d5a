"""One training client on a Tinker service: the calls of the SDK, each with a deadline and clear errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from retrain.api import BackendError, Floats, Problem, SamplingParams
from retrain_tinker import sdk
from retrain_tinker.datums import Datum
from retrain_tinker.faults import SERVER_FIX, explained, safe_url, timed_out, unreachable
from retrain_tinker.losses import PolicyLoss
from retrain_tinker.options import TinkerOptions

T = TypeVar("T")
PROBE_S = 5.0
GOODBYE_S = 5.0
SEED_BITS = 31  # SkyRL-tx keeps a seed in 32 bits, with a sign


class Service:
    """A connection, its training client, and the sampling client of the current weights.

    The SDK retries for a long time, and some releases never give up on an unreachable server. Each call therefore runs
    in a thread that is abandoned at its deadline. Every method may raise BackendError or ConfigError.
    """

    def __init__(self, base_url: str, options: TinkerOptions) -> None:
        self.base_url = base_url
        self._options = options
        self._client: Any = None
        self._trainer: Any = None
        self._sampler: Any = None
        self._base: Any = None

    # ------------------------------------------------------------ the connection

    def connect(self) -> None:
        """Open a session; fails immediately if nothing is listening."""
        if self.base_url:
            _require_listener(self.base_url)
        self._client = self._call_at_start("connecting", partial(sdk.connect, self.base_url))

    def supported_models(self) -> list[str]:
        """Names of the base models that the service offers."""
        return self._call_at_start("asking for its models", partial(sdk.supported_models, self._client, self.base_url))

    def create(self, base_model: str, *, rank: int, seed: int) -> None:
        """A fresh adapter on a base model."""
        make = partial(sdk.new_trainer, self._client, base_model, rank=rank, seed=seed % 2**SEED_BITS)
        self._replace_trainer(self._call_at_start(f"creating an adapter of rank {rank} on {base_model}", make))

    def restore(self, path: str) -> None:
        """A new training client with the weights and the optimizer of a saved state, replacing the present one.

        The present one is released once the new one is ready, so that a failure changes nothing.
        """
        self._replace_trainer(self._call(f"loading {path}", partial(sdk.trainer_from_state, self._client, path)))

    def forget_trainer(self) -> None:
        """Release the slot of the present adapter, so that another one can be restored into it."""
        trainer, self._trainer, self._sampler = self._trainer, None, None
        if trainer is not None:
            sdk.release(self._client, trainer)

    def close(self) -> None:
        """Release this run's clients on the service; safe to call twice."""
        client, trainer = self._client, self._trainer
        self._client = self._trainer = self._sampler = self._base = None
        if client is None:
            return

        def leave() -> None:
            if trainer is not None:
                sdk.release(client, trainer)
            sdk.disconnect(client)

        leaving = threading.Thread(target=leave, name="tinker: closing", daemon=True)
        leaving.start()
        leaving.join(GOODBYE_S)  # closing a client that never connected can block on its own locks

    # ------------------------------------------------------------ sampling

    def publish(self) -> None:
        """Sample from the trainer's current weights from now on, and drop the client of the previous ones.

        It must never be used again: on SkyRL-tx, sampling from older weights overwrites those in training.
        """
        self._sampler = None
        self._sampler = self._call("publishing the weights", partial(sdk.sampler_of, self._open()))

    def start_sample(
        self, prompt: Sequence[int], seed: int, params: SamplingParams, stop: Sequence[int]
    ) -> Future[Any]:
        """Start sampling one completion from the published weights."""
        if self._sampler is None:
            what = "no weights are published: there is nothing to sample from"
            raise BackendError(Problem(where="sampling", what=what, fix="call publish() before sample()"))
        return sdk.sample(
            self._sampler,
            prompt,
            max_tokens=params.max_tokens,
            seed=seed % 2**SEED_BITS,
            stop=list(stop) or None,
            temperature=0.0 if params.greedy else params.temperature,
        )

    def start_logprobs(self, base_model: str, tokens: Sequence[int]) -> Future[Any]:
        """Start asking the base model for the log-probabilities of these tokens."""
        self._open()
        if self._base is None:
            make = partial(sdk.base_sampler, self._client, base_model)
            self._base = self._call(f"opening the base model {base_model}", make)
        return sdk.logprobs_of_tokens(self._base, tokens)

    # ------------------------------------------------------------ training

    def forward(self, datums: Sequence[Datum], loss: PolicyLoss) -> Any:
        """Log-probabilities and losses without a gradient."""
        call = partial(sdk.forward, self._open(), datums, loss.kind, loss.service_config)
        return self._call(f"computing log-probabilities of {len(datums)} rows", call)

    def logprobs(self, datums: Sequence[Datum]) -> list[Floats]:
        """The trainer's log-probabilities of all targets, raw (T = 1)."""
        return self.checked(self.forward(datums, PolicyLoss()), datums)

    def forward_backward(self, datums: Sequence[Datum], loss: PolicyLoss) -> Any:
        """Add the gradient of these rows."""
        call = partial(sdk.forward_backward, self._open(), datums, loss.kind, loss.service_config)
        return self._call(f"training on {len(datums)} rows", call)

    def optim_step(self, **params: float) -> Mapping[str, float]:
        """One AdamW step with the gradient so far."""
        return self._call("the optimizer step", partial(sdk.optim_step, self._open(), **params))

    def checked(self, output: Any, datums: Sequence[Datum]) -> list[Floats]:
        """The log-probabilities of an answer; BackendError unless there is one for each target of each datum."""
        found = sdk.logprobs_of(output)
        if [len(values) for values in found] != [len(datum.targets_T) for datum in datums]:
            what = "the service returned log-probabilities of other lengths than the rows it was given"
            raise BackendError(Problem(where=safe_url(self.base_url), what=what, fix=SERVER_FIX))
        return found

    # ------------------------------------------------------------ saving

    def save_state(self, name: str, *, is_temporary: bool = False) -> str:
        """Store weights and optimizer on the service; returns their path."""
        return self._call("saving the state", partial(sdk.save_state, self._open(), name, is_temporary=is_temporary))

    def export_adapter(self, name: str) -> str:
        """Store the adapter for download; returns its path."""
        return self._call("exporting the adapter", partial(sdk.export_adapter, self._open(), name))

    def download_urls(self, path: str) -> dict[str, str]:
        """URLs of the files of an exported adapter, by name; a single archive has the name ""."""
        return self._call(f"asking for {path}", partial(sdk.download_urls, self._client, path, self.base_url))

    def refuse_closed(self) -> None:
        """BackendError if there is no training client: after `close`, or when a checkpoint failed to load."""
        self._open()

    # ------------------------------------------------------------ deadlines

    def _open(self) -> Any:
        if self._trainer is None:
            what = "there is no training client: the tinker backend is closed, or a checkpoint failed to load"
            raise BackendError(Problem(what=what, fix="create another one"))
        return self._trainer

    def _replace_trainer(self, trainer: Any) -> None:
        before, self._trainer, self._sampler = self._trainer, trainer, None
        if before is not None:
            sdk.release(self._client, before)

    def _call_at_start(self, doing: str, call: Callable[[], T]) -> T:
        return self._with_deadline(doing, call, self._options.connect_timeout_s, "connect_timeout_s")

    def _call(self, doing: str, call: Callable[[], T]) -> T:
        return self._with_deadline(doing, call, self._options.timeout_s, "timeout_s")

    def _with_deadline(self, doing: str, call: Callable[[], T], timeout_s: float, key: str) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"tinker: {doing}", daemon=True).start()
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():  # raised by the SDK, not by our deadline
                raise explained(error, doing, self.base_url) from error
            raise timed_out(doing, self.base_url, timeout_s, key) from None
        except Exception as error:
            raise explained(error, doing, self.base_url) from error


def _require_listener(base_url: str) -> None:
    """BackendError within seconds if nothing is listening: the SDK would retry for minutes."""
    import httpx

    try:
        httpx.get(f"{base_url.rstrip('/')}/api/v1/healthz", timeout=PROBE_S)
    except (httpx.ConnectError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise unreachable(base_url, str(error)) from error
    except httpx.HTTPError:  # slow or unusual, but something answers: the deadlines cover the rest
        return
