from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from retrain_local.attention.packed import Picks

CPU = torch.device("cpu")


class Called(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
    with Called() as called:
        torch.autograd.backward(out, torch.ones_like(out))
    assert not {"index_add", "index_add_", "index_put_", "scatter_add_", "index_put"} & set(called.names)
    launches = [name for name in called.names if name not in ("detach", "view", "flatten", "unflatten", "_unsafe_view")]
    assert len(launches) <= 10
