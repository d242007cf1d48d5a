"""Log-probabilities of sampled tokens straight from hidden states, in chunks: no tensor [tokens, vocabulary] exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain_local.model.fused import proven
from retrain_local.sizes import FUSED_CHUNK, LOGIT_CHUNK

ROWS = 3
SLOPE_TOLERANCE = 1e-2  # of the largest element: two units in the last place of bf16


class Softmax(Protocol):
    """log softmax(logits / temperature) at one token per row, fp32 [M], and its derivative by the logits.

    The slope is (onehot - softmax) / temperature, [M, V] in the dtype of the logits; without `slope` it means nothing.
    """

    def __call__(
        self, logits_MV: Tensor, tokens_M: Tensor, temperature: float, slope: bool, /
    ) -> tuple[Tensor, Tensor]:
        """Both."""


class _SelectedLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """log softmax(head(hidden) / temperature) at one token per row, in fp32.

    The log-probability of a row depends on its own hidden state alone. Its gradient, the head's backward pass of
    (onehot - softmax) / temperature, is therefore computed in the forward pass while the chunk's logits are available:
    the head runs once in each direction, and one vector of the hidden size is stored per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        tokens_M: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        rows: int,
        softmax: Softmax,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0]
        logprobs, slopes = list[Tensor](), list[Tensor]()
        for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
            chunk = hidden.detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits = head(chunk)
            found_M, slope_MV = softmax(logits.detach(), tokens, temperature, wanted)
            logprobs.append(found_M)
            if wanted:
                slopes += pulled_back(logits, slope_MV, (chunk,))
        if wanted:
            ctx.save_for_backward(torch.cat(slopes))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (slopes_MD,) = ctx.saved_tensors
        return (slopes_MD * gradients[0][:, None]).to(slopes_MD.dtype), None, None, None, None, None


class _TrainedHeadLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """The same where the head is trained: its gradient sums over rows, each weighted by what comes back to it.

    So the chunk's logits are made once more in the backward pass, and none are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        tokens_M: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        rows: int,
        softmax: Softmax,
        *parameters: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(hidden_MD, tokens_M)
        ctx.given = head, temperature, rows, softmax, parameters
        chunks = zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True)
        return torch.cat([softmax(head(hidden), tokens, temperature, False)[0] for hidden, tokens in chunks])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_MD, tokens_M), (head, temperature, rows, softmax, parameters) = ctx.saved_tensors, ctx.given
        of_hidden: list[Tensor] = []
        of_parameters: list[Tensor] = []
        chunks = zip(hidden_MD.split(rows), tokens_M.split(rows), gradients[0].split(rows), strict=True)
        for hidden, tokens, back_M in chunks:
            chunk = hidden.detach().requires_grad_()
            with torch.enable_grad():
                logits = head(chunk)
            _, slope_MV = softmax(logits.detach(), tokens, temperature, True)
            slope_MV = slope_MV.mul_(back_M[:, None].to(slope_MV.dtype))
            found, *sums = pulled_back(logits, slope_MV, (chunk, *parameters))
            of_hidden.append(found)
            of_parameters = [a.add_(b) for a, b in zip(of_parameters, sums, strict=True)] if of_parameters else sums
        return torch.cat(of_hidden), None, None, None, None, None, *of_parameters


class _Seeded(torch.autograd.Function):  # type: ignore[misc]
    """A zero whose gradient with respect to `logits` is `slope`.

    Passing `slope` to torch.autograd.grad would give the same result, but imports sympy: half a second in the first
    step.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return slope.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def pulled_back(
    logits_MV: Tensor, slope_MV: Tensor, inputs: Sequence[Tensor], *, keep: bool = False
) -> tuple[Tensor, ...]:
    """The gradients of (logits * slope) summed, slope held fixed, by the inputs; `keep` the graph for another slope."""
    with torch.enable_grad():
        seeded = _Seeded.apply(logits_MV, slope_MV)
    gradients: tuple[Tensor, ...] = torch.autograd.grad(seeded, inputs, retain_graph=keep)
    return gradients


def plain_softmax(logits_MV: Tensor, tokens_M: Tensor, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
    """See `Softmax`."""
    scaled = logits_MV.float()
    scaled = torch.log_softmax(scaled if temperature == 1.0 else scaled / temperature, dim=-1)
    logprobs_M = scaled.gather(1, tokens_M[:, None])[:, 0]
    if not slope:
        return logprobs_M, logits_MV
    slope_MV = scaled.exp_().mul_(-1.0 / temperature)
    slope_MV.scatter_add_(1, tokens_M[:, None], slope_MV.new_full((len(tokens_M), 1), 1.0 / temperature))
    return logprobs_M, slope_MV.to(logits_MV.dtype)


def softmax_of(device: torch.device, dtype: torch.dtype, vocabulary: int) -> Softmax:
    """The fused kernel where this device has it and it agrees with PyTorch's operations on a few rows, else those."""

    def make() -> Softmax:
        from retrain_local.training.head_triton import triton_softmax

        return triton_softmax

    faults_of = partial(softmax_faults, device=device, dtype=dtype, vocabulary=vocabulary)
    return proven("the fused softmax of training", device, make, faults_of) or plain_softmax


def softmax_faults(softmax: Softmax, *, device: torch.device, dtype: torch.dtype, vocabulary: int) -> Iterator[str]:
    """Where this differs from PyTorch's operations: on logits of any size, some of them -inf, and on the last token."""
    numbers = torch.sin(torch.arange(ROWS * vocabulary, device=device, dtype=torch.float64) * 1.7)
    logits = (12.0 * numbers).view(ROWS, vocabulary).to(dtype)
    logits[1, : vocabulary // 2] = -torch.inf
    tokens = torch.arange(vocabulary - ROWS, vocabulary, device=device)
    for temperature in (1.0, 0.7):
        (got_M, got_MV), (wanted_M, wanted_MV) = (
            do(logits, tokens, temperature, True) for do in (softmax, plain_softmax)
        )
        # apart: the slope of the token is about 1, that of all others one part in as many as there are
        column = tokens[:, None]
        pairs = (
            ("value", got_M, wanted_M, 1e-4),
            ("slope", got_MV.gather(1, column), wanted_MV.gather(1, column), SLOPE_TOLERANCE),
            ("slope of the others", got_MV.scatter(1, column, 0.0), wanted_MV.scatter(1, column, 0.0), SLOPE_TOLERANCE),
        )
        for name, got, wanted, tolerance in pairs:
            gap, largest = float((got - wanted).abs().max()), float(wanted.abs().max())
            if not gap <= tolerance * largest:  # True for a NaN as well
                yield f"{name} off by {gap:.2g}, of {largest:.2g} at most"


def selected_logprobs(
    hidden_MD: Tensor,
    tokens_M: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    temperature: float,
    softmax: Softmax = plain_softmax,
    parameters: tuple[nn.Parameter, ...] = (),
) -> Tensor:
    """Natural log-probability of each token under softmax(head(hidden) / temperature), fp32 [M], differentiable.

    `head` turns hidden states [m, hidden] into logits [m, vocabulary], each row by itself; `parameters` are what is
    trained of it. Memory is bounded by `LOGIT_CHUNK` logits (`FUSED_CHUNK` with a fused `softmax`), whatever M and the
    vocabulary are (Liger kernels, arXiv:2410.10989, chunk the same way; here the log-probabilities are an output, so
    that any loss can follow).
    """
    if not len(tokens_M):
        return hidden_MD.new_zeros(0, dtype=torch.float32)
    plain = LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"])
    rows = max(1, (plain if softmax is plain_softmax else FUSED_CHUNK) // vocabulary)
    function = _TrainedHeadLogprobs if parameters else _SelectedLogprobs
    result: Tensor = function.apply(hidden_MD, tokens_M, head, temperature, rows, softmax, *parameters)
    return result


def ranked_logprobs(
    hidden_MD: Tensor,
    tokens_M: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    temperature: float,
    top: int,
) -> Tensor:
    """As `selected_logprobs`, no gradient: [M, 1 + 2 top] in fp64, a token's own, then the likeliest and their ids."""
    rows = max(1, LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"]) // vocabulary)
    parts = [hidden_MD.new_zeros(0, 1 + 2 * top, dtype=torch.float64)]
    for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
        logprobs_MV = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        best = logprobs_MV.topk(min(top, logprobs_MV.shape[1]), dim=-1)
        parts.append(torch.cat([logprobs_MV.gather(1, tokens[:, None]), best.values, best.indices], dim=1).double())
    return torch.cat(parts)
