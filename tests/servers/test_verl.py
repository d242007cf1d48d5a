"""Losses, advantages, KL, weights and learning rates equal those of verl's own functions, on the same random numbers.

`RETRAIN_VERL=CHECKOUT nox -s referee`; read and run was verl of 2026-08-22 (1dda039, 0.10.0.dev).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
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
from tests.servers.checkouts import ActorConfig, needs, verl_modules

pytestmark = [pytest.mark.server, needs("RETRAIN_VERL")]
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
    with verl_modules() as modules:
        yield modules


def ours(settings: str, folder: Path) -> tuple[float, Tensor]:
    """Loss and its gradient in the log-probabilities, by the `[algorithm]` and the tables of a TOML."""
    plugins, file = load_plugins({}), folder / "run.toml"
    file.write_text(f"[training]\nminibatches = 2\nmax_tokens = {MAX_TOKENS}\n[algorithm]\n{settings}")
    config, problems = load_config(file, tables=registered_tables(plugins), arguments=[])
    assert not problems, problems
    loss, batch, new_M = PolicyLoss.of(config, plugins), STEP.batch(), STEP.numbers.new_M.clone().requires_grad_()
    columns = Columns()
    if loss.has_marks:
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
    value, _ = call(old, new, credit, STEP.mask.double(), aggregation, ActorConfig(**settings))
    return value.item(), torch.autograd.grad(value, new_M)[0]


def difference(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def within(divergence: float) -> dict[str, float]:
    """Return verl's keys of a trust region and of the cap of its ratios."""
    return dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), divergence) | {"clip_ratio_c": 20.0}


MEAN, NO_CLIP = "token-mean", {"clip_ratio_low": 1e9, "clip_ratio_high": 1e9}
LOSSES = {
    "importance_sampling": ('loss = "importance_sampling"', "vanilla", MEAN, NO_CLIP),
    "sequence_mean": ('aggregation = "sequence_mean"', "vanilla", "seq-mean-token-mean", NO_CLIP),
    "constant": (
        'aggregation = "constant"',
        "vanilla",
        "seq-mean-token-sum-norm",
        NO_CLIP | {"loss_scale_factor": MAX_TOKENS},
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
    "dppo_tv": ('loss = "dppo_tv"', "dppo_tv", MEAN, within(0.15)),
    "dppo_kl": ('loss = "dppo_kl"', "dppo_kl", MEAN, within(0.05)),
    "dro": ('loss = "dro"', "dro", MEAN, {"policy_loss": SimpleNamespace(dro_beta=0.1)}),
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
    of_k3 = torch.autograd.grad(verl.core.kl_penalty(new_M, reference_M, "k3+").sum(), new_M)[0]
    assert difference(of_k3, of_k2) < TOLERANCE
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
