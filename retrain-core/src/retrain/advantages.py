"""The public credit API: the building blocks of advantage, transform, uncertainty and algorithm plugins.

Credit flows in one direction. The advantage sees only rewards: of a group, of the whole step or of single tokens (then
each token gets a separate number: A_iT instead of A_i below). The token transform decides the share of that advantage
that each token receives, by uncertainty, planning mask and, if configured, text:

    A_i = advantage(rewards_G)                       one number per completion; then batch_norm, advantage_clip
    U_T = uncertainty(log-probabilities, entropies)  one number >= 0 per action token
    U_T = entropy_transform(U_T, planning_T, lambda) e.g. SEPA pooling
    w_T = max(0, 1 + beta (U_T / mean U - 1))        GTPO weight, 1 when `use_gtpo` is off
    A_T = post_process(A_i w_T)                      e.g. HICRA; then the top-rho mask

A plugin that needs none of these stages registers a whole `Algorithm` instead: `assign(step, groups) -> Credit`.
No gradient flows through credit. Arrays hold action tokens only; plugins may use lists or numpy arrays.
"""

from retrain.kernel.lazy_names import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
