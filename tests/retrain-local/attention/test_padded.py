"""Attention over packed rows against every score written out over the whole packed row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain_local.attention import packed as padded
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Scores
from tests.kit.shared import first_or_long

CPU = torch.device("cpu")


@st.composite
def some_spans(draw: st.DrawFn) -> Spans:
    lengths: list[int] = []
    prefixes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        lengths.append(draw(st.integers(1, 9)))
        prefixes.append(-1)
        prompt = len(lengths) - 1
        for length in draw(st.lists(st.integers(1, 14), max_size=4)):
            lengths.append(length)
            prefixes.append(prompt)
    return Spans(lengths=tuple(lengths), prefixes=tuple(prefixes))


def visible(spans: Spans, window: int | None) -> Tensor:
    """Which token sees which, from the definition."""
    starts, positions = spans.starts, torch.from_numpy(spans.positions())
    seen = torch.zeros(spans.num_tokens, spans.num_tokens, dtype=torch.bool)
    for s, (length, prefix) in enumerate(zip(spans.lengths, spans.prefixes, strict=True)):
        own = slice(starts[s], starts[s + 1])
        seen[own, own] = torch.ones(length, length).tril().bool()
        if prefix >= 0:
            seen[own, starts[prefix] : starts[prefix + 1]] = True
    return seen if window is None else seen & (positions[:, None] - positions[None, :] < window)


def written_out(spans: Spans, queries: Tensor, keys: Tensor, values: Tensor, scores: Scores) -> Tensor:
    group = queries.shape[1] // keys.shape[1]
    weights = torch.einsum("nhd,mhd->hnm", queries, keys.repeat_interleave(group, 1)) * scores.scale
    if scores.softcap is not None:
        weights = scores.softcap * torch.tanh(weights / scores.softcap)
    weights = weights.masked_fill(~visible(spans, scores.window), -math.inf)
    if scores.sinks_H is not None:
        weights = torch.cat([weights, scores.sinks_H.view(-1, 1, 1).expand(-1, spans.num_tokens, 1)], dim=-1)
    weights = weights.softmax(-1)[..., : spans.num_tokens]
    return torch.einsum("hnm,mhd->nhd", weights, values.repeat_interleave(group, 1))


@pytest.mark.parametrize(
    "scores",
    first_or_long(
        [
            Scores(scale=0.4),
            Scores(scale=0.4, window=3),
            Scores(scale=0.4, softcap=2.0),
            Scores(scale=0.4, sinks_H=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64), window=5),
        ]
    ),
    ids=["plain", "window", "softcap", "sinks"],
)
@given(spans=some_spans(), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_output_and_gradients_are_those_of_the_definition(scores: Scores, spans: Spans, seed: int) -> None:
    given_ = torch.Generator().manual_seed(seed)

    def drawn(heads: int, size: int) -> Tensor:
        x = torch.randn(spans.num_tokens, heads, size, generator=given_, dtype=torch.float64)
        return x.requires_grad_()

    inputs = drawn(4, 8), drawn(2, 8), drawn(2, 6 if scores.softcap else 8)
    found, wanted = PaddedAttend(spans, CPU)(0, *inputs, scores), written_out(spans, *inputs, scores)
    tolerance = 1e-5 if scores.softcap or scores.sinks_H is not None else 1e-9  # those make their weights in fp32
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    weight = torch.randn(found.shape, generator=given_, dtype=torch.float64)
    gradients = zip(
        torch.autograd.grad(found, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True
    )
    for mine, theirs in gradients:
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_segments_far_apart_in_length_share_no_bucket() -> None:
    spans = Spans.apart([100, 95, 20, 19, 3])
    sizes = [bucket.index_ST.shape for bucket in PaddedAttend(spans, CPU)._buckets]
    assert sizes == [(2, 100), (2, 20), (1, 3)]


def test_a_bucket_is_bounded_however_many_segments_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "MASK_ELEMENTS", 200)
    spans = Spans(lengths=(5, *[10] * 6), prefixes=(-1, *[0] * 6))
    shapes = [bucket.index_ST.shape for bucket in PaddedAttend(spans, CPU)._buckets]
    assert shapes == [(1, 5), *[(1, 10)] * 6]


def test_positions_continue_those_of_the_prefix() -> None:
    spans = Spans(lengths=(2, 3, 1, 2), prefixes=(-1, 0, 0, -1))
    assert spans.positions().tolist() == [0, 1, 2, 3, 4, 2, 0, 1]
    assert spans.starts == (0, 2, 5, 6, 8)
