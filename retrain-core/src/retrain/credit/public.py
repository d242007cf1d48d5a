"""Credit in one call, for notebooks, tests and plugins; the training loop goes through the same pipeline."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from retrain.credit.flow import GTPO, HICRA, TOP_RHO, CreditFlow, build_flow, find_stage
from retrain.credit.pipeline import CreditGroup, assign_credit
from retrain.credit.specs import CreditStage, Numbers
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import NOTHING, Floats, Mask, Turns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComposableAdvantages:
    """Token advantages (one array per completion), the uncertainties behind them before and after pooling, metrics."""

    token_advs: tuple[Floats, ...]
    uncertainties: tuple[Floats, ...]
    pooled: tuple[Floats, ...]
    metrics: Mapping[str, float]
    flow: CreditFlow


def compute_composable_advantages(
    rewards_G: Numbers,
    logprobs_G: Sequence[Numbers],
    planning_masks_G: Sequence[Any] | None = None,
    *,
    advantage_mode: str = "maxrl",
    transform_mode: str = "gtpo_sepa",
    gtpo_beta: float = 0.1,
    hicra_alpha: float = 0.2,
    sepa_lambda: float = 0.0,
    uncertainty_kind: str = "surprisal",
    surprisal_mask_rho: float = 0.0,
    advantage_params: Mapping[str, Any] = NOTHING,
    transform_params: Mapping[str, Any] = NOTHING,
    entropies_G: Sequence[Numbers] | None = None,
    batch_norm: bool = False,
    advantage_clip: float = 0.0,
    named_rewards: Mapping[str, Numbers] | None = None,
    texts_G: Sequence[Sequence[str]] | None = None,
    turns_G: Sequence[Turns] = (),
) -> ComposableAdvantages:
    """Token advantages of one group under any installed advantage and transform; the group is the whole step.

    `rewards_G` [G]; `logprobs_G`, `planning_masks_G`, `entropies_G` and `texts_G` (for a transform with `needs_text`)
    hold one sequence of action tokens per completion, `named_rewards` [G] under each name the rewards behind
    `rewards_G`, `turns_G` the turns of each episode. PluginError for an unknown
    name, CreditError for wrong lengths or non-finite numbers.
    """
    algorithm = AlgorithmTable(
        advantage_mode=advantage_mode,
        transform_mode=transform_mode,
        uncertainty_kind=uncertainty_kind,
        surprisal_mask_rho=surprisal_mask_rho,
        advantage_params=dict(advantage_params),
        transform_params=dict(transform_params),
    )
    flow = build_flow(Config(tables={"algorithm": algorithm}), installed_plugins())
    strengths: dict[str, Any] = {"gtpo_beta": gtpo_beta, "hicra_alpha": hicra_alpha}
    flow = replace(flow, **strengths, batch_norm=batch_norm, advantage_clip=advantage_clip)
    masks = planning_masks_G if planning_masks_G is not None else [np.zeros(len(lp), np.bool_) for lp in logprobs_G]
    group = CreditGroup(
        rewards_G=np.asarray(rewards_G, dtype=np.float64),
        logprobs_G=[np.asarray(logprobs, dtype=np.float64) for logprobs in logprobs_G],
        planning_G=[np.asarray(mask, dtype=np.bool_) for mask in masks],
        entropies_G=None if entropies_G is None else [np.asarray(e, dtype=np.float64) for e in entropies_G],
        named_rewards={name: np.asarray(rewards, dtype=np.float64) for name, rewards in (named_rewards or {}).items()},
        texts_G=texts_G,
        turns_G=turns_G,
        name="group 0",
    )
    result = assign_credit([group], flow, sepa_lambda=sepa_lambda)
    return ComposableAdvantages(
        token_advs=result.token_advs[0],
        uncertainties=result.uncertainties[0],
        pooled=result.pooled[0],
        metrics=result.metrics,
        flow=flow,
    )


def gtpo_weights(uncertainty_T: Floats, beta: float) -> Floats:
    """GTPO weight of each token of a completion, `[T]`, computed by retrain-sepa; PluginError when it is missing."""
    weights_T: Floats = public_stage(GTPO, needed_by="gtpo_weights()").apply(uncertainty_T, beta)
    return weights_T


def amplify_planning(advantages_T: Floats, planning_T: Mask, alpha: float) -> Floats:
    """HICRA: more credit on planning tokens, `[T]`, computed by retrain-sepa; PluginError when it is missing."""
    amplified_T: Floats = public_stage(HICRA, needed_by="amplify_planning()").apply(advantages_T, planning_T, alpha)
    return amplified_T


def top_rho_threshold(uncertainties: Sequence[Floats], rho: float) -> float:
    """Smallest uncertainty that keeps its credit under a top-rho mask, over all given tokens.

    Computed by retrain-sepa; PluginError when it is missing.
    """
    return float(public_stage(TOP_RHO, needed_by="top_rho_threshold()").apply(uncertainties, rho))


def public_stage(name: str, *, needed_by: str) -> CreditStage:
    return find_stage(installed_plugins(), name, where="retrain.advantages", needed_by=needed_by)


def installed_plugins() -> Plugins:
    """Everything that is plugged in, discovered again only when the answer could have changed.

    It can after a change of `RETRAIN_PLUGINS`, `RETRAIN_BLOCK` or `sys.path`, and of a folder on that path, since
    installing a distribution changes one. The result is shared: read it only. A run calls `load_plugins` itself.
    """
    settings = os.environ.get("RETRAIN_PLUGINS"), os.environ.get("RETRAIN_BLOCK")
    return _discovered(settings, tuple((folder, _changed_at(folder)) for folder in sys.path))


# Bounded, because each entry holds all plugins and a path that has changed never comes back.
@lru_cache(maxsize=4)
def _discovered(settings: tuple[str | None, str | None], path: tuple[tuple[str, int], ...]) -> Plugins:
    return load_plugins()


def _changed_at(folder: str) -> int:
    try:
        # In nanoseconds, because two installations may follow each other within a second.
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
