"""The credit of a run's trained tokens: by completion, by rank of uncertainty, planning tokens or not.

|A| is the weight of a token's log-probability in the loss, all other things equal, and |A| (1 - p) the size of the
gradient at that token's logit, under the policy that sampled it. Neither is the gradient of the parameters: tokens add
up and cancel there, and clipping, importance weights and a loss by sequences change their weights.
`_N` one entry per completion, `_A` one per action token of a step, `_T` one per trained one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from retrain.inspect.signal.drawn import Drawn, Ints
from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Floats, Mask
from retrain.records.run import Run

DECILES = 10
STORED = ("lengths", "advantages", "logprobs", "entropies", "planning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some tokens of trained rows: their number, sum of |A|, and sum of |A| (1 - p)."""

    tokens: int = 0
    credit: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditShares:
    """Credit of all trained tokens whose step has a token file.

    `is_known_N`, `zero_tokens_N` and `credit_N`: whether a completion's tokens are stored, the number of them with zero
    credit, and their sum of |A|. `surprisal` and `entropy` are tenths of the tokens of each step, the most uncertain
    first; `entropy` is empty where the sampler gave none. `planning` is None without a detector.
    """

    is_known_N: Mask
    zero_tokens_N: Ints
    credit_N: Floats
    total: Share
    surprisal: tuple[Share, ...]
    entropy: tuple[Share, ...]
    planning: Share | None
    notes: tuple[str, ...]


def read_credit(run: Run, drawn: Drawn) -> CreditShares:
    """Read the credit of a run, one step's token file after another; a note where files are missing or do not fit."""
    size = drawn.step_N.size
    is_known_N, zero_N, credit_N = np.zeros(size, np.bool_), np.zeros(size, np.int64), np.zeros(size)
    sums = {name: np.zeros((DECILES, 3)) for name in ("surprisal", "entropy")} | {"planning": np.zeros((2, 3))}
    is_whole, missing = dict.fromkeys(sums, True), 0
    starts = np.flatnonzero(np.diff(drawn.step_N, prepend=-1, append=-1)).tolist()  # and the end, unless it is empty
    for start, stop in pairwise(starts):
        arrays = _arrays(run, int(drawn.step_N[start]), drawn.tokens_N[start:stop])
        if arrays is None:
            missing += 1
            continue
        lengths, credit_A = arrays["lengths"], np.abs(arrays["advantages"])
        owner_A = np.repeat(np.arange(stop - start), lengths)
        is_known_N[start:stop] = True
        zero_N[start:stop] = np.bincount(owner_A[credit_A == 0.0], minlength=stop - start)
        credit_N[start:stop] = np.bincount(owner_A, weights=credit_A, minlength=stop - start)
        is_trained_A = drawn.is_trained_N[start:stop][owner_A]
        logprobs_T, credit_T = np.minimum(arrays["logprobs"][is_trained_A], 0.0), credit_A[is_trained_A]
        columns = (np.ones_like(credit_T), credit_T, -credit_T * np.expm1(logprobs_T))
        for name, stored in (("surprisal", "logprobs"), ("entropy", "entropies"), ("planning", "planning")):
            if stored not in arrays:
                is_whole[name] = False
                continue
            values_T = logprobs_T if name == "surprisal" else arrays[stored][is_trained_A]
            sums[name] += _by_mark(values_T, columns) if name == "planning" else _by_tenth(np.abs(values_T), columns)
    note = f"{missing:,} of {len(starts) - 1:,} steps have no token file that fits: their credit"
    is_whole = {name: whole and bool(is_known_N.any()) for name, whole in is_whole.items()}
    return CreditShares(
        is_known_N=is_known_N,
        zero_tokens_N=zero_N,
        credit_N=credit_N,
        total=_share(sums["surprisal"].sum(axis=0)),
        surprisal=tuple(map(_share, sums["surprisal"])),
        entropy=tuple(map(_share, sums["entropy"])) if is_whole["entropy"] else (),
        planning=_share(sums["planning"][1]) if is_whole["planning"] else None,
        notes=(note,) if missing else (),
    )


def _arrays(run: Run, step: int, lengths_N: Ints) -> Mapping[str, np.ndarray] | None:
    """Read the token arrays of a step; None unless they are those of its completions."""
    try:
        arrays = run.token_arrays(step, STORED)
        if arrays is None:
            return None
        flat = [arrays[name] for name in arrays if name != "lengths"]
        fits = np.array_equal(arrays["lengths"], lengths_N) and {*map(len, flat)} == {int(lengths_N.sum())}
        fits = fits and bool(np.isfinite(arrays["advantages"]).all() and np.isfinite(arrays["logprobs"]).all())
        return arrays if fits else None
    except (ConfigError, KeyError):
        return None


def _by_tenth(uncertainty_T: np.ndarray, columns: Sequence[np.ndarray]) -> Floats:
    """Sum the columns by tenths of the tokens, the most uncertain first; ties in the order of the file.

    One sort of (bits of the float, place) as whole numbers takes half the time of a stable one of floats.
    """
    size = uncertainty_T.size
    bits_T = uncertainty_T.astype(np.float32).view(np.uint32)  # of floats >= 0 in the order of the floats
    keys_T = (~bits_T).astype(np.uint64) << np.uint64(32) | np.arange(size, dtype=np.uint64)
    keys_T.sort()
    order = (keys_T & np.uint64(0xFFFFFFFF)).astype(np.int64)
    cuts = np.arange(DECILES + 1) * size // DECILES
    summed = [np.concatenate([np.zeros(1), np.cumsum(values_T[order], dtype=np.float64)])[cuts] for values_T in columns]
    return np.diff(np.stack(summed, axis=1), axis=0)


def _by_mark(is_marked_T: np.ndarray, columns: Sequence[np.ndarray]) -> Floats:
    """Sum the columns over unmarked and marked tokens."""
    marks_T = is_marked_T.astype(np.bool_)
    return np.array([[values_T[each].sum(dtype=np.float64) for values_T in columns] for each in (~marks_T, marks_T)])


def _share(sums_3: Floats) -> Share:
    return Share(tokens=int(sums_3[0]), credit=float(sums_3[1]), pull=float(sums_3[2]))
