"""The suite of policy losses, on the tokens of a step without a model, by the backend that applies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.credit.configured_loss import as_loss, check_loss
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.losses import LossTraits, LossTrial, LossValue
from retrain.kernel.declared import Kind
from retrain.kernel.seeding import generator
from retrain.kernel.types import Floats, TrainBatch, TrainRow
from retrain.testing.bench import Bench
from retrain.testing.check import expect, fail

# Action tokens of each row: unequal, so that a mean over tokens differs from a mean over sequences.
LENGTHS = (1, 4, 2, 5)
# In other orders too, since a backend may pack rows by length.
CUTS = (((0,), (1,), (2,), (3,)), ((3, 1), (0, 2)), ((2,), (0, 1, 3)))
# Rounding depends on the order of a sum.
REL = 1e-6
# Finite differences have an error of about 1e-16 / STEP from rounding, plus STEP.
STEP, SLOPE_REL = 1e-6, 1e-4
EXTREMES = {
    "the policy of sampling": (0.0, 1.0),
    "advantages of 0": (0.3, 0.0),
    "large advantages": (0.3, 1e6),
    "ratios of e^30": (30.0, 1.0),
    # Gaps are 1 to 1.5 times these numbers: exp of some of them is 0, and of others overflows a double (at 709.8).
    "ratios of e^-700": (-700.0, -1.0),
    "ratios of e^700": (700.0, -1.0),
}


def names_its_backends(bench: Bench) -> None:
    """It says which backends apply it, and a configuration with it is accepted."""
    entries, traits = bench.plugins.find(Kind.LOSS, bench.name), bench.found.traits
    why = "no run can choose it, since no backend is known to apply it"
    fix = 'register it with traits=LossTraits(backends=frozenset({"local"}))'
    expect(not entries or isinstance(traits, LossTraits), f"its traits are {traits!r}", why=why, fix=fix)
    problems = check_loss(_config(bench), bench.plugins)
    what = "; ".join(problem.what for problem in problems)
    expect(not problems, f"a configuration with it is refused: {what}", why="no run can choose it", fix="repair that")


def gives_finite_numbers(bench: Bench) -> None:
    """Loss and gradient are finite on policy and far off it, with no credit and with much."""
    config = _config(bench)
    for name, (gap, scale) in EXTREMES.items():
        batch, logprobs = _step(gap=gap, scale=scale)
        found = _value(bench, config, batch, logprobs)
        expect(
            np.isfinite(found.loss) and all(np.isfinite(each).all() for each in found.gradients),
            f"with {name} the loss is {found.loss} and its gradient {_flat(found)}",
            why="a run rejects such a step, and stops after a few",
            fix="use ctx.ratios_M, whose logarithm is clamped, and bound every term that can overflow",
        )


def has_the_gradient_of_its_value(bench: Bench) -> None:
    """The gradient equals finite differences in float64, on and off policy."""
    config, stops = _config(bench), as_loss(bench.found).stops_gradient
    for gap in (0.0, 0.2):
        batch, logprobs = _step(gap=gap)
        found = _flat(_value(bench, config, batch, logprobs))
        actions = [(n, int(place)) for n, row in enumerate(batch.rows) for place in np.flatnonzero(row.action_T)]
        for number, (row, place) in enumerate(actions):
            slopes = _slopes(bench, config, batch, logprobs, row=row, place=place, stops=stops)
            near = [slope for slope in slopes if np.isclose(found[number], slope, rtol=SLOPE_REL, atol=1e-7)]
            expect(
                near,
                f"the gradient of token {place} of row {row} is {found[number]:.8g}, by finite differences "
                f"{slopes[0]:.8g}",
                why="the policy would be moved in another direction than the loss says",
                fix="detach nothing that the term depends on, or declare LossSpec(stops_gradient=True) if it holds "
                "the ratios fixed",
            )


def raises_what_was_good(bench: Bench) -> None:
    """On policy it makes tokens with positive advantage likelier, and none with a negative one."""
    config = _config(bench)
    for sign in (1.0, -1.0):
        batch, logprobs = _step(gap=0.0)
        rows = tuple(replace(row, advantages_T=np.where(row.action_T, sign, 0.0)) for row in batch.rows)
        moved = -float(_flat(_value(bench, config, replace(batch, rows=rows), logprobs)).sum())
        expect(
            moved > 0.0 if sign > 0 else moved <= 0.0,
            f"where every advantage is {sign:g}, a step of gradient descent moves log-probabilities by {moved:.4g}",
            why="the policy would unlearn the rewarded completions",
            fix="return terms that grow with what should happen: the trainer minimises minus their mean",
        )


def does_not_depend_on_packs_or_order(bench: Bench) -> None:
    """Loss, gradient and clip count are the same however the step is cut into packs, and in any order of its rows."""
    config, (batch, logprobs) = _config(bench), _step(gap=0.2)
    whole = _value(bench, config, batch, logprobs)
    for cut in CUTS:
        found = _value(bench, config, batch, logprobs, packs=cut)
        same = np.allclose(found.loss, whole.loss, rtol=REL, atol=1e-12) and found.clipped == whole.clipped
        expect(
            same and np.allclose(_flat(found), _flat(whole), rtol=REL, atol=1e-12),
            f"the loss is {found.loss:.9g} with {found.clipped} clipped tokens in {len(cut)} packs {cut}, and "
            f"{whole.loss:.9g} with {whole.clipped} in one",
            why="the result of training would depend on how much memory was free",
            fix="return one term per token and divide by nothing that depends on the pack: not its tokens, not its "
            "mean; ctx.sequence_mean averages over a sequence, and no pack cuts a sequence",
        )


def has_the_denominator_of_the_step(bench: Bench) -> None:
    """Every row twice is the same loss; masked sequences count where it is divided by sequences."""
    (batch, logprobs), name = _step(gap=0.2), bench.name
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        config = _config(bench, aggregation=aggregation)
        once = _value(bench, config, batch, logprobs).loss
        twice = _value(bench, config, replace(batch, rows=batch.rows * 2), [*logprobs, *logprobs]).loss
        expect(
            np.isclose(once, twice, rtol=REL),
            f"with {aggregation} the loss of {name!r} is {once:.9g}, and {twice:.9g} with every row twice",
            why="the learning rate would depend on the batch size",
            fix="do not divide by the number of tokens or sequences: the backend averages over the whole step",
        )
        masked = _value(bench, config, replace(batch, num_masked=len(batch.rows)), logprobs).loss
        wanted = once if aggregation == "token_mean" else once / 2
        expect(
            np.isclose(masked, wanted, rtol=REL),
            f"with {aggregation} and as many masked sequences as rows the loss is {masked:.9g}, expected {wanted:.9g}",
            why="masked completions count in the mean over completions",
            fix="repair the backend: the denominator has rows and TrainBatch.num_masked",
        )


def repeats_its_numbers(bench: Bench) -> None:
    """The same step has the same loss and gradient whatever came before."""
    config, (batch, logprobs) = _config(bench), _step(gap=0.2)
    first = _value(bench, config, batch, logprobs)
    _value(bench, config, *_step(gap=-0.4))
    again = _value(bench, config, batch, logprobs)
    expect(
        first.loss == again.loss and np.array_equal(_flat(first), _flat(again)),
        f"the loss of the same step is {first.loss:.9g}, and later {again.loss:.9g}",
        why="a run that is resumed, or repeated with its seed, must train on the same numbers",
        fix="use no randomness and no state: the answer may depend only on the context",
    )


def _config(bench: Bench, **algorithm: str) -> Config:
    """Return the toy configuration, with a backend that the loss names."""
    traits, more = bench.found.traits, {"algorithm": algorithm}
    named = sorted(traits.backends) if isinstance(traits, LossTraits) else []
    if named and bench.config.backend.backend not in named:
        more["backend"] = {"backend": named[0]}
    return bench.configure(**more)


def _step(*, gap: float, scale: float = 1.0) -> tuple[TrainBatch, list[Floats]]:
    """Return four rows, and log-probabilities that are 1 to 1.5 times `gap` away from the sampler's."""
    random, rows, logprobs = generator(7), [], []
    for number, count in enumerate(LENGTHS):
        old_T = np.concatenate([np.zeros(2), -random.uniform(0.1, 2.0, count)])
        credit_T = np.concatenate([np.zeros(2), scale * random.uniform(0.5, 1.5, count) * (-1.0) ** number])
        action_T = np.arange(count + 2) >= 2
        row = TrainRow(tokens_T=np.arange(count + 2), action_T=action_T, logprobs_T=old_T, advantages_T=credit_T)
        rows.append(row)
        logprobs.append(np.where(action_T, old_T + gap * random.uniform(1.0, 1.5, count + 2), 0.0))
    return TrainBatch(step=0, rows=tuple(rows), temperature=1.0), logprobs


def _value(
    bench: Bench, config: Config, batch: TrainBatch, logprobs: Sequence[Floats], packs: Sequence[Sequence[int]] = ()
) -> LossValue:
    trial = LossTrial(batch=batch, logprobs=logprobs, packs=packs or (tuple(range(len(batch.rows))),))
    name = config.backend.backend
    found: LossValue | None = bench.plugins.call_backend("evaluate_loss", config, bench.plugins, trial, backend=name)
    if found is None:
        why = "without that the loss cannot be tried before a run"
        fix = "give the backend's PluginSpec functions=BackendFunctions(evaluate_loss=...)"
        fail(f"backend {name!r} cannot evaluate a loss by itself", why=why, fix=fix)
    return found


def _slopes(
    bench: Bench, config: Config, batch: TrainBatch, logprobs: Sequence[Floats], *, row: int, place: int, stops: bool
) -> list[float]:
    """Return the central difference quotient and the one-sided ones: at a kink, one of these is the gradient.

    With `stops` the sampler's log-probability moves too, so that the ratio stays.
    """

    def at(change: float) -> float:
        moved = [values_T.copy() for values_T in logprobs]
        moved[row][place] += change
        rows = [*batch.rows]
        if stops:
            old_T = rows[row].logprobs_T.copy()
            old_T[place] += change
            rows[row] = replace(rows[row], logprobs_T=old_T)
        return _value(bench, config, replace(batch, rows=tuple(rows)), moved).loss

    below, here, above = at(-STEP), at(0.0), at(STEP)
    return [(above - below) / (2 * STEP), (above - here) / STEP, (here - below) / STEP]


def _flat(found: LossValue) -> Floats:
    """The gradients of the action tokens; every row begins with a prompt of two tokens."""
    return np.concatenate([gradient_T[2:] for gradient_T in found.gradients])
