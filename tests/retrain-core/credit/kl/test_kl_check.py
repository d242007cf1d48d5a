"""What `[kl]` and `[entropy]` refuse before anything loads, by key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from retrain.credit import retrain_check_config as problems_of
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.plugins.discover import load_plugins


@pytest.mark.parametrize(
    ("flags", "key", "what"),
    [
        ("--backend tinker --kl-coef 0.1", "[kl] coef", "'kl_loss' of the loss, and backend 'tinker' lacks"),
        ("--backend prime_rl --kl-coef 0.1", "[kl] coef", "'kl_loss' of the loss, and backend 'prime_rl' lacks"),
        ("--backend prime_rl --kl-coef 0.1 --kl-where reward", "[kl] coef", "needs reference log-probabilities"),
        ("--backend tinker --entropy-coef 0.1", "[entropy] coef", "needs the term 'entropy'"),
        ("--backend prime_rl --entropy-clip-cov 0.1", "[entropy] clip_cov", "needs the term 'clip_cov'"),
        ("--kl-coef 0.1 --kl-where reward --kl-estimator k3", "[kl] estimator", "'k3' is refused in the reward"),
        ("--kl-coef 0.1 --kl-target 0.1", "[kl] target", "target is set and horizon is not"),
        ("--kl-coef 0.1 --kl-horizon 10", "[kl] horizon", "horizon is set and target is not"),
        ("--kl-target 0.1 --kl-horizon 10", "[kl] target", "no effect with coef = 0"),
        ("--entropy-kl-cov 0.1", "[entropy] kl_cov", "no effect with one update per step"),
        ("--entropy-kl-cov 0.1 --epochs 2 --loss ppo", "[entropy] kl_cov", "refused with loss = 'ppo'"),
        ("--entropy-kl-cov 0.1 --epochs 2 --entropy-clip-cov 0.1", "[entropy] kl_cov", "both on"),
        ("--entropy-clip-cov 0.1 --entropy-clip-cov-low 5", "[entropy] clip_cov_low", "is not below"),
    ],
)
def test_refused_by_key(flags: str, key: str, what: str, tables: Mapping[str, TableEntry]) -> None:
    arguments = [*(() if "--backend" in flags else ("--backend", "local")), *flags.split()]
    config, problems = load_config(None, tables=tables, arguments=arguments)
    assert problems == []
    (problem,) = problems_of(config, load_plugins())
    assert problem.where.startswith("--")
    assert key.split()[-1].replace("_", "-") in problem.where
    assert what in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--backend tinker",
        "--backend prime_rl",
        "--kl-coef 0.1 --kl-where reward --kl-estimator k1",
        "--kl-coef 0.1 --kl-estimator k1 --kl-target 0.1 --kl-horizon 1000",
        "--entropy-kl-cov 0.001 --minibatches 2 --entropy-coef 0.01",
        "--entropy-clip-cov 0.001 --loss ppo",
    ],
)
def test_accepted(flags: str, tables: Mapping[str, TableEntry]) -> None:
    arguments = [*(() if "--backend" in flags else ("--backend", "local")), *flags.split()]
    config, problems = load_config(None, tables=tables, arguments=arguments)
    assert (problems, problems_of(config, load_plugins())) == ([], [])
