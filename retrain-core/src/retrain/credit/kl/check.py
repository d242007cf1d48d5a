"""Configurations of `[kl]` and `[entropy]` that are refused before anything loads."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.kernel.config.plugin_tables import EntropyTable, KlTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins

SWITCHES = {"entropy": "entropy.coef", "kl_cov": "entropy.kl_cov", "clip_cov": "entropy.clip_cov"}


def problems_of(config: Config, plugins: Plugins) -> list[Problem]:
    kl, entropy = config.kl, config.entropy
    return [*_unsupported(config, plugins, kl), *_of_kl(config, kl), *_of_covariances(config, entropy)]


def _unsupported(config: Config, plugins: Plugins, kl: KlTable) -> Iterator[Problem]:
    """Terms that are switched on and missing from the backend's `Capabilities.regularisers`."""
    wanted = {f"kl_{kl.where}": "kl.coef"} if kl.coef else {}
    wanted |= {name: path for name, path in SWITCHES.items() if config.value(path, 0.0)}
    declared = declared_capabilities(config, plugins) if wanted else None
    offered = declared.regularisers if declared else frozenset()
    for name in wanted.keys() - offered:
        path, backend = wanted[name], config.backend.backend
        needed = "reference log-probabilities" if name == "kl_reward" else f"the term {name!r} of the loss"
        what = (
            f"{path.partition('.')[2]} = {config.value(path, 0.0)} needs {needed}, and backend {backend!r} lacks that"
        )
        fix = "set it to 0, or use a backend that has it, such as local"
        if name == "kl_loss" and "kl_reward" in offered:
            fix = 'set where = "reward", or coef = 0'
        yield Problem(where=config.place(path), what=what, fix=fix)


def _of_kl(config: Config, kl: KlTable) -> Iterator[Problem]:
    if kl.where == "reward" and kl.estimator in ("k2", "k3"):
        what = f"estimator = {kl.estimator!r} is refused in the reward"
        why = "as a reward only k1 has the gradient of the KL divergence from the reference"
        fix = 'set estimator = "k1", or where = "loss"'
        yield Problem(where=config.place("kl.estimator"), what=what, why=why, fix=fix)
    if bool(kl.target) != bool(kl.horizon):
        given, missing = ("target", "horizon") if kl.target else ("horizon", "target")
        what, why = f"{given} is set and {missing} is not", "both steer the coefficient"
        yield Problem(where=config.place(f"kl.{given}"), what=what, why=why, fix=f"set {missing} too, or {given} = 0")
    if kl.target and not kl.coef:
        what, why = f"target = {kl.target} has no effect with coef = 0", "steering multiplies the coefficient"
        yield Problem(where=config.place("kl.target"), what=what, why=why, fix="start from a coef such as 0.01")


def _of_covariances(config: Config, entropy: EntropyTable) -> Iterator[Problem]:
    where = config.place("entropy.kl_cov")
    if entropy.kl_cov and entropy.clip_cov:
        what, why = (
            "kl_cov and clip_cov are both on",
            "both act on the same tokens, and clip_cov takes away their gradient",
        )
        yield Problem(where=where, what=what, why=why, fix="set one of them to 0")
    if entropy.clip_cov and not entropy.clip_cov_low < entropy.clip_cov_high:
        what = f"clip_cov_low = {entropy.clip_cov_low} is not below clip_cov_high = {entropy.clip_cov_high}"
        fix = "set clip_cov_low below clip_cov_high, such as 1 and 5"
        yield Problem(where=config.place("entropy.clip_cov_low"), what=what, fix=fix)
    if not entropy.kl_cov:
        return
    if config.algorithm.loss != "importance_sampling":
        what = f"kl_cov is refused with loss = {config.algorithm.loss!r}"
        fix = 'set loss = "importance_sampling", or use clip_cov'
        yield Problem(where=where, what=what, why="it takes the place of a clipped ratio", fix=fix)
    updates = config.training.minibatches * config.training.epochs
    if updates == 1 and "," not in config.backend.devices:
        what, why = "kl_cov has no effect with one update per step", "the policy is then still the one that sampled"
        yield Problem(
            where=where, what=what, why=why, fix="set [training] minibatches or epochs above 1, or kl_cov = 0"
        )
