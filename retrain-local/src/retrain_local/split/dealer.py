"""Several engines as one: each samples its share of the requests, on its own device and in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue

from retrain.api import Deliver, DeliversEarly, Engine, Measuring, Publishing, Sample, SampleRequest, SamplingParams

Drawn = list[list[Sample]]


class TornError(BaseException):
    """Ends an engine whose samples nobody waits for any more; it never leaves this module."""


class Torn(threading.Event):
    """Set when sampling is given up."""

    def check(self) -> None:
        """End here if it was: the `check_stop` of an engine's context."""
        if self.is_set():
            raise TornError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seat:
    """An engine, and what its thread enters while it works: its device, its number of CPU threads."""

    engine: Engine
    at_work: Callable[[], AbstractContextManager[None]]


class Dealer:
    """An `Engine` made of several. Request i goes to number i modulo how many there are: speed decides nothing."""

    delivers_early = True

    def __init__(self, seats: Sequence[Seat], torn: Torn) -> None:
        self._seats = tuple(seats)
        self._torn = torn
        self._threads = ThreadPoolExecutor(len(seats), thread_name_prefix="sampling")

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> Drawn:
        """See `Engine.sample`; of several errors that of the first engine is raised, when all have ended."""
        arrived: SimpleQueue[tuple[int, int, Sample] | None] = SimpleQueue()  # None: an engine has ended
        shares = [range(number, len(requests), len(self._seats)) for number in range(len(self._seats))]

        def work(seat: Seat, share: range) -> Drawn:
            def take(group: int, index: int, sample: Sample) -> None:
                self._torn.check()
                arrived.put((share[group], index, sample))

            with seat.at_work():
                return sample_with(seat.engine, [requests[number] for number in share], params, take)

        self._torn.clear()
        working: list[Future[Drawn]] = []
        try:
            for seat, share in zip(self._seats, shares, strict=True):
                working.append(self._threads.submit(work, seat, share))
                working[-1].add_done_callback(lambda _: arrived.put(None))
            ended = 0
            while ended < len(working):
                if (each := arrived.get()) is None:
                    ended += 1
                elif deliver is not None:
                    deliver(*each)
        except BaseException:
            self._torn.set()
            raise
        finally:
            wait(working)
        drawn = [iter(each.result()) for each in working]
        return [next(drawn[number % len(drawn)]) for number in range(len(requests))]

    def publish(self) -> None:
        """Bring every engine that keeps a copy of the policy to its new version."""
        for seat in self._seats:
            if isinstance(seat.engine, Publishing):
                with seat.at_work():
                    seat.engine.publish()

    def metrics(self) -> Mapping[str, float]:
        """What the engines measured, each field as a mean over those that have it."""
        found: dict[str, list[float]] = {}
        for seat in self._seats:
            fields = seat.engine.metrics() if isinstance(seat.engine, Measuring) else {}
            for name, value in fields.items():
                found.setdefault(name, []).append(value)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def close(self) -> None:
        """Close the engines and end the threads; safe to call twice."""
        self._threads.shutdown()
        for seat in self._seats:
            seat.engine.close()


def sample_with(
    engine: Engine, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None
) -> Drawn:
    """What an engine samples; `deliver` gets each completion early if the engine can do that."""
    if not requests:
        return []
    if deliver is not None and isinstance(engine, DeliversEarly) and engine.delivers_early:
        return engine.sample(requests, params, deliver)
    return engine.sample(requests, params)
