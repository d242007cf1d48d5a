"""The losses that TRL lacks equal those of others, on random numbers and through a whole optimizer step.

Each variable names a checkout: RETRAIN_VERL (read and run was verl of 2026-08-22, 1dda039), RETRAIN_STABLE_RL (the
authors of DPPO, 2026-03-02, c6af1d1), RETRAIN_PRIME_RL (2026-08-21, 559b447) and RETRAIN_AREAL (2026-05-21, 4aef98d).
`RETRAIN_AREAL=DIR nox -s referee` runs those of AReaL; PRIME-RL's need `nox -s prime-rl -- FILE`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from retrain.api import SampleRequest, SamplingParams, TrainBatch
from retrain_local.factory import create_backend
from tests.prime_rl.checkout import theirs as of_prime_rl
from tests.servers import test_trl as whole
from tests.servers.checkouts import ActorConfig, importable, needs, verl_modules
from tests.servers.test_verl import STEP, difference, ours, within

pytestmark = pytest.mark.server
FLOAT64, FLOAT32 = 1e-9, 1e-5
Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of old, new, advantages and mask, all padded
NO_CAP = 1e9
NO_RATIO_LIMIT = SimpleNamespace(level="token", action="mask", metric="ratio", lower=None, upper=NO_CAP)


@contextmanager
def verl(name: str, variable: str = "RETRAIN_VERL", **settings: Any) -> Iterator[Loss]:
    """A loss of verl's registry, or of a fork that takes the sampler's log-probabilities as well."""
    with verl_modules(variable) as modules:
        call = modules.core.get_policy_loss_fn(name)

        def loss(old: Tensor, new: Tensor, credit: Tensor, mask: Tensor) -> Tensor:
            # the fork measures against the sampler; the others are reported alone
            more = {} if variable == "RETRAIN_VERL" else dict.fromkeys(("rollout_log_prob", "topk_kl", "entropy"), old)
            value: Tensor = call(old, new, credit, mask.double(), "token-mean", ActorConfig(**settings), **more)[0]
            return value

        yield loss


@contextmanager
def prime_rl(**settings: float) -> Iterator[Loss]:
    """The default loss without its pull to the sampler; its ratio carries the gradient and has no cap."""
    module = of_prime_rl("prime_rl.trainer.rl.loss")
    config = SimpleNamespace(adv_tau=1.0, kl_tau=0.0, **settings)

    def loss(old: Tensor, new: Tensor, credit: Tensor, mask: Tensor) -> Tensor:
        rows = zip(new, old, credit, mask, strict=True)
        found = [
            module.default_loss_fn(module.LossInputs(n, o, ref_logprobs=None, advantages=a, loss_mask=m), config).loss
            for n, o, a, m in rows
        ]
        return torch.stack(found).sum() / mask.sum()

    yield loss


@contextmanager
def areal(tau: float) -> Iterator[Loss]:
    """AReaL's loss with its setting for M2PO, before the first of several updates: the proximal policy is today's."""
    packages = ("areal", "areal.trainer", "areal.trainer.ppo", "areal.utils", "areal.utils.functional")
    placeholders = ("api", "api.cli_args", "infra", "infra.platforms", "infra.rpc", "infra.rpc.serialization")
    placeholders += ("utils.data", "utils.logging", "utils.stats_tracker", "utils.perf_tracer", "experimental")
    placeholders += ("experimental.training_service.controller.controller",)
    with importable("RETRAIN_AREAL", packages, [f"areal.{name}" for name in placeholders]):
        functional = importlib.import_module("areal.utils.functional.functional")
        names = ("ppo_actor_loss_fn", "sapo_loss_fn", "reward_overlong_penalty")
        vars(importlib.import_module("areal.utils.functional")).update({n: getattr(functional, n) for n in names})
        actor = importlib.import_module("areal.trainer.ppo.actor")

        def loss(old: Tensor, new: Tensor, credit: Tensor, mask: Tensor) -> Tensor:
            tokens = {"logprobs": old, "advantages": credit, "loss_mask": mask, "prox_logp": new.detach()}
            given = {"eps_clip": 0.0, "eps_clip_higher": None, "c_clip": None, "rejection_sampling": NO_RATIO_LIMIT}
            value: Tensor = actor.grpo_loss_fn(
                new, torch.zeros_like(new), tokens, m2_threshold=tau, use_decoupled_loss=True, **given
            )
            # it divides by the tokens that are kept
            kept = actor._apply_m2po_masking(old, new.detach(), mask, tau).sum()
            return value * kept / mask.sum()

        yield loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`ours` are keys of `[algorithm]`, as `theirs` are of the peer; `in_step` are both for a step that moves little.

    `has_value` is false where the value, not the gradient, is another by decision.
    """

    variable: str
    ours: str
    theirs: Callable[[], Any]
    in_step: tuple[str, Callable[[], Any]]
    has_value: bool = True


def dppo(loss: str, divergence: float, cap: float = 20.0) -> str:
    return f'loss = "{loss}"\nloss_params = {{divergence = {divergence}, ratio_cap = {cap}}}'


def m2po(tau: float) -> str:
    return f'loss = "m2po"\nloss_params = {{tau = {tau}}}'


def low_high(divergence: float) -> dict[str, float]:
    return {"dppo_mask_low": divergence, "dppo_mask_high": divergence}


DRO = {"policy_loss": SimpleNamespace(dro_beta=0.1)}
AUTHORS = "RETRAIN_STABLE_RL"
PEERS = {
    "dppo_tv, verl": Peer(
        variable="RETRAIN_VERL",
        ours=dppo("dppo_tv", 0.15),
        theirs=lambda: verl("dppo_tv", **within(0.15)),
        in_step=(dppo("dppo_tv", 0.01), lambda: verl("dppo_tv", **within(0.01))),
    ),
    "dppo_kl, verl": Peer(
        variable="RETRAIN_VERL",
        ours=dppo("dppo_kl", 0.05),
        theirs=lambda: verl("dppo_kl", **within(0.05)),
        in_step=(dppo("dppo_kl", 0.001), lambda: verl("dppo_kl", **within(0.001))),
    ),
    "dro, verl": Peer(
        variable="RETRAIN_VERL",
        ours='loss = "dro"',
        theirs=lambda: verl("dro", **DRO),
        in_step=('loss = "dro"', lambda: verl("dro", **DRO)),
    ),
    "dppo_tv, its authors": Peer(
        variable=AUTHORS,
        ours=dppo("dppo_tv", 0.15),
        theirs=lambda: verl("dppo_binary_tv", AUTHORS, **within(0.15)),
        in_step=(dppo("dppo_tv", 0.01), lambda: verl("dppo_binary_tv", AUTHORS, **within(0.01))),
    ),
    "dppo_kl, its authors": Peer(
        variable=AUTHORS,
        ours=dppo("dppo_kl", 0.05),
        theirs=lambda: verl("dppo_binary_kl", AUTHORS, **within(0.05)),
        in_step=(dppo("dppo_kl", 0.001), lambda: verl("dppo_binary_kl", AUTHORS, **within(0.001))),
    ),
    "dppo_tv, PRIME-RL": Peer(
        variable="RETRAIN_PRIME_RL",
        ours=dppo("dppo_tv", 0.15, NO_CAP),
        theirs=lambda: prime_rl(**low_high(0.15)),
        in_step=(dppo("dppo_tv", 0.01, NO_CAP), lambda: prime_rl(**low_high(0.01))),
        has_value=False,
    ),
    "m2po, AReaL": Peer(
        variable="RETRAIN_AREAL",
        ours=m2po(0.04),
        theirs=lambda: areal(0.04),
        in_step=(m2po(0.0005), lambda: areal(0.0005)),
    ),
}
PARAMS = [pytest.param(peer, id=name, marks=needs(peer.variable)) for name, peer in PEERS.items()]


@pytest.mark.parametrize("peer", PARAMS)
def test_value_and_gradient(peer: Peer, tmp_path: Path) -> None:
    value, gradient = ours(peer.ours, tmp_path)
    new_M = STEP.numbers.new_M.clone().requires_grad_()
    old, new, credit = map(STEP.padded, (STEP.numbers.old_M, new_M, STEP.numbers.advantages_M))
    with peer.theirs() as loss:
        wanted = loss(old, new, credit, STEP.mask)
    errors = {"gradient": difference(gradient, torch.autograd.grad(wanted, new_M)[0])}
    errors |= {"loss": difference(value, wanted.item())} if peer.has_value else {}
    print(errors, f"without gradient: {float((gradient == 0).double().mean()):.2f}")
    assert max(errors.values()) < (FLOAT32 if peer.variable == "RETRAIN_AREAL" else FLOAT64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A model, an adapter that has moved since it sampled, and the rows of the next step."""

    folder: Path
    batch: TrainBatch


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    folder, rng = tmp_path_factory.mktemp("peers"), np.random.default_rng(0)
    whole.write_model(folder / "model")
    backend = whole.backend_of(folder, "")
    requests = [
        SampleRequest(prompt_T=rng.integers(0, 500, size=n), seeds_G=tuple(int(x) for x in rng.integers(0, 2**62, 4)))
        for n in (7, 3, 12, 5)
    ]
    sampled = backend.sample(requests, SamplingParams(max_tokens=whole.MAX_TOKENS, temperature=1.0))
    context = whole.backend_context(folder, whole.GRPO)
    own, others = (whole.batch_of(context, whole.groups_of(requests, sampled, [0, 1, 2, 3], rng)) for _ in range(2))
    for _ in range(2):
        backend.train(others)
    (folder / "adapter").mkdir()
    backend.save_adapter(folder / "adapter")
    return Moved(folder=folder, batch=own)


@pytest.mark.parametrize("peer", PARAMS)
def test_a_whole_step(peer: Peer, moved: Moved) -> None:
    settings, loss_of = peer.in_step
    backend = create_backend(whole.backend_context(moved.folder, whole.GRPO + settings, adapter="adapter"))
    trainer = backend._trainer
    value, clipped, _ = trainer.accumulate(moved.batch)
    gradient = whole.flat({name: p.grad.double() for name, p in trainer.parameters.items()})
    trainer.optimizer.step()
    after = whole.flat({name: p.detach().double() for name, p in trainer.parameters.items()})
    base = AutoModelForCausalLM.from_pretrained(moved.folder / "model", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, str(moved.folder / "adapter"), is_trainable=True).double().eval()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = whole.flat({name: p.detach().clone() for name, p in parameters.items()})
    with loss_of() as loss:
        wanted = loss(*padded(moved.batch, model))
    wanted.backward()
    wanted_gradient = whole.flat({name: p.grad for name, p in parameters.items()})
    torch.optim.AdamW(parameters.values(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0).step()
    wanted_after = whole.flat({name: p.detach() for name, p in parameters.items()})
    errors = {"gradient": difference(gradient, wanted_gradient), "weights": difference(after, wanted_after)}
    errors |= {"loss": difference(value, wanted.item())} if peer.has_value else {}
    print(errors, f"moved {difference(after, before):.1e}, {clipped} clipped")
    assert max(errors.values()) < FLOAT32
    assert 0 < clipped < moved.batch.num_actions or peer.ours == 'loss = "dro"'


def padded(batch: TrainBatch, model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities when sampled and now, advantages and mask of the rows' actions, by transformers and PEFT."""
    columns: list[list[Tensor]] = [[], [], [], []]
    for row in batch.rows:
        ids, action_T = torch.from_numpy(row.tokens_T)[None], torch.from_numpy(row.action_T)
        now = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        given = (torch.from_numpy(row.logprobs_T)[1:], now, torch.from_numpy(row.advantages_T)[1:], action_T[1:])
        for column, values_T in zip(columns, given, strict=True):
            column.append(values_T[action_T[1:]])
    old, new, credit, mask = (torch.nn.utils.rnn.pad_sequence(column, batch_first=True) for column in columns)
    return old.double(), new, credit.double(), mask
