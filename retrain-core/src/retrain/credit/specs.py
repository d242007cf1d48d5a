"""Specs and contexts of `retrain.advantages`; planning detectors and controllers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from retrain.kernel.types import Floats, Mask, Tokens, Turns

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config

Numbers = Sequence[float] | Floats
Params = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdvantageContext:
    """Input of an episode advantage: the scores of one group, and its own parameters."""

    rewards_G: Floats
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepAdvantageContext:
    """Input of an advantage that sees the whole step: every judged completion, group by group, and its own parameters.

    `rewards_PG[p]` are the rewards of group p; groups of one and groups whose rewards are all equal are included, and a
    group without a verdict is an empty array. `lengths_PG[p]` are the sampled tokens of each completion.
    `named_rewards_PG[p]` holds, by name, the unweighted rewards or measurements that every completion of the group has
    (`Score.parts`). `reward_weights` is `[reward.weights]`. `shaping_PG` is the share of each reward that a `Shaper`
    added (a punishment of long answers, of KL): part of `rewards_PG`, and of no named reward. `greedy_P`, with
    `needs_greedy`, is the reward of each prompt's greedy completion, without `shaping_PG`; NaN without a verdict.
    """

    rewards_PG: Sequence[Floats]
    lengths_PG: Sequence[Tokens]
    named_rewards_PG: Sequence[Mapping[str, Floats]]
    shaping_PG: Sequence[Floats]
    greedy_P: Floats = field(default_factory=lambda: np.zeros(0))
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenAdvantageContext:
    """Input of an advantage that gives each token a separate number: one group, one array per completion.

    `token_rewards_G` are the rewards of single tokens (`Completion.rewards_T`), 0 for tokens that got none;
    `logprobs_G` the behaviour log-probabilities. `rewards_G` are the scores, None for an advantage with
    `needs_verdict=False`, whose completions need not have one. `squared_probs_G`, with `needs_squared_probs`, is the
    sum of squared probabilities of the trainer's distribution at each token. `turns_G` are the turns of each episode; a
    completion without an environment is a single turn.
    """

    token_rewards_G: Sequence[Floats]
    logprobs_G: Sequence[Floats]
    rewards_G: Floats | None = None
    squared_probs_G: Sequence[Floats] = ()
    turns_G: Sequence[Turns] = ()
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSpec:
    """An advantage, by one of three functions.

    `compute(ctx)` sees one group and returns one finite number per completion; it is called for informative groups.
    `compute_step(step)` sees the whole step (`StepAdvantageContext`) and returns one such array per group; a group
    without information (all rewards equal) is trained, too, where its numbers are not all 0. `compute_tokens(ctx)` sees
    one group (`TokenAdvantageContext`) and returns one array per completion, with a number per action token; transforms
    then weigh each token's own number.

    `needs_group`: it compares the completions of a group, so a run with `group_size = 1` is refused before anything
    loads. `needs_token_rewards`: it gets the rewards of single tokens. `needs_greedy`, for `compute_step`: one greedy
    completion more is sampled and scored for each prompt. `needs_squared_probs`, for `compute_tokens`: the trainer
    measures every completion, and a backend that cannot is refused. `needs_verdict=False`, for `compute_tokens` only:
    every completion is trained, whatever its score or status. `by_turn`, for `compute_tokens` only: a group whose
    scores are all equal is trained, too, where its turns get credit.
    """

    name: str
    compute: Callable[[AdvantageContext], Numbers] | None = None
    needs_group: bool = False
    compute_step: Callable[[StepAdvantageContext], Sequence[Numbers]] | None = None
    compute_tokens: Callable[[TokenAdvantageContext], Sequence[Numbers]] | None = None
    needs_token_rewards: bool = False
    needs_verdict: bool = True
    needs_greedy: bool = False
    needs_squared_probs: bool = False
    by_turn: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UncertaintyContext:
    """Input of an uncertainty kind: the action tokens of one completion; all values in nats."""

    logprobs_T: Floats
    entropies_T: Floats | None = None
    planning_T: Mask | None = None
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertaintySpec:
    """An uncertainty kind: `compute(ctx)` returns one finite number >= 0 per action token.

    With `needs_entropy`, a configuration whose engine cannot report entropies is refused before the model loads.
    """

    name: str
    compute: Callable[[UncertaintyContext], Numbers]
    needs_entropy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformContext:
    """Input of a whole-transform function `f(ctx)`: one group, one array per completion.

    `advantages_G` are the episode advantages, `uncertainties_G` the configured uncertainty before any pooling.
    `tokens_G` and `texts_G` (one text per sampled token, joining to the completion's) are there with `needs_text`,
    `token_rewards_G` with `needs_token_rewards`: 0 for tokens without a reward.
    """

    advantages_G: Floats
    rewards_G: Floats
    logprobs_G: Sequence[Floats]
    uncertainties_G: Sequence[Floats]
    planning_masks_G: Sequence[Mask]
    entropies_G: Sequence[Floats] | None = None
    tokens_G: Sequence[Tokens] | None = None
    texts_G: Sequence[Sequence[str]] | None = None
    token_rewards_G: Sequence[Floats] | None = None
    sepa_lambda: float = 0.0
    gtpo_beta: float = 0.1
    hicra_alpha: float = 0.2
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransformOutput:
    """One array of token advantages per completion, and metrics that are averaged over the step's groups."""

    token_advs: Sequence[Numbers]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditStage:
    """The function of one stage of credit, and the strength that the configuration sets.

    `apply` depends on the stage: `gtpo` is `f(uncertainty_T, strength) -> weights_T`; `hicra` is `f(advantages_T,
    planning_T, strength) -> advantages_T`; `top_rho` is `f(uncertainties, strength) -> threshold`, over one array per
    completion of the step. `strength(config)` reads the owner's table, or returns its default without one.
    """

    apply: Callable[..., Any]
    strength: Callable[[Config], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSpec:
    """A token transform, described by the stages it uses.

    `entropy_transform(uncertainty_T, planning_T, sepa_lambda)` returns new uncertainties; `post_process(advs_T,
    planning_T, params)` returns new advantages, after HICRA if `apply_hicra`. `compute_context(ctx)` replaces all
    stages by one function of the group. `use_gtpo` and `apply_hicra` switch on the stages `gtpo` and `hicra` of
    retrain-sepa. `needs_planning`: it gets planning masks (all False otherwise); `uses_sepa_controller`: lambda of the
    controller named `controller` (0 otherwise); `needs_text`: ids and text of the tokens, for `compute_context`;
    `needs_token_rewards`: the rewards of single tokens. `params` is passed to `post_process` and `compute_context`.
    `stages` are the ones that this transform's distribution provides to every transform, by name.
    """

    name: str
    use_gtpo: bool = False
    needs_planning: bool = False
    uses_sepa_controller: bool = False
    apply_hicra: bool = False
    entropy_transform: Callable[[Floats, Mask, float], Numbers] | None = None
    post_process: Callable[[Floats, Mask, Params], Numbers] | None = None
    compute_context: Callable[[TransformContext], TransformOutput | Sequence[Numbers]] | None = None
    controller: str = "sepa"
    needs_text: bool = False
    needs_token_rewards: bool = False
    stages: Mapping[str, CreditStage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """A whole pipeline under one name: a fixed pair of modes, or `compute_context(ctx)` in place of everything.

    With `compute_context`, `ctx.advantages_G` holds the raw rewards; the `needs_` fields are as in `TransformSpec`.
    """

    name: str
    advantage_mode: str = ""
    transform_mode: str = ""
    compute_context: Callable[[TransformContext], TransformOutput | Sequence[Numbers]] | None = None
    needs_planning: bool = False
    uses_sepa_controller: bool = False
    needs_entropy: bool = False
    needs_text: bool = False
    needs_token_rewards: bool = False


class PlanningDetector(Protocol):
    """Marks the tokens that plan rather than execute."""

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length; ids are action tokens only. Called once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerView:
    """View that a controller gets after a step: rates over all completions, pooled variance over execution tokens.

    `correct_rate` and `execution_variance` are None when there was nothing to measure.
    """

    step: int
    correct_rate: float | None
    execution_variance: float | None


class Controller(Protocol):
    """A schedule with state: one number per step."""

    def value(self, step: int) -> float:
        """The number for this step, in [0, 1], read before the step's observation."""

    def observe(self, view: ControllerView) -> None: ...

    def metrics(self) -> Mapping[str, float | bool]:
        """Extra fields for the step's line in `metrics.jsonl`."""

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None: ...
