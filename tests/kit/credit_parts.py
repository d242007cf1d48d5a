"""Credit flows of toy parts and groups of made-up numbers: tests name the stage, the real pipeline runs them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.advantages import amplify_planning, gtpo_weights, top_rho_threshold
from retrain.credit.flow import CreditFlow
from retrain.credit.pipeline import CreditGroup
from retrain.credit.specs import AdvantageSpec, TransformSpec, UncertaintySpec
from retrain.kernel.plugins.resolve import Found
from retrain.kernel.registry import Owner
from retrain.kernel.types import Completion, Example, Group, Score, StopReason


def make_flow(**changes: Any) -> CreditFlow:
    """`make_flow(transform=..., mask_rho=...)`: centred advantage, surprisal, no transform, unless given."""
    parts: dict[str, Any] = {
        "advantage": AdvantageSpec(name="toy_centre", compute=lambda ctx: ctx.rewards_G - ctx.rewards_G.mean()),
        "transform": TransformSpec(name="toy_none"),
        "uncertainty": UncertaintySpec(name="toy_nll", compute=lambda ctx: -ctx.logprobs_T),
        "stages": {"gtpo": gtpo_weights, "hicra": amplify_planning, "top_rho": top_rho_threshold},
        "gtpo_beta": 0.1,
        "hicra_alpha": 0.2,
    }
    return CreditFlow(**(parts | changes))


def make_credit_group(rewards: Sequence[float], logprobs: Sequence[Sequence[float]], **more: Any) -> CreditGroup:
    """A group, without planning tokens unless given."""
    planning = more.pop("planning", [[False] * len(lp) for lp in logprobs])
    return CreditGroup(
        rewards_G=np.array(rewards, dtype=np.float64),
        logprobs_G=[np.array(lp, dtype=np.float64) for lp in logprobs],
        planning_G=[np.array(mask, dtype=np.bool_) for mask in planning],
        **({"name": "group 0"} | more),
    )


def completion(tokens: Sequence[int], logprobs: Sequence[float], **more: Any) -> Completion:
    """A completion of these tokens, of which each 99 is one of a prompt."""
    action_T = np.array([token != 99 for token in tokens])
    logprobs_T = np.zeros(len(tokens))
    logprobs_T[action_T] = logprobs
    given = {"text": "", "stop_reason": StopReason.EOS, "policy_version": 0, "starts": (0,)} | more
    return Completion(tokens_T=np.array(tokens), action_T=action_T, logprobs_T=logprobs_T, **given)


def group(*completions: Completion, scores: Sequence[Score | float]) -> Group:
    given = tuple(score if isinstance(score, Score) else Score.of(score) for score in scores)
    return Group(example=Example(id="x", prompt="p", reference="r"), completions=completions, scores=given)


def found(target: object) -> Found:
    """The name `mine` of the distribution my-dist 1, resolved to `target`."""
    return Found(name="mine", target=target, owner=Owner(distribution="my-dist", version="1"))
