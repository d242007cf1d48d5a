"""Log-probabilities and entropies of sampled tokens from hidden states, in chunks: no tensor [tokens, vocabulary]."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from retrain_local.devices.kernel_trials import difference, numbers, proven
from retrain_local.memory.sizes import FUSED_CHUNK, LOGIT_CHUNK

ROWS = 3
# Relative to the largest element: two units in the last place of bf16.
SLOPE_TOLERANCE = 1e-2


# From logits [M, V], tokens [M], temperature: log softmax(logits / temperature) at one token per row, fp32 [M], and its
# slope by the logits, (onehot - softmax) / temperature, [M, V] in their dtype; undefined unless the last is True.
Softmax = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
# Numbers of each row, [M] each, and their derivatives by the logits, [M, V] each; arguments as for `Softmax`.
Outputs = Callable[[Tensor, Tensor, float, bool], tuple[Sequence[Tensor], Sequence[Tensor]]]


class _HeadOutputs(torch.autograd.Function):  # type: ignore[misc]
    """Numbers of the rows of head(hidden), in fp32.

    They depend on a row's hidden state only. So their gradients, the head's backward pass of the slopes, are computed
    in the forward pass while the chunk's logits are available: the head runs once forward and once backward for each
    number, and for each a vector of the hidden size is stored per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        tokens_M: Tensor,
        head: Callable[[Tensor], Tensor],
        temperature: float,
        rows: int,
        outputs: Outputs,
    ) -> tuple[Tensor, ...]:
        wanted = ctx.needs_input_grad[0]
        values, slopes = list[Sequence[Tensor]](), list[list[Tensor]]()
        for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
            chunk = hidden.detach().requires_grad_(wanted)
            with torch.set_grad_enabled(wanted):
                logits = head(chunk)
            found, slopes_MV = outputs(logits.detach(), tokens, temperature, wanted)
            values.append(found)
            if wanted:
                last = len(slopes_MV) - 1
                pulled = (pulled_back(logits, s, (chunk,), keep=at < last) for at, s in enumerate(slopes_MV))
                slopes.append([each[0] for each in pulled])
        if wanted:
            ctx.save_for_backward(*map(torch.cat, zip(*slopes, strict=True)))
        return tuple(map(torch.cat, zip(*values, strict=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        slopes = ctx.saved_tensors
        weighed = (slope_MD * back_M[:, None] for slope_MD, back_M in zip(slopes, gradients, strict=True))
        return reduce(torch.add, weighed).to(slopes[0].dtype), None, None, None, None, None


class _TrainedHeadLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """Log-probabilities where the head is trained: the chunk's logits are computed again in the backward pass."""

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

    Passing `slope` to torch.autograd.grad gives the same result, but imports sympy: half a second in the first step.
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
    """Return the gradients of sum(logits * slope), slope held fixed, by the inputs; `keep` the graph for another."""
    with torch.enable_grad():
        seeded = _Seeded.apply(logits_MV, slope_MV)
    return tuple(torch.autograd.grad(seeded, inputs, retain_graph=keep))


def plain_softmax(logits_MV: Tensor, tokens_M: Tensor, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
    scaled = logits_MV.float()
    scaled = scaled if temperature == 1.0 else scaled / temperature
    # log_softmax in steps that the slope goes on from: by itself it takes longer than all of them on a CPU
    scaled = scaled - scaled.amax(-1, keepdim=True)
    chosen_M1 = scaled.gather(1, tokens_M[:, None])
    total_M1 = scaled.exp_().sum(-1, keepdim=True)
    logprobs_M = (chosen_M1 - total_M1.log())[:, 0]
    if not slope:
        return logprobs_M, logits_MV
    slope_MV = scaled.mul_(total_M1.mul_(temperature).reciprocal_().neg_())
    slope_MV.scatter_add_(1, tokens_M[:, None], slope_MV.new_full((len(tokens_M), 1), 1.0 / temperature))
    return logprobs_M, slope_MV.to(logits_MV.dtype)


def softmax_of(device: torch.device, dtype: torch.dtype, vocabulary: int) -> Softmax:
    faults_of = partial(softmax_faults, device=device, dtype=dtype, vocabulary=vocabulary)
    place = "retrain_local.training.head_triton:triton_softmax"
    return proven("the fused softmax of training", device, place, faults_of) or plain_softmax


def softmax_faults(softmax: Softmax, *, device: torch.device, dtype: torch.dtype, vocabulary: int) -> Iterator[str]:
    """Yield where this differs from PyTorch's operations, on large logits, some of them -inf, and the last tokens."""
    logits = (6.0 * numbers((ROWS, vocabulary), torch.float64, device)).to(dtype)
    logits[1, : vocabulary // 2] = -torch.inf
    tokens = torch.arange(vocabulary - ROWS, vocabulary, device=device)
    for temperature in (1.0, 0.7):
        (got_M, got_MV), (wanted_M, wanted_MV) = (
            do(logits, tokens, temperature, True) for do in (softmax, plain_softmax)
        )
        # separately: the token's slope is about 1, and all others share the same sum
        at = tokens[:, None]
        yield from difference("value", got_M, wanted_M, 1e-4)
        yield from difference("slope", got_MV.gather(1, at), wanted_MV.gather(1, at), SLOPE_TOLERANCE)
        others = got_MV.scatter(1, at, 0.0), wanted_MV.scatter(1, at, 0.0)
        yield from difference("slope of the others", *others, SLOPE_TOLERANCE)


def selected_logprobs(
    hidden_MD: Tensor,
    tokens_M: Tensor,
    head: Callable[[Tensor], Tensor],
    vocabulary: int,
    temperature: float,
    softmax: Softmax = plain_softmax,
    parameters: tuple[nn.Parameter, ...] = (),
) -> Tensor:
    """Return log softmax(head(hidden) / temperature) of each token, natural, fp32 [M], differentiable.

    `head` turns hidden states [m, hidden] into logits [m, vocabulary], each row by itself; `parameters` are its trained
    ones. Memory is bounded by `LOGIT_CHUNK` logits (`FUSED_CHUNK` with a fused `softmax`). Liger kernels,
    arXiv:2410.10989, chunk the same way; here log-probabilities are an output, so that any loss can follow.
    """
    if not len(tokens_M):
        return hidden_MD.new_zeros(0, dtype=torch.float32)
    rows = _chunk_rows(hidden_MD, vocabulary) if softmax is plain_softmax else max(1, FUSED_CHUNK // vocabulary)
    result: Tensor
    if parameters:
        result = _TrainedHeadLogprobs.apply(hidden_MD, tokens_M, head, temperature, rows, softmax, *parameters)
        return result

    def outputs(*given: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        logprobs_M, slope_MV = softmax(*given)
        return (logprobs_M,), (slope_MV,)

    (result,) = _HeadOutputs.apply(hidden_MD, tokens_M, head, temperature, rows, outputs)
    return result


def _chunk_rows(hidden_MD: Tensor, vocabulary: int) -> int:
    return max(1, LOGIT_CHUNK.get(hidden_MD.device.type, LOGIT_CHUNK["cuda"]) // vocabulary)


def ranked_logprobs(
    hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float, top: int
) -> Tensor:
    """Return [M, 1 + 2 top] in fp64, no gradient: a token's log-probability, then the likeliest and their ids."""
    rows = _chunk_rows(hidden_MD, vocabulary)
    parts = [hidden_MD.new_zeros(0, 1 + 2 * top, dtype=torch.float64)]
    for hidden, tokens in zip(hidden_MD.split(rows), tokens_M.split(rows), strict=True):
        logprobs_MV = torch.log_softmax(head(hidden).float() / temperature, dim=-1)
        best = logprobs_MV.topk(min(top, logprobs_MV.shape[1]), dim=-1)
        parts.append(torch.cat([logprobs_MV.gather(1, tokens[:, None]), best.values, best.indices], dim=1).double())
    return torch.cat(parts)


def squared_probs(hidden_MD: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float) -> Tensor:
    """Return the sum of squared probabilities of softmax(head(hidden) / temperature) in each row, fp64 [M]."""
    rows = _chunk_rows(hidden_MD, vocabulary)
    parts = [hidden_MD.new_zeros(0, dtype=torch.float64)]
    for hidden in hidden_MD.split(rows):
        parts.append(torch.softmax(head(hidden).float() / temperature, dim=-1).square().sum(-1).double())
    return torch.cat(parts)


def logprobs_and_entropies(
    hidden_MD: Tensor, tokens_M: Tensor, head: Callable[[Tensor], Tensor], vocabulary: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return both of softmax(head(hidden) / temperature), in nats, fp32 [M]; the first is `selected_logprobs`."""
    if not len(tokens_M):
        nothing_M = hidden_MD.new_zeros(0, dtype=torch.float32)
        return nothing_M, nothing_M
    rows = _chunk_rows(hidden_MD, vocabulary)
    logprobs_M, entropies_M = _HeadOutputs.apply(hidden_MD, tokens_M, head, temperature, rows, _values_and_slopes)
    return logprobs_M, entropies_M


def logprobs_and_divergences(
    hidden_MD: Tensor, teacher_MD: Tensor, tokens_M: Tensor, compare: Callable[[Tensor, Tensor], Tensor], *given: Any
) -> tuple[Tensor, Tensor]:
    """Return `selected_logprobs`, and `compare` of the log-probabilities [m, V] from `hidden_MD` and `teacher_MD`.

    `given`: head, vocabulary, temperature. Only the first of the two gets a gradient.
    """
    head, vocabulary, temperature = given

    def outputs(
        logits_MV: Tensor, at_M: Tensor, t: float, slope: bool
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        logprobs_M, of_logprobs_MV = plain_softmax(logits_MV, tokens_M[at_M], t, slope)
        with torch.no_grad():
            theirs_MV = torch.log_softmax(head(teacher_MD[at_M]).float() / t, dim=-1)
        with torch.set_grad_enabled(slope):
            own_MV = logits_MV.float().detach().requires_grad_(slope)
            found_M = compare(torch.log_softmax(own_MV / t, dim=-1), theirs_MV)
            of_found_MV = torch.autograd.grad(found_M.sum(), own_MV)[0] if slope else own_MV
        return (logprobs_M, found_M.detach()), (of_logprobs_MV, of_found_MV.to(logits_MV.dtype))

    # Indices in place of tokens, so that a chunk finds its teacher's hidden states too.
    at_M, rows = torch.arange(len(tokens_M), device=tokens_M.device), _chunk_rows(hidden_MD, vocabulary)
    logprobs_M, divergences_M = _HeadOutputs.apply(hidden_MD, at_M, head, temperature, rows, outputs)
    return logprobs_M, divergences_M


def _values_and_slopes(
    logits_MV: Tensor, tokens_M: Tensor, temperature: float, slope: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return log p_t and H, and their slopes by the logits: (onehot - p) / T and -p_j (log p_j + H) / T."""
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
