"""AdamW over the adapter's parameters: PyTorch's arithmetic without its optimizer class, which is slow to import."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from retrain_local.devices.group import buckets

AT_A_TIME = 2**28  # numbers: on CUDA an update holds one more for each, 16 GB for all weights of a 4 B model at once


class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101).

    `torch.optim.AdamW` calls the same function, but creating one imports PyTorch's compiler, which takes as long as
    importing PyTorch. `state` has the same layout: `exp_avg`, `exp_avg_sq` and `step` of each parameter that was ever
    updated.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, betas: tuple[float, float], eps: float, decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        self._lr, self._betas, self._eps, self._decay = lr, betas, eps, decay

    def step(self, lr: float | None = None) -> float:
        """Update every parameter that has a gradient, at `lr` or the rate it was created with; return that rate."""
        rate = self._lr if lr is None else lr
        updated = [p for p in self.parameters if p.grad is not None]
        for p in updated:
            if p not in self.state:
                moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                self.state[p] = {**moments, "step": torch.tensor(0.0)}
        for some in buckets(updated, AT_A_TIME):
            self._update(some, rate)
        return rate

    def _update(self, updated: list[nn.Parameter], rate: float) -> None:
        states = [self.state[p] for p in updated]
        with torch.no_grad():
            adamw(
                updated,
                [p.grad for p in updated],
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

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters:
            p.grad = None
