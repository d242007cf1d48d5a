"""Log-probabilities of sampled tokens straight from hidden states, in chunks: no tensor [tokens, vocabulary] exists.

Entropies are made in the same pass where a term needs their gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from retrain_local.memory.sizes import FUSED_CHUNK, LOGIT_CHUNK
from retrain_local.model.fused import proven

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
    faults_of = partial(softmax_faults, device=device, dtype=dtype, vocabulary=vocabulary)
    place = "retrain_local.training.head_triton:triton_softmax"
    return proven("the fused softmax of training", device, place, faults_of) or plain_softmax


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


def logprobs_and_entropies(
    hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Both of softmax(head(hidden) / temperature), in nats, fp32 [M]; the first is `head.selected_logprobs`.

    Memory is bounded as there: no tensor [tokens, vocabulary] exists.
    """
    if not len(tokens_M):
        nothing_M = hidden_MD.new_zeros(0, dtype=torch.float32)
        return nothing_M, nothing_M
    rows = max(1, LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"]) // vocabulary)
    logprobs_M, entropies_M = _LogprobsAndEntropies.apply(hidden_MD, tokens_M, head, temperature, rows)
    return logprobs_M, entropies_M


class _LogprobsAndEntropies(torch.autograd.Function):  # type: ignore[misc]
    """Both depend on a row's own hidden state alone, so both gradients are taken while the chunk's logits are there.

    By the logits z, d log p_t / dz = (onehot - p) / T and dH / dz_j = -p_j (log p_j + H) / T. The head runs once
    forward and twice backward, and two vectors of the hidden size are stored per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        tokens_M: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        wanted = ctx.needs_input_grad[0]
        values: tuple[list[Tensor], list[Tensor]] = [], []
        slopes: tuple[list[Tensor], list[Tensor]] = [], []
        for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
            chunk = hidden.detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits = head(chunk)
            found, slopes_MV = _values_and_slopes(logits.detach(), tokens, temperature)
            for at in range(2):
                values[at].append(found[at])
                if wanted:
                    slopes[at].extend(pulled_back(logits, slopes_MV[at], (chunk,), keep=at == 0))
        if wanted:
            ctx.save_for_backward(*map(torch.cat, slopes))
        return torch.cat(values[0]), torch.cat(values[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_logprobs_MD, of_entropies_MD = ctx.saved_tensors
        found_MD = of_logprobs_MD * gradients[0][:, None] + of_entropies_MD * gradients[1][:, None]
        return found_MD.to(of_logprobs_MD.dtype), None, None, None, None


def _values_and_slopes(
    logits_MV: Tensor, tokens_M: Tensor, temperature: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    scaled_MV = logits_MV.float()
    scaled_MV = torch.log_softmax(scaled_MV if temperature == 1.0 else scaled_MV / temperature, dim=-1)
    logprobs_M = scaled_MV.gather(1, tokens_M[:, None])[:, 0]
    p_MV = scaled_MV.exp()
    surprise_MV = torch.special.entr(p_MV)  # -p log p, 0 where p is
    entropies_M = surprise_MV.sum(-1)
    of_entropies_MV = surprise_MV.sub_(p_MV * entropies_M[:, None]).div_(temperature)
    of_logprobs_MV = p_MV.mul_(-1.0 / temperature)
    of_logprobs_MV.scatter_add_(1, tokens_M[:, None], p_MV.new_full((len(tokens_M), 1), 1.0 / temperature))
    dtype = logits_MV.dtype
    return (logprobs_M, entropies_M), (of_logprobs_MV.to(dtype), of_entropies_MV.to(dtype))
