"""Split mode: the configured engine once for each device that samples, while another device trains."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from statistics import fmean

from pydantic import BaseModel, ValidationError

from retrain.api import (
    ConfigError,
    Deliver,
    DeliversEarly,
    Engine,
    Found,
    Kind,
    Measuring,
    PluginContext,
    Problem,
    Publishing,
    Sample,
    SampleRequest,
    SamplingParams,
    resolve,
)
from retrain_local.checks import ENGINE, foreign_engine
from retrain_local.devices.torch_devices import Devices, working_on
from retrain_local.model.pair import LocalPolicy

Drawn = list[list[Sample]]


class SamplingCancelledError(BaseException):
    """Stops an engine whose samples are not needed any more; never leaves this module."""


class Cancellation(threading.Event):
    def __init__(self, check_stop: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._check_stop = check_stop

    def check(self) -> None:
        if self.is_set():
            raise SamplingCancelledError
        self._check_stop()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceEngine:
    """An engine, and the context of its thread: its device and its number of CPU threads."""

    engine: Engine
    on_device: Callable[[], AbstractContextManager[None]]


class ParallelEngine:
    """Several engines behind one `Engine`. Request i goes to engine i mod n, whatever the speed of each."""

    delivers_early = True

    def __init__(self, engines: Sequence[DeviceEngine], cancellation: Cancellation) -> None:
        self._engines = tuple(engines)
        self._cancellation = cancellation
        self._threads = ThreadPoolExecutor(len(engines), thread_name_prefix="sampling")

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> Drawn:
        """Sample; when several engines fail, the error of the first is raised once all have stopped."""
        arrived: SimpleQueue[tuple[int, int, Sample] | None] = SimpleQueue()  # None: an engine is done
        shares = [range(number, len(requests), len(self._engines)) for number in range(len(self._engines))]

        def work(worker: DeviceEngine, share: range) -> Drawn:
            def take(group: int, index: int, sample: Sample) -> None:
                self._cancellation.check()
                arrived.put((share[group], index, sample))

            with worker.on_device():
                return sample_with(worker.engine, [requests[number] for number in share], params, take)

        self._cancellation.clear()
        working: list[Future[Drawn]] = []
        try:
            for worker, share in zip(self._engines, shares, strict=True):
                working.append(self._threads.submit(work, worker, share))
                working[-1].add_done_callback(lambda _: arrived.put(None))
            ended = 0
            while ended < len(working):
                if (each := arrived.get()) is None:
                    ended += 1
                elif deliver is not None:
                    deliver(*each)
        except BaseException:
            self._cancellation.set()
            raise
        finally:
            wait(working)
        failures = [error for each in working if (error := each.exception()) is not None]
        for error in failures:
            if not isinstance(error, SamplingCancelledError):
                raise error
        drawn = [iter(each.result()) for each in working]
        return [next(drawn[number % len(drawn)]) for number in range(len(requests))]

    def publish(self) -> None:
        for worker in self._engines:
            if isinstance(worker.engine, Publishing):
                with worker.on_device():
                    worker.engine.publish()

    def metrics(self) -> Mapping[str, float]:
        """Return each measurement averaged over the engines that report it."""
        found: dict[str, list[float]] = {}
        for worker in self._engines:
            for name, value in worker.engine.metrics().items() if isinstance(worker.engine, Measuring) else ():
                found.setdefault(name, []).append(value)
        return {name: fmean(values) for name, values in found.items()}

    def close(self) -> None:
        self._threads.shutdown()
        for worker in self._engines:
            worker.engine.close()


def sample_with(
    engine: Engine, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None
) -> Drawn:
    """Sample from an engine; `deliver` gets each completion early if the engine delivers early."""
    if not requests:
        return []
    if deliver is not None and isinstance(engine, DeliversEarly) and engine.delivers_early:
        return engine.sample(requests, params, deliver)
    return engine.sample(requests, params)


def find_engine(context: PluginContext, devices: Devices) -> Found:
    config = context.config
    name, where = config.inference.engine, config.place("inference.engine")
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, name, where=where, search_paths=config.plugins.search_paths)
    if (devices.is_split or devices.ranks) and name != ENGINE:
        raise ConfigError(foreign_engine(config))
    return found


def _engine_params(context: PluginContext, found: Found) -> BaseModel | None:
    """Validate `[inference] options` by the model that the engine declares; ConfigError when they do not fit."""
    options: dict[str, object] = context.config.inference.options
    where = context.config.place("inference.options")
    try:
        return found.params.model_validate(options) if found.params else None
    except ValidationError as error:
        problems = []
        fix = f"use one of: {', '.join(found.params.model_fields)}" if found.params else "remove it"
        for detail in error.errors():
            place, message = ".".join(map(str, [where, *detail["loc"]])), detail["msg"]
            problems.append(Problem(code="engine.bad-option", where=place, what=f"invalid option: {message}", fix=fix))
        raise ConfigError(*problems) from None


def create_engine(context: PluginContext, found: Found, policies: Sequence[LocalPolicy], threads: int) -> Engine:
    context = replace(context, params=_engine_params(context, found))
    if len(policies) == 1:
        engine: Engine = found.target(context, policies[0])
        return engine
    cancellation = Cancellation(context.check_stop)
    engines = []
    for policy in policies:
        on_device = partial(working_on, policy.device, threads)
        with on_device():
            engine = found.target(replace(context, check_stop=cancellation.check), policy)
        engines.append(DeviceEngine(engine=engine, on_device=on_device))
    return ParallelEngine(engines, cancellation)
