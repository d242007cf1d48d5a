"""Losses, advantages, KL, weights and learning rates equal those of verl's own functions, on the same random numbers.

`RETRAIN_VERL=CHECKOUT nox -s referee`; read and run was verl of 2026-01-29 (b178a3c, 0.8.0.dev).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from docs.generate import PAGES, filled
from retrain.api import Seeds, TrainBatch, TrainRow, load_plugins
from retrain.credit.kl import steered
from retrain.kernel.config.load import load_config
from retrain.run.steps.updates import Course
from retrain.run.tables import registered_tables
from retrain_local.training.regularisers import Columns, kl_terms
from retrain_local.training.step_loss import Mismatch, PolicyLoss
from retrain_sepa.advantages import (
    grpo_advantages,
    opo_advantages,
    otb_advantages,
    passk_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from tests.kit.scored_tokens import Scored, scored

VARIABLE = "RETRAIN_VERL"
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} names no checkout of verl"),
]
GROUPS, GROUP_SIZE, MAX_TOKENS = 6, 4, 24
ROWS = GROUPS * GROUP_SIZE
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Step:
    """Completions of different lengths: log-probabilities when sampled, now and of the reference, and advantages."""

    seed: int = 0

    @cached_property
    def numbers(self) -> SimpleNamespace:
        rng = np.random.default_rng(self.seed)
        lengths = rng.integers(3, MAX_TOKENS + 1, ROWS)
        old_M = -rng.exponential(1.0, lengths.sum())
        made = {
            "old_M": old_M,
            "new_M": np.minimum(old_M + rng.normal(0, 0.4, len(old_M)), -1e-3),
            "reference_M": np.minimum(old_M + rng.normal(0, 0.4, len(old_M)), -1e-3),
            "advantages_M": np.repeat(rng.normal(size=ROWS), lengths),
        }
        tensors = {name: torch.from_numpy(values) for name, values in made.items()}
        return SimpleNamespace(lengths=lengths, rewards=rng.normal(size=(GROUPS, GROUP_SIZE)), **tensors)

    @property
    def sequences_M(self) -> Tensor:
        return torch.from_numpy(np.repeat(np.arange(ROWS), self.numbers.lengths))

    @property
    def mask(self) -> Tensor:
        return torch.arange(MAX_TOKENS)[None] < torch.from_numpy(self.numbers.lengths)[:, None]

    def padded(self, values_M: Tensor) -> Tensor:
        return torch.zeros(self.mask.shape, dtype=values_M.dtype).masked_scatter(self.mask, values_M)

    def scored(self) -> Scored:
        return scored(self.numbers.old_M, self.numbers.advantages_M, self.sequences_M)

    def batch(self) -> TrainBatch:
        """The second of two updates, so that clipped tokens are told apart; each row begins with a prompt token."""
        ends = np.cumsum(self.numbers.lengths)[:-1]
        columns = [np.split(np.asarray(self.numbers.__dict__[name]), ends) for name in ("old_M", "advantages_M")]
        rows = [
            TrainRow(
                tokens_T=np.zeros(len(old) + 1, np.int64),
                action_T=np.arange(len(old) + 1) > 0,
                logprobs_T=np.concatenate([[0.0], old]),
                advantages_T=np.concatenate([[0.0], credit]),
            )
            for old, credit in zip(*columns, strict=True)
        ]
        return TrainBatch(step=0, rows=tuple(rows), temperature=1.0, update=1, updates=2)


STEP = Step()


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    with loaded() as modules:
        yield modules


def ours(settings: str, folder: Path) -> tuple[float, Tensor]:
    """Loss and its gradient in the log-probabilities, by the `[algorithm]` and the tables of a TOML."""
    plugins, file = load_plugins({}), folder / "run.toml"
    file.write_text(f"[training]\nminibatches = 2\nmax_tokens = {MAX_TOKENS}\n[algorithm]\n{settings}")
    config, problems = load_config(file, tables=registered_tables(plugins), arguments=[])
    assert not problems, problems
    loss, batch, new_M = PolicyLoss.of(config, plugins), STEP.batch(), STEP.numbers.new_M.clone().requires_grad_()
    columns = Columns()
    if loss.regularisers.has_marks:
        now = [np.concatenate([[0.0], n]) for n in torch.split(STEP.numbers.new_M, STEP.numbers.lengths.tolist())]
        marked = loss.marked(batch, now, Seeds(0))
        held, dropped = (torch.from_numpy(np.concatenate(m)) if m else None for m in (marked.held, marked.dropped))
        columns = Columns(held_M=held, dropped_M=dropped)
    value, _ = loss.of_pack(new_M, STEP.scored(), loss.denominator(batch), columns=columns)
    return value.item(), torch.autograd.grad(value, new_M)[0]


def theirs(verl: SimpleNamespace, mode: str, aggregation: str, **settings: Any) -> tuple[float, Tensor]:
    """The same by verl, whose matrices are padded."""
    new_M = STEP.numbers.new_M.clone().requires_grad_()
    old, new, credit = map(STEP.padded, (STEP.numbers.old_M, new_M, STEP.numbers.advantages_M))
    call = verl.core.get_policy_loss_fn(mode)
    value, _ = call(old, new, credit, STEP.mask.double(), aggregation, actor_config(**settings))
    return value.item(), torch.autograd.grad(value, new_M)[0]


def difference(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


MEAN, NO_CLIP = "token-mean", {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9}
LOSSES = {
    "importance_sampling": ('loss = "importance_sampling"', "vanilla", MEAN, NO_CLIP),
    "sequence_mean": ('aggregation = "sequence_mean"', "vanilla", "seq-mean-token-mean", NO_CLIP),
    "constant": (  # verl divides by the constant alone, see the page
        'aggregation = "constant"',
        "vanilla",
        "seq-mean-token-sum-norm",
        NO_CLIP | {"loss_scale_factor": MAX_TOKENS * ROWS},
    ),
    "ppo": ('loss = "ppo"\nclip_eps_high = 0.28', "vanilla", MEAN, {"clip_ratio_high": 0.28}),
    "dual_clip": ('loss = "ppo"\ndual_clip = 1.5', "vanilla", MEAN, {"clip_ratio_c": 1.5}),
    "gspo": (
        'loss = "gspo"\nclip_eps = 0.03\nclip_eps_high = 0.04',
        *("gspo", "seq-mean-token-mean", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}),
    ),
    "cispo": ('loss = "cispo"\nclip_eps_high = 1.2', "cispo", MEAN, {"clip_ratio_low": 1.0}),
    "kl_cov": (
        'loss = "importance_sampling"\n[entropy]\nkl_cov = 0.05\nkl_cov_coef = 0.7',
        *("kl_cov", MEAN, {"policy_loss": SimpleNamespace(kl_cov_ratio=0.05, ppo_kl_coef=0.7)}),
    ),
    "clip_cov": (  # every candidate is taken: which are drawn depends on the generator
        'loss = "ppo"\n[entropy]\nclip_cov = 1.0\nclip_cov_low = 0.1\nclip_cov_high = 1.0',
        *("clip_cov", MEAN, {"policy_loss": SimpleNamespace(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.0)}),
    ),
    "built-in sapo": ('loss = "sapo"', "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    "gmpo": ('loss = "gmpo"', "geo_mean", MEAN, {"clip_ratio": 0.4, "clip_ratio_low": 0.4, "clip_ratio_high": 0.4}),
    "sapo": (
        'loss = "soft_gate.PLUGIN"\naggregation = "sequence_mean"',
        *("sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient(
    verl: SimpleNamespace, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code = re.search(r"`plugins/soft_gate.py`:\n\n```python\n(.*?)```", filled(PAGES["reference/kinds/loss.md"]), re.S)
    assert code
    (tmp_path / "soft_gate.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)
    settings, mode, aggregation, theirs_set = LOSSES[name]
    (value, gradient), (wanted, wanted_gradient) = (
        ours(settings, tmp_path),
        theirs(verl, mode, aggregation, **theirs_set),
    )
    errors = difference(value, wanted), difference(gradient, wanted_gradient)
    with capsys.disabled():
        print(f"\n{name}: loss {value:.6f}, relative difference of loss {errors[0]:.1e}, of gradient {errors[1]:.1e}")
    assert max(errors) < TOLERANCE


def advantages_of(verl: SimpleNamespace, name: str, mask: Tensor, **settings: Any) -> np.ndarray:
    """One advantage per completion; the reward stands at its last token."""
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(ROWS), mask.sum(1) - 1] = torch.from_numpy(STEP.numbers.rewards.ravel())
    index = np.repeat(np.arange(GROUPS), GROUP_SIZE)
    if "reinforce" in name:
        settings["config"] = SimpleNamespace(gamma=1.0)
    kinds = {} if name in ("reinforce_plus_plus", "remax") else {"index": index}
    found, _ = verl.core.get_adv_estimator_fn(name)(rewards, response_mask=mask.double(), **kinds, **settings)
    return found[:, 0].numpy()


def test_advantages(verl: SimpleNamespace) -> None:
    rewards_PG, lengths_N = list(STEP.numbers.rewards), STEP.numbers.lengths
    tokens, even = int(lengths_N.sum()), torch.ones(STEP.mask.shape, dtype=torch.bool)
    bessel = np.sqrt((tokens - 1) / tokens), np.sqrt((even.numel() - 1) / even.numel())  # verl's deviations have ddof 1
    std = np.concatenate([grpo_advantages(r, scale="std", ddof=1) for r in rewards_PG])
    rloo = np.concatenate([rloo_advantages(r) for r in rewards_PG])
    by_tokens = reinforce_pp_baseline_advantages(rewards_PG, list(lengths_N.reshape(GROUPS, -1)), weight="tokens")
    compared = {
        "grpo": (std, advantages_of(verl, "grpo", STEP.mask, epsilon=1e-4)),  # 1e-6 there, unless told otherwise
        "grpo_vectorized": (std, advantages_of(verl, "grpo_vectorized", STEP.mask, epsilon=1e-4)),
        "dr_grpo": (
            np.concatenate([grpo_advantages(r) for r in rewards_PG]),
            advantages_of(verl, "grpo", STEP.mask, norm_adv_by_std_in_grpo=False),
        ),
        "rloo": (rloo, advantages_of(verl, "rloo", STEP.mask)),
        "rloo_vectorized": (rloo, advantages_of(verl, "rloo_vectorized", STEP.mask)),
        "reinforce_pp_baseline": (
            np.concatenate(by_tokens) * bessel[0],
            advantages_of(verl, "reinforce_plus_plus_baseline", STEP.mask),
        ),
        "reinforce_pp": (  # with completions of one length tokens and completions have the same mean
            np.concatenate(reinforce_pp_advantages(rewards_PG)) * bessel[1],
            advantages_of(verl, "reinforce_plus_plus", even),
        ),
    }
    stop, plain = SimpleNamespace(get=lambda *_: False), list(lengths_N.reshape(GROUPS, -1))
    baselines = np.random.default_rng(1).normal(size=GROUPS)
    compared |= {
        "opo": (np.concatenate(list(map(opo_advantages, rewards_PG, plain))), advantages_of(verl, "opo", STEP.mask)),
        "passk": (
            np.concatenate([passk_advantages(r) for r in rewards_PG]),
            advantages_of(verl, "grpo_passk", STEP.mask, config=stop),
        ),
        "passk, scaled": (
            np.concatenate([passk_advantages(r, scale="std") for r in rewards_PG]),
            advantages_of(verl, "grpo_passk", STEP.mask, config=SimpleNamespace(get=lambda *_: True)),
        ),
        "remax": (
            np.concatenate(remax_advantages(rewards_PG, baselines)),
            advantages_of(verl, "remax", STEP.mask, reward_baselines=torch.from_numpy(baselines.repeat(GROUP_SIZE))),
        ),
    }
    errors = {name: difference(*pair) for name, pair in compared.items()}
    print(errors)
    assert max(errors.values()) < TOLERANCE


def test_the_optimal_token_baseline(verl: SimpleNamespace) -> None:
    squares_M = torch.from_numpy(np.random.default_rng(2).uniform(0.0, 1.0, len(STEP.numbers.old_M)))
    squares_M = STEP.numbers.old_M.exp().square() + squares_M * (1.0 - STEP.numbers.old_M.exp()).square()
    rewards = torch.zeros(STEP.mask.shape, dtype=torch.float64)
    rewards[torch.arange(ROWS), STEP.mask.sum(1) - 1] = torch.from_numpy(STEP.numbers.rewards.ravel())
    wanted, _ = verl.core.get_adv_estimator_fn("optimal_token_baseline")(
        token_level_rewards=rewards,
        response_mask=STEP.mask.double(),
        index=np.repeat(np.arange(GROUPS), GROUP_SIZE),
        old_log_probs=STEP.padded(STEP.numbers.old_M),
        sum_pi_squared=STEP.padded(squares_M),
        handle_zero_tail=True,
    )
    lengths = STEP.numbers.lengths.tolist()
    rows = [list(map(np.asarray, torch.split(each, lengths))) for each in (STEP.numbers.old_M, squares_M)]
    found = [
        otb_advantages(STEP.numbers.rewards[group], *(each[group * GROUP_SIZE :][:GROUP_SIZE] for each in rows))
        for group in range(GROUPS)
    ]
    assert difference(np.concatenate([a_T for each in found for a_T in each]), wanted[STEP.mask]) < TOLERANCE


def test_kl_and_its_gradient(verl: SimpleNamespace) -> None:
    """Values are equal; on policy every estimate of ours has the gradient that verl has with k2."""
    new_M = STEP.numbers.new_M.clone().requires_grad_()
    reference_M, rho_M = STEP.numbers.reference_M, (new_M - new_M.detach()).exp()
    found = {name: kl_terms(name, new_M, reference_M, rho_M) for name in ("k1", "k2", "k3")}
    wanted = {name: verl.core.kl_penalty(new_M, reference_M, name) for name in found}
    for name, values_M in found.items():
        assert difference(values_M.detach(), wanted[name].detach()) < TOLERANCE
    of_k2 = torch.autograd.grad(wanted["k2"].sum(), new_M, retain_graph=True)[0]
    for name in ("k2", "k3"):
        assert difference(torch.autograd.grad(found[name].sum(), new_M, retain_graph=True)[0], of_k2) < TOLERANCE
    of_k3 = torch.autograd.grad(wanted["k3"].sum(), new_M)[0]
    assert difference(of_k3, of_k2) > 0.1  # the forward divergence's
    with pytest.raises(NotImplementedError):  # meant to have k2's gradient
        verl.core.kl_penalty(new_M, reference_M, "k3+")
    control = verl.core.AdaptiveKLController(0.1, 0.02, 1000)
    control.update(0.03, 64)
    assert control.value == pytest.approx(steered(0.1, 0.03, target=0.02, count=64, horizon=1000))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_against_the_sampler(verl: SimpleNamespace, level: str) -> None:
    logs_M = (STEP.numbers.new_M - STEP.numbers.old_M) / 4.0
    pack = scored(STEP.numbers.new_M, STEP.numbers.advantages_M, STEP.sequences_M, STEP.numbers.new_M - logs_M)
    weights_M, outside_M = Mismatch(level=level, high=1.2).weights(STEP.numbers.new_M, pack)
    mask = STEP.mask.double()
    wanted, _ = verl.mismatch.compute_rollout_correction_weights(STEP.padded(logs_M), mask, level, 1.2)
    assert 0 < outside_M.sum() < len(outside_M)
    assert difference(weights_M, wanted[STEP.mask]) < TOLERANCE
    # its masks bound p sampler / p trainer, the reciprocal of ours, and there is one for the geometric mean
    masked, option = {"token": ("token", "token_k1"), "sequence": ("geometric", "seq_mean_k1")}[level]
    kept_M, _ = Mismatch(level=masked, mode="mask", low=1 / 1.05, high=1.05).weights(STEP.numbers.new_M, pack)
    kept, _ = verl.mismatch.compute_rollout_rejection_mask(STEP.padded(logs_M), mask, option, f"{1 / 1.05}_1.05")
    assert (kept_M > 0).tolist() == kept[STEP.mask].bool().tolist()
    assert 0 < kept.sum() < mask.sum()


def test_learning_rates_after_the_warm_up(verl: SimpleNamespace) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    factor = verl.rates.get_cosine_schedule_with_warmup(optimizer, 3, 12, min_lr_ratio=0.1).lr_lambdas[0]
    course = Course(lr=1.0, max_steps=12, schedule="cosine", warmup_steps=3, min_lr_ratio=0.1)
    assert [factor(step) for step in range(3, 12)] == pytest.approx([course.rate(step) for step in range(3, 12)])
    assert (factor(0), course.rate(0)) == (0.0, pytest.approx(0.4))


CONFIGURED = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e9}


class ActorConfig(SimpleNamespace):
    """What the losses read of verl's configuration."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Placeholder(ModuleType):
    """A module that is imported for the types in signatures."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ActorConfig if name == "ActorConfig" else type(name, (), {})


def actor_config(*, loss_scale_factor: int | None = None, policy_loss: Any = None, **settings: Any) -> ActorConfig:
    """Settings of an actor; the second clip, which verl has always on, is out of reach unless it is set."""
    scale = {} if loss_scale_factor is None else {"loss_scale_factor": loss_scale_factor}
    return ActorConfig(**(CONFIGURED | settings), policy_loss=policy_loss, global_batch_info=scale)


@contextmanager
def loaded() -> Iterator[SimpleNamespace]:
    """The modules with losses and advantages, weights against the sampler, and learning rates."""
    before = dict(sys.modules)
    root = Path(os.environ[VARIABLE]) / "verl"
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"):  # without running their __init__
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    types = ("verl.trainer.config", "verl.trainer.config.algorithm", "verl.workers.config", "verl.workers.config.actor")
    for name in (*types, "verl.workers", "verl.protocol", "omegaconf", "tensordict"):
        sys.modules[name] = Placeholder(name)
    try:
        groups = importlib.import_module("verl.utils.groupwise")
        vars(sys.modules["verl.utils"]).update(
            as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std
        )
        yield SimpleNamespace(
            core=importlib.import_module("verl.trainer.ppo.core_algos"),
            mismatch=importlib.import_module("verl.trainer.ppo.rollout_corr_helper"),
            rates=importlib.import_module("verl.utils.torch_functional"),
        )
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] in ("verl", "omegaconf", "tensordict"):
                del sys.modules[name]
        sys.modules.update(before)
