"""AdamW over the trained parameters: PyTorch's arithmetic without its optimizer class, whose import is slow."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from retrain_local.memory.sizes import runs

# Numbers updated at a time. On CUDA an update holds one more number for each: 16 GB for all weights of a 4 B model.
AT_A_TIME = 2**28


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101).

    `torch.optim.AdamW` calls the same function and has the same `state`, but imports PyTorch's compiler.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._lr, self._betas, self._eps, self._decay = lr, betas, eps, decay

    def step(self, lr: float | None = None) -> float:
        """Update every parameter that has a gradient, at `lr` or the initial rate; return that rate."""
        rate = self._lr if lr is None else lr
        for some in runs((p for p in self.parameters if p.grad is not None), AT_A_TIME, Tensor.numel):
            for p in some:
                if p not in self.state:
                    moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    self.state[p] = {**moments, "step": torch.tensor(0.0)}
            states = [self.state[p] for p in some]
            with torch.no_grad():
                adamw(
                    some,
                    [p.grad for p in some],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    [state["step"] for state in states],
                    amsgrad=False,
                    beta1=self._betas[0],
                    beta2=self._betas[1],
                    lr=rate,
                    weight_decay=self._decay,
                    eps=self._eps,
                    maximize=False,
                )
        return rate

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None


def add_gradients(parameters: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Add a pack's gradients, in a few launches on CUDA: one per tensor would be 504 for a 4 B model."""
    sums, addends = [], []
    for p, gradient in zip(parameters, gradients, strict=True):
        if p.grad is None:
            p.grad = gradient
        elif gradient is not None:
            sums.append(p.grad)
            addends.append(gradient)
    if sums:
        torch._foreach_add_(sums, addends)
