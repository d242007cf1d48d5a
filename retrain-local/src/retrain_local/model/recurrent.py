"""One token through a recurrent layer on a CPU, in place of transformers' functions of the same names and arguments.

These write the state in place and use matrix products where the others make several tensors of its size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def gated_delta_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """S <- e^g S + k (beta (v - (e^g S)^T k))^T and o = S^T q / sqrt(K), in fp32 (arXiv:2412.06464, equation 10).

    `query` and `key` [B, 1, key heads, K], `value` [B, 1, heads, V], `g` and `beta` [B, 1, heads], the state
    [B, heads, K, V].
    """
    rows, _, heads, width = value.shape
    repeats, size = heads // key.shape[2], key.shape[-1]
    q, k = (x[:, 0].float().repeat_interleave(repeats, dim=1) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state = initial_state.float().mul_(g[:, 0].float().exp()[..., None, None]).view(-1, size, width)
    k_11K = k.reshape(-1, 1, size)
    delta = (value[:, 0].float().reshape(-1, 1, width) - torch.bmm(k_11K, state)) * beta[:, 0].float().reshape(-1, 1, 1)
    state.baddbmm_(k_11K.transpose(1, 2), delta)
    out = torch.bmm(q.reshape(-1, 1, size), state) * size**-0.5
    return out.view(rows, 1, heads, width).to(query.dtype), state.view(rows, heads, size, width)


def selective_step(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    **_: Any,
) -> Tensor:
    """h <- e^(dt A) h + dt x B^T and y = h C + D x, with one dt and A per head (Mamba-2, arXiv:2405.21060).

    The state [rows, heads, size, N] is changed in place; `dt`, A, D and `dt_bias` repeat one number per head.
    """
    rows, heads, size = hidden_states.shape
    repeats, width = heads // B.shape[1], B.shape[-1]
    dt_BH = functional.softplus(dt[..., 0] + dt_bias[:, 0].to(dt.dtype))
    state.mul_(torch.exp(dt_BH.float() * A[:, 0, 0].float())[..., None, None].to(state.dtype))
    b, c = (x.repeat_interleave(repeats, dim=1).to(state.dtype) for x in (B, C))
    x = (hidden_states * dt_BH[..., None]).to(state.dtype)
    flat = state.view(-1, size, width)
    flat.baddbmm_(x.reshape(-1, size, 1), b.reshape(-1, 1, width))
    out = torch.bmm(flat, c.reshape(-1, width, 1)).view(rows, heads, size)
    return (out + hidden_states * D).to(hidden_states.dtype)


def _delta(plain: Callable[..., Any]) -> Callable[..., Any]:
    def step(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Any:
        is_step = query.shape[1] == 1 and given.get("initial_state") is not None and not torch.is_grad_enabled()
        return (gated_delta_step if is_step else plain)(query, key, value, **given)

    return step


def _selective(plain: Callable[..., Any]) -> Callable[..., Any]:
    def step(*tensors: Tensor, z: Any = None, dt_softplus: bool = False, **given: Any) -> Any:
        is_per_head = len(tensors) == 7 and tensors[3].dim() == 3 and tensors[3].stride()[1:] == (0, 0)
        if is_per_head and z is None and dt_softplus and not torch.is_grad_enabled():
            return selective_step(*tensors, **given)
        return plain(*tensors, z=z, dt_softplus=dt_softplus, **given)

    return step


STEPS = {"torch_recurrent_gated_delta_rule": _delta, "mamba2_selective_state_update": _selective}


def with_fast_steps(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module's forward pass with these functions in place of those that it calls by name."""
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType):
        return forward
    called = set(inner.__code__.co_names) & STEPS.keys() & inner.__globals__.keys()
    if not called:
        return forward
    scope = inner.__globals__ | {name: STEPS[name](inner.__globals__[name]) for name in called}
    made = FunctionType(inner.__code__, scope, inner.__name__, inner.__defaults__, inner.__closure__)
    made.__kwdefaults__ = inner.__kwdefaults__
    return made
