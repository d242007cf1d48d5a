from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from retrain_local.training import adamw
from retrain_local.training.adamw import AdamW


@pytest.mark.parametrize(("at_a_time", "calls"), [(adamw.AT_A_TIME, [2]), (16, [1, 1])])
def test_it_is_torchs_adamw_to_the_last_bit(at_a_time: int, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """However few numbers are updated at a time, which bounds what an update of all weights takes on a GPU."""
    counts: list[int] = []
    original = adamw.adamw
    monkeypatch.setattr(
        adamw, "adamw", lambda params, *rest, **named: (counts.append(len(params)), original(params, *rest, **named))
    )
    monkeypatch.setattr(adamw, "AT_A_TIME", at_a_time)
    drawn = torch.Generator().manual_seed(0)
    mine = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in ((3, 4), (5,), (2, 2))]
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    ours = AdamW(mine, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for rate in (None, 1e-2, 3e-3, None, 1e-4):
        reference.param_groups[0]["lr"] = rate or 1e-2
        for p, q in list(zip(mine, theirs, strict=True))[:2]:  # the third never has a gradient
            p.grad = torch.randn(p.shape, generator=drawn)
            q.grad = p.grad.clone()
        assert ours.step(rate) == (rate or 1e-2)
        reference.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
    assert set(ours.state) == set(mine[:2])
    for p, q in zip(mine[:2], theirs[:2], strict=True):
        assert all(torch.equal(ours.state[p][name], value) for name, value in reference.state[q].items())
    assert counts == calls * 5
    ours.zero_grad()
    assert all(p.grad is None for p in mine)


@pytest.mark.long
def test_it_does_not_start_the_compiler() -> None:
    code = (
        "import sys, torch; from retrain_local.training.adamw import AdamW; p = torch.nn.Parameter(torch.ones(2)); "
        "o = AdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, decay=0.0); p.grad = torch.ones(2); o.step(); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
