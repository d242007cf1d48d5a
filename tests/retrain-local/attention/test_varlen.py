from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen as torch_varlen

from retrain_local.attention import varlen
from retrain_local.attention.packed import PaddedAttend, Spans, dense_attention
from retrain_local.attention.varlen import Rows, VarlenAttend
from retrain_local.decoder import Scores

CPU = torch.device("cpu")


@st.composite
def spans(draw: st.DrawFn) -> Spans:
    """Segments of which some continue an earlier one that continues none."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
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
@given(spans=spans(), window=st.sampled_from([None, 1, 3, 8]))
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


def test_every_prefix_token_is_copied_once_for_each_segment_that_continues_it() -> None:
    copies = varlen._copies(Spans(lengths=(2, 1, 3, 1), prefixes=(-1, 0, -1, 0)), CPU)
    assert copies.index_M.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 0, 1, 6]
    assert copies.is_covering
    assert [[x.tolist() for x in pair] for pair in copies.by_times] == [
        [[2, 3, 4, 5, 6], [[4], [5], [6], [7], [10]]],
        [[0, 1], [[0, 2, 8], [1, 3, 9]]],
    ]


def test_copies_of_16_bit_gradients_are_added_in_fp32() -> None:
    children = 300
    spans = Spans(lengths=(1, *[1] * children), prefixes=(-1, *[0] * children))
    x = torch.zeros(spans.num_tokens, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    varlen._copies(spans, CPU).of(x).sum().backward()
    # one of its own and 300 of its children: added in bfloat16 it would stop at 256
    assert x.grad is not None
    assert x.grad[0].item() == torch.tensor(301.0).bfloat16().item()


def test_rows_say_where_each_ends() -> None:
    rows = Rows((3, 1, 4), (3, 6, 9), CPU)
    assert rows.query_ends.tolist() == [0, 3, 4, 8]
    assert rows.key_ends.tolist() == [0, 3, 9, 18]
    assert rows.query_ends.dtype is rows.key_ends.dtype is torch.int32
    assert (rows.max_queries, rows.max_keys) == (4, 9)
    assert Rows((1, 1), (1, 1), CPU).max_queries == 2


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
def test_what_flash_attention_lacks_is_padded(
    dtype: torch.dtype, size: int, value_size: int, given: dict[str, Any]
) -> None:
    spans = Spans(lengths=(4, 2), prefixes=(-1, 0))
    shapes = ((2, size), (1, size), (1, value_size))
    inputs = [torch.randn(6, *shape).to(dtype) for shape in shapes]
    scores = Scores(scale=0.3, **given)
    assert not varlen.flash_computes(inputs[0], inputs[2], scores)
    got = VarlenAttend(spans, CPU)(0, *inputs, scores)
    torch.testing.assert_close(got, PaddedAttend(spans, CPU)(0, *inputs, scores), rtol=0, atol=0)


def test_flash_attention_computes_the_usual() -> None:
    x = torch.zeros(3, 2, 128, dtype=torch.bfloat16)
    assert varlen.flash_computes(x, x, Scores(scale=1.0, window=4))


def test_a_cpu_is_refused() -> None:
    assert "runs on CUDA" in str(varlen.refusal(CPU))


def test_this_version_of_pytorch_takes_what_it_is_given() -> None:
    schema = torch.ops.torch_attn._varlen_attn_backward.default._schema
    given = len(varlen.BACKWARD_TAKES)
    assert [argument.name for argument in schema.arguments[:given]] == varlen.BACKWARD_TAKES
    assert all(argument.has_default_value() for argument in schema.arguments[given:])  # torch 2.15 adds `backend`
    x = torch.zeros(3, 2, 8)
    request = torch_varlen.AuxRequest(lse=True)
    inspect.signature(torch_varlen.varlen_attn).bind(
        x, x, x, x, x, 2, 2, return_aux=request, scale=1.0, window_size=(-1, 0), **varlen._options()
    )


@pytest.mark.parametrize(
    ("takes", "options"), [(lambda q, enable_gqa=False: None, {"enable_gqa": True}), (lambda q: None, {})]
)
def test_grouped_heads_are_announced_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, takes: Callable[..., None], options: dict[str, bool]
) -> None:
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
        inside = []

        def fail() -> None:
            with varlen._deterministic(True):
                inside.append(mode())
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        assert inside == [(True, False)]
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
    q, k, v = (torch.randn(5, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    rows = Rows((2, 3), (2, 3), CPU)
    out = varlen.attend_rows(q, k, v, rows, Scores(scale=0.5, window=4))
    out.sum().backward()
    varlen._options.cache_clear()
    lengths, options = seen["forward"]
    assert options == {"return_aux": torch_varlen.AuxRequest(lse=True), "scale": 0.5, "window_size": (3, 0)}
    assert lengths == (rows.query_ends, rows.key_ends, 3, 3)
    grad, *saved = seen["backward"][:6]
    assert torch.equal(grad, torch.ones(5, 4, 8))
    assert [x.shape for x in saved] == [q.shape, k.shape, v.shape, out.shape, (4, 5)]
    assert seen["backward"][6:10] == (rows.query_ends, rows.key_ends, 3, 3)
    is_causal, no_dropout, scale, window = seen["backward"][10:]
    assert (is_causal, scale, window, no_dropout.dtype) == (False, 0.5, [3, 0], torch.uint64)
    assert k.grad is not None
    assert v.grad is not None
    assert k.grad.unique().tolist() == [1.0]
    assert v.grad.unique().tolist() == [2.0]
