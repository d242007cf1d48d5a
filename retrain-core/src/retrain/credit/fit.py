"""A flow of credit against the loss and the backend that train on it, and the part of a loss that stays idle."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.credit.flow import CreditFlow
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.losses import LossTraits
from retrain.kernel.declared import Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins


def fit_problems(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    """Problems with credit that is finer than the loss takes, and with numbers that the trainer cannot provide.

    The credit of a plugin's own `Algorithm` is checked once it is assigned.
    """
    loss, advantage = config.algorithm.loss, flow.advantage.name
    traits = plugins.traits_of(Kind.LOSS, loss, LossTraits)
    takes = traits.credit if traits and not flow.is_custom else "token"
    by, path = "", "algorithm.loss"
    by_turn = flow.advantage.by_turn and config.algorithm.level == "turn"
    if takes != "token" and flow.advantage.compute_tokens and not flow.whole and not by_turn:
        by = f"advantage {advantage!r}"
        why = "it has one ratio for each completion, so every token gets the same weight"
        fix = 'use loss = "importance_sampling", "ppo" or "cispo"'
    elif takes == "completion" and _weighs_tokens(flow):
        by, why = repr(flow.name), "it takes one advantage for all tokens of a completion"
        path, fix = "algorithm.transform_mode", 'set transform_mode = "none", without surprisal_mask_rho'
    if by:
        what = f"the loss {loss!r} does not go with credit by token, and {by} gives it"
        yield Problem(code="loss.credit-too-fine", where=config.place(path), what=what, why=why, fix=fix)
    capabilities = declared_capabilities(config, plugins)
    if flow.needs_squared_probs and capabilities and not capabilities.provides_squared_probs:
        lacks = f"and backend {config.backend.backend!r} cannot provide them"
        what = f"{advantage!r} needs the trainer's sums of squared probabilities, {lacks}"
        where, fix = config.place("algorithm.advantage_mode"), 'use advantage_mode = "grpo", or backend = "local"'
        yield Problem(code="backend.no-squared-probs", where=where, what=what, fix=fix)


def _weighs_tokens(flow: CreditFlow) -> bool:
    """True if tokens of one completion may get different credit."""
    transform = flow.transform
    parts = (transform.use_gtpo, transform.apply_hicra, transform.post_process, transform.compute_context)
    return any((*parts, flow.whole, flow.mask_rho))


def idle_part(config: Config, plugins: Plugins) -> str:
    """One line on the part of the loss that does nothing with one update per step; otherwise empty."""
    algorithm, training = config.algorithm, config.training
    traits = plugins.traits_of(Kind.LOSS, algorithm.loss, LossTraits)
    idle = [traits.idle if traits else "", "off_policy_mask" if algorithm.off_policy_mask else ""]
    names = " and ".join(filter(None, idle))
    if not names or training.minibatches * training.epochs > 1:
        return ""
    return (
        f"{names}: no effect with one update per step, since every ratio is 1 on fresh samples whose log-probabilities "
        "are the trainer's; set [training] minibatches or epochs"
    )
