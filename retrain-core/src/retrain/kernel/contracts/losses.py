"""Contract of a policy loss: the specs and contexts of `retrain_register_losses`.

Tensors belong to the backend that applies the loss (torch on `local`), so that nothing here imports a library. Shape
suffix `_M`: one entry per action token of a pack, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from retrain.kernel.types import Floats, TrainBatch

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTraits:
    """`traits` of a loss: its backends, and whether it supports `dual_clip` and other clips.

    `credit` is the finest that it takes: `token` any, `weighted` one advantage per completion that a transform may
    weigh, `completion` the same number for all of its tokens; a configuration with finer credit is refused. The latter
    two have one ratio for a completion, or with `[algorithm] level = "turn"` for each of its turns. `idle`
    names the part of it that does nothing while the ratios are 1, as `explain` says with one update per step.
    """

    backends: frozenset[str]
    dual_clip: bool = False
    clips: bool = True
    credit: Literal["token", "weighted", "completion"] = "token"
    idle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossClip:
    """Bounds of a loss: the ratio counts from 1 - `eps` up to 1 + `eps_high`, unless the loss uses them differently.

    As `LossSpec.clip` these are the defaults of `[algorithm] clip_eps` and `clip_eps_high`; `eps_high` = 0 means `eps`.
    `dual` bounds the terms of negative advantages; 0 = off.
    """

    eps: float = 0.0
    eps_high: float = 0.0
    dual: float = 0.0

    def resolved(self, eps: float, eps_high: float, dual: float) -> LossClip:
        """These defaults, replaced by the keys of `[algorithm]` that are not 0."""
        low = eps or self.eps
        return LossClip(eps=low, eps_high=eps_high or self.eps_high or low, dual=dual or self.dual)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossContext:
    """The action tokens of one pack, as a loss sees them.

    `new_M` are the log-probabilities that carry the gradient, `old_M` the ones that the ratio is relative to, and
    `ratios_M` = exp(clamp(new - old, -20, 20)). `sequences_M` is the index of each token's sequence in the pack, from 0
    to `num_sequences` - 1; no sequence is cut. With `[algorithm] level = "turn"` each turn is one. `params`
    are `[algorithm.loss_params]` as the loss's model of them, or as a mapping if it declares none.
    """

    new_M: Any
    old_M: Any
    ratios_M: Any
    advantages_M: Any
    sequences_M: Any
    num_sequences: int
    clip: LossClip
    params: Any = None

    def sequence_sum(self, values_M: Any) -> Any:
        """Sum of `values_M` over its sequence, for each token; the gradient flows through it."""
        # Sequences of a pack differ in length, and no padding exists to reshape by. `index_add` has no order on CUDA.
        zeros_S, place = values_M.new_zeros(self.num_sequences), (self.sequences_M,)
        return zeros_S.index_put(place, values_M, accumulate=True)[place]

    def sequence_mean(self, values_M: Any) -> Any:
        """Mean of `values_M` over its sequence, for each token; the gradient flows through it."""
        return self.sequence_sum(values_M) / self.sequence_sum(values_M.new_ones(len(values_M)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTerms:
    """Result of a loss for a pack: a term per token, whose mean the backend maximises.

    `clipped_M` (boolean) counts for `clip_fraction`; None = nothing.
    """

    terms_M: Any
    clipped_M: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """A policy loss: `compute(ctx)` returns `LossTerms`, or the bare terms, one finite number per token.

    The terms are summed with weights of the whole optimizer step: divide by nothing in here. `clip` and `aggregation`
    (`token_mean`, `sequence_mean` or `constant`) are its defaults. `stops_gradient`: it detaches the ratios, as CISPO
    does, so its gradient is the one of its terms with the ratios held fixed. `drops(ctx)` gets all action tokens of the
    optimizer step, without gradient, and returns True for those whose terms count 0, also in `clip_fraction`. It costs
    a forward pass.
    """

    name: str
    compute: Callable[[LossContext], LossTerms | Any]
    clip: LossClip = LossClip()
    aggregation: str = "token_mean"
    stops_gradient: bool = False
    drops: Callable[[LossContext], Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossTrial:
    """A step to try a loss on, without a model.

    `logprobs` are the trainer's, an array of each row's length, and `packs` are the rows of each pack, in order.
    """

    batch: TrainBatch
    logprobs: Sequence[Floats]
    packs: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossValue:
    """The loss of a step, its derivative by every log-probability (0 where nothing was sampled), and clipped tokens."""

    loss: float
    gradients: Sequence[Floats]
    clipped: int
