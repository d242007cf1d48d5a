"""Streaming of tokens, and requests that join while others are answered: for a chat or a server, not for a run.

Both are optional. `stream_from` works with every backend and engine: one without `stream` delivers whole completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from retrain.kernel.contracts.backend import Backend, DeliversEarly, Engine
from retrain.kernel.types import ActionRow, Floats, Sample, SampleRequest, SamplingParams, Tokens


class Feed(Protocol):
    """Takes the tokens of a stream, and supplies further requests."""

    def take(self, request: int, place: int, piece: Sample, *, is_done: bool) -> bool:
        """The tokens of one completion since the last call; False ends the completion here, to save the work.

        `request` and `place` are as in `Deliver`. `piece.stop_reason` means something if `is_done`.
        """

    def more(self) -> Sequence[SampleRequest]:
        """Requests that have arrived since the last call; they are numbered on."""


@runtime_checkable
class StreamsTokens(Protocol):
    """An engine or backend that hands over tokens before their completion has ended."""

    def stream(self, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed) -> None:
        """Sample until every completion has ended and `feed.more` has nothing; `feed` is called in this thread.

        The completions are the same as from `sample`, unless `feed` ends them.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopLogprobs:
    """Log-probabilities of a row's action tokens, and the K likeliest in each one's place; for others 0, ids of -1."""

    logprobs_T: Floats
    top_ids_TK: Tokens
    top_logprobs_TK: Floats


@runtime_checkable
class RanksTokens(Protocol):
    """A backend that can list the likeliest alternatives to a token."""

    def top_logprobs(self, rows: Sequence[ActionRow], temperature: float, top: int) -> list[TopLogprobs]:
        """One per row, of the trained policy at that temperature."""


@runtime_checkable
class ServedElsewhere(Protocol):
    """An engine or backend whose policy is on servers that other programs can use, too."""

    def addresses(self) -> Sequence[tuple[str, str]]:
        """Base URL and name of the model, once per server; empty without a server."""


def stream_from(
    source: Backend | Engine, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed
) -> None:
    """`StreamsTokens.stream` of a backend or engine, or whole completions, each as soon as it is delivered."""
    if isinstance(source, StreamsTokens):
        source.stream(requests, params, feed)
        return
    first = 0
    while requests:
        _hand_over_whole(source, requests, params, feed, first)
        first += len(requests)
        requests = feed.more()


def _hand_over_whole(
    source: Backend | Engine, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed, first: int
) -> None:
    waiting = {(request, place) for request, each in enumerate(requests) for place in range(len(each.seeds_G))}

    def deliver(request: int, place: int, sample: Sample) -> None:
        waiting.discard((request, place))
        feed.take(first + request, place, sample, is_done=True)

    if isinstance(source, DeliversEarly) and source.delivers_early:
        groups = source.sample(requests, params, deliver)
    else:
        groups = source.sample(requests, params)
    for request, place in sorted(waiting):
        deliver(request, place, groups[request][place])
