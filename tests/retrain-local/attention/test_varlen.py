from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from retrain_local.attention import packed as padded
from retrain_local.attention import varlen
from retrain_local.attention.packed import PaddedAttend, Picks, Spans, dense_attention
from retrain_local.attention.varlen import Rows, VarlenAttend
from retrain_local.decoder import Scores
from tests.kit.dispatched import Dispatched
from tests.kit.shared import first_or_long

CPU = torch.device("cpu")


@st.composite
def some_spans(draw: st.DrawFn) -> Spans:
    """Segments of which some continue an earlier one that continues none."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    prefixes: list[int] = []
    for segment in range(len(lengths)):
        roots = [s for s in range(segment) if prefixes[s] < 0]
        prefixes.append(draw(st.sampled_from([-1, *roots])))
    return Spans(lengths=tuple(lengths), prefixes=tuple(prefixes))


def plain_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scores: Scores, *, exact: bool = True) -> Tensor:
    """What `attend_rows` promises, row by row: causal, the last query at the last key."""
    found = []
    for row in range(len(rows.query_ends) - 1):
        queries, keys, values = (
            x[int(ends[row]) : int(ends[row + 1])].transpose(0, 1)[None]
            for x, ends in ((q, rows.query_ends), (k, rows.key_ends), (v, rows.key_ends))
        )
        length, total = queries.shape[2], keys.shape[2]
        distance = (total - length + torch.arange(length))[:, None] - torch.arange(total)
        seen = (distance >= 0) & (distance < (scores.window or total))
        mask = torch.zeros(length, total).masked_fill(~seen, float("-inf"))
        found.append(dense_attention(queries, keys, values, mask, scores)[0].transpose(0, 1))
    return torch.cat(found)


def outcome(attend: Any, inputs: tuple[Tensor, ...], scores: Scores) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(0, *leaves, scores)
    return [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), leaves)]


@settings(max_examples=25, deadline=None)
@given(spans=some_spans(), window=st.sampled_from([None, 1, 3, 8]))
def test_prefixes_are_seen_and_get_their_gradient(spans: Spans, window: int | None) -> None:
    numbers = torch.Generator().manual_seed(0)
    sizes = ((4, 8), (2, 8), (2, 8))
    inputs = tuple(torch.randn(spans.num_tokens, *size, generator=numbers) for size in sizes)
    scores = Scores(scale=0.3, window=window)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "attend_rows", plain_rows)
        patch.setattr(varlen, "flash_computes", lambda *_: True)
        got = outcome(VarlenAttend(spans, CPU), inputs, scores)
    for one, other in zip(got, outcome(PaddedAttend(spans, CPU), inputs, scores), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_copies_of_16_bit_gradients_are_added_in_fp32() -> None:
    children = 300
    spans = Spans(lengths=(1, *[1] * children), prefixes=(-1, *[0] * children))
    x = torch.zeros(spans.num_tokens, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    varlen._copies(spans, CPU).of(x).sum().backward()
    # one of its own and 300 of its children: added in bfloat16 it would stop at 256
    assert x.grad[0].item() == torch.tensor(301.0).bfloat16().item()


@pytest.mark.parametrize(
    ("dtype", "size", "value_size", "given"),
    [
        (torch.float32, 8, 8, {}),
        (torch.bfloat16, 12, 12, {}),
        (torch.bfloat16, 264, 264, {}),
        (torch.bfloat16, 8, 16, {}),
        (torch.bfloat16, 8, 8, {"softcap": 3.0}),
        (torch.bfloat16, 8, 8, {"sinks_H": torch.zeros(2)}),
    ],
)
def test_what_flash_lacks_is_padded(dtype: torch.dtype, size: int, value_size: int, given: dict[str, Any]) -> None:
    spans = Spans(lengths=(4, 2), prefixes=(-1, 0))
    shapes = ((2, size), (1, size), (1, value_size))
    inputs = [torch.randn(6, *shape).to(dtype) for shape in shapes]
    scores = Scores(scale=0.3, **given)
    assert not varlen.flash_computes(inputs[0], inputs[2], scores)
    got = VarlenAttend(spans, CPU)(0, *inputs, scores)
    torch.testing.assert_close(got, PaddedAttend(spans, CPU)(0, *inputs, scores), rtol=0, atol=0)


def test_this_version_of_pytorch_takes_what_it_is_given() -> None:
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    given = len(varlen.BACKWARD_TAKES)
    assert [argument.name for argument in schema.arguments[:given]] == varlen.BACKWARD_TAKES
    assert all(argument.has_default_value() for argument in schema.arguments[given:])  # torch 2.15 adds `backend`
    assert "runs on CUDA" in str(varlen.refusal(CPU))
    x = torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    assert varlen.flash_computes(x, x, Scores(scale=1.0, window=4))
    assert Rows((1, 1), (1, 1), CPU).max_queries == 2
    request = torch_varlen.AuxRequest(lse=True)
    inspect.signature(torch_varlen.varlen_attn).bind(
        x, x, x, x, x, 2, 2, return_aux=request, scale=1.0, window_size=(-1, 0), **varlen._options()
    )


@pytest.mark.parametrize(
    ("takes", "options"), [(lambda q, enable_gqa=False: None, {"enable_gqa": True}), (lambda q: None, {})]
)
def test_grouped_heads(monkeypatch: pytest.MonkeyPatch, takes: Callable[..., None], options: dict[str, bool]) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", takes)
    varlen._options.cache_clear()
    assert varlen._options() == options
    varlen._options.cache_clear()


@pytest.mark.parametrize("before", [(False, False), (True, True), (True, False)])
def test_the_deterministic_mode_is_left_as_it_was(before: tuple[bool, bool]) -> None:
    def mode() -> tuple[bool, bool]:
        return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()

    outside = mode()
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with suppress(KeyError), varlen._deterministic(True):
            assert mode() == (True, False)
            raise KeyError
        assert mode() == before
        with varlen._deterministic(False):
            assert mode() == before
    finally:
        torch.use_deterministic_algorithms(outside[0], warn_only=outside[1])


def test_forward_and_backward_hand_over_what_belongs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself runs on CUDA alone: here a stand-in with its signature notes what it is given."""
    seen: dict[str, Any] = {}

    def forward(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> tuple[Tensor, Tensor]:
        seen["forward"] = (lengths, options)
        return q * 2, torch.full((q.shape[1], len(q)), 7.0)

    def backward(*given: Any) -> tuple[Tensor, ...]:
        seen["backward"] = given
        return given[1] * 0, given[2] * 0 + 1, given[3] * 0 + 2

    monkeypatch.setattr(torch_varlen, "varlen_attn", forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    varlen._options.cache_clear()
    q, k, v = (torch.randn(length, heads, 8, requires_grad=True) for length, heads in ((5, 4), (7, 2), (7, 2)))
    rows = Rows((2, 3), (2, 5), CPU)
    out = varlen.attend_rows(q, k, v, rows, Scores(scale=0.5, window=4))
    out.sum().backward()
    varlen._options.cache_clear()
    lengths, options = seen["forward"]
    assert [ends.tolist() for ends in lengths[:2]] == [[0, 2, 5], [0, 2, 7]]
    assert lengths[0].dtype is lengths[1].dtype is torch.int32
    assert options == {"return_aux": torch_varlen.AuxRequest(lse=True), "scale": 0.5, "window_size": (3, 0)}
    assert lengths == (rows.query_ends, rows.key_ends, 3, 5)
    grad, *saved = seen["backward"][:6]
    assert torch.equal(grad, torch.ones(5, 4, 8))
    assert [x.shape for x in saved] == [q.shape, k.shape, v.shape, out.shape, (4, 5)]
    assert seen["backward"][6:10] == (rows.query_ends, rows.key_ends, 3, 5)
    is_causal, no_dropout, scale, window = seen["backward"][10:]
    assert (is_causal, scale, window, no_dropout.dtype) == (False, 0.5, [3, 0], torch.uint64)
    assert k.grad.unique().tolist() == [1.0]
    assert v.grad.unique().tolist() == [2.0]


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
@given(spans=some_spans(), seed=st.integers(0, 2**31), fewest=st.sampled_from([1, 3, 64]))
@settings(max_examples=25, deadline=None)
def test_output_and_gradients_are_those_of_the_definition(scores: Scores, spans: Spans, seed: int, fewest: int) -> None:
    given_ = torch.Generator().manual_seed(seed)

    def drawn(heads: int, size: int) -> Tensor:
        x = torch.randn(spans.num_tokens, heads, size, generator=given_, dtype=torch.float64)
        return x.requires_grad_()

    inputs = drawn(4, 8), drawn(2, 8), drawn(2, 6 if scores.softcap else 8)
    wanted = written_out(spans, *inputs, scores)
    with patch.object(padded, "FEWEST_QUERIES", fewest):
        found = PaddedAttend(spans, CPU)(0, *inputs, scores)
    tolerance = 1e-5 if scores.softcap or scores.sinks_H is not None else 1e-9  # those make their weights in fp32
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    weight = torch.randn(found.shape, generator=given_, dtype=torch.float64)
    gradients = zip(
        torch.autograd.grad(found, inputs, weight), torch.autograd.grad(wanted, inputs, weight), strict=True
    )
    for mine, theirs in gradients:
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=tolerance)


def test_buckets_are_of_like_lengths_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(spans: Spans) -> list[tuple[int, ...]]:
        return [tuple(bucket.index_ST.shape) for bucket in PaddedAttend(spans, CPU)._buckets]

    assert shapes(Spans.apart([100, 95, 20, 19, 3])) == [(2, 100), (2, 20), (1, 3)]
    monkeypatch.setattr(padded, "MASK_ELEMENTS", 200)
    assert shapes(Spans(lengths=(5, *[10] * 6), prefixes=(-1, *[0] * 6))) == [(1, 5), *[(1, 10)] * 6]
    spans = Spans(lengths=(2, 3, 1, 2), prefixes=(-1, 0, 0, -1))
    assert (spans.positions().tolist(), spans.starts) == ([0, 1, 2, 3, 4, 2, 0, 1], (0, 2, 5, 6, 8))


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(1, 9), chosen=st.lists(st.integers(0, 8), min_size=1, max_size=40))
def test_rows_and_gradient_are_those_of_index_select(num_rows: int, chosen: list[int]) -> None:
    index_M = np.array([row % num_rows for row in chosen])
    numbers = torch.Generator().manual_seed(0)
    ours = torch.randn(num_rows, 2, 3, generator=numbers, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.randn(len(chosen), 2, 3, generator=numbers)
    got, wanted = Picks(index_M, num_rows, CPU).of(ours), theirs.index_select(0, torch.from_numpy(index_M))
    assert torch.equal(got, wanted)
    (got * weights).sum().backward()
    (wanted * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("times", [2, 16, 64])
def test_no_operation_adds_in_arbitrary_order_and_their_number_does_not_grow(times: int) -> None:
    """A prompt of five tokens whose copies are followed by rows of their own, as in a pack of a group."""
    index_M = np.concatenate([np.concatenate([np.arange(5), 5 + at + np.zeros(1, int)]) for at in range(times)])
    x = torch.randn(5 + times, 4, requires_grad=True)
    out = Picks(index_M, 5 + times, CPU).of(x)
    with Dispatched() as called:
        torch.autograd.backward(out, torch.ones_like(out))
    assert not {"index_add", "index_add_", "index_put_", "scatter_add_", "index_put"} & set(called.names)
    launches = [name for name in called.names if name not in ("detach", "view", "flatten", "unflatten", "_unsafe_view")]
    assert len(launches) <= 10
