"""What an advantage, transform, uncertainty or algorithm must do with the rewards and tokens of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from retrain.credit.episode import step_advantages
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import CreditGroup, assign_credit, measure_uncertainty
from retrain.kernel.types import Floats, Kind
from retrain.testing.algorithms import WHOLE_ALGORITHM, build, expect_untouched_groups, token_advantages
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.toy_groups import LAMBDAS, groups, reordered, rewarded_steps

Arrays = Sequence[Sequence[Floats]]


def gives_one_finite_number_per_completion(bench: Bench) -> None:
    """Every group gets one finite advantage per completion, even for equal, single, negative, huge, graded rewards."""
    flow = build_flow(bench.config, bench.plugins)
    for step in rewarded_steps(whole=_sees_steps(flow)):
        _advantages(step, flow)


def follows_the_order_of_completions(bench: Bench) -> None:
    """The completions of a group have no order: permuting them permutes their advantages alike."""
    flow = build_flow(bench.config, bench.plugins)
    for step in rewarded_steps(whole=_sees_steps(flow)):
        orders = [np.roll(np.arange(len(group.rewards_G))[::-1], 1) for group in step]
        moved_PG = _advantages([reordered(group, order) for group, order in zip(step, orders, strict=True)], flow)
        for group, order, plain_G, moved_G in zip(step, orders, _advantages(step, flow), moved_PG, strict=True):
            expect(
                np.allclose(moved_G, _in_order(plain_G, order, group, flow), rtol=1e-6, atol=1e-9),
                f"{group.name}: {_show(group.rewards_G)} get {_show(plain_G)}, and {_show(moved_G)} in the order "
                f"{_show(order)}",
                why="an advantage that does not stay with its completion rewards the wrong text",
                fix="return the advantages in the order of the rewards; do not sort",
            )


def follows_the_order_of_groups(bench: Bench) -> None:
    """The groups of a step have no order: an advantage that sees the whole step gives each the same in any."""
    flow = build_flow(bench.config, bench.plugins)
    for step in rewarded_steps(whole=True) if _sees_steps(flow) else ():
        backwards_PG = _advantages(step[::-1], flow)[::-1]
        for group, plain_G, moved_G in zip(step, _advantages(step, flow), backwards_PG, strict=True):
            expect(
                np.allclose(moved_G, plain_G, rtol=1e-6, atol=1e-9),
                f"{group.name}: gets {_show(plain_G)}, and {_show(moved_G)} when the groups of the step are reversed",
                why="an advantage that does not stay with its group rewards the answers to another prompt",
                fix="return one array per group, in the order of step.rewards_PG; do not sort",
            )


def leaves_rewards_alone(bench: Bench) -> None:
    """It does not modify the rewards."""
    flow = build_flow(bench.config, bench.plugins)
    pairs = zip(rewarded_steps(whole=_sees_steps(flow)), rewarded_steps(whole=_sees_steps(flow)), strict=True)
    for step, before in pairs:
        _advantages(step, flow)
        for group, was in zip(step, before, strict=True):
            named = [(group.named_rewards[name], given_G) for name, given_G in was.named_rewards.items()]
            expect(
                all(np.array_equal(now_G, given_G) for now_G, given_G in [(group.rewards_G, was.rewards_G), *named]),
                f"{group.name}: rewards {_show(was.rewards_G)} are {_show(group.rewards_G)} after the call",
                why="the same array is recorded, and read by every other part of the step",
                fix="make a new array in place of writing into those of the context",
            )


def repeats_its_advantages(bench: Bench) -> None:
    """The same rewards get the same advantages, whatever came before, and in a new process too."""

    def prepare(flow: CreditFlow) -> Callable[[], Arrays]:
        return lambda: [_advantages(step, flow) for step in rewarded_steps(whole=_sees_steps(flow))]

    _expect_repeated(bench, prepare)


def gives_one_finite_number_per_token(bench: Bench) -> None:
    """Every action token gets one finite number, even in empty, single-token, long or nearly impossible completions."""
    compute = _credit(bench, build_flow(bench.config, bench.plugins))
    for sepa_lambda in LAMBDAS:
        compute(groups(), sepa_lambda)


def leaves_its_inputs_alone(bench: Bench) -> None:
    """It does not modify rewards, log-probabilities, entropies or planning marks."""
    flow = build_flow(bench.config, bench.plugins)
    if flow.is_custom:
        expect_untouched_groups(build(bench))
        return
    for before, group in zip(groups(), groups(), strict=True):
        assign_credit([group], flow, sepa_lambda=1.0)
        for what, was, now in _arrays(before, group):
            expect(
                np.array_equal(was, now),
                f"{group.name}: the {what} have changed after the call",
                why="the same arrays are recorded and trained on after credit is assigned",
                fix="make new arrays in place of writing into those of the context",
            )


def repeats_its_credit(bench: Bench) -> None:
    """The same group gets the same credit, whatever came before, and in a new process too."""

    def prepare(flow: CreditFlow) -> Callable[[], Arrays]:
        compute = _credit(bench, flow)
        return lambda: compute(groups(), 0.5)

    _expect_repeated(bench, prepare)


def credits_a_group_by_itself(bench: Bench) -> None:
    """The credit of a group does not depend on the other groups of the step; a whole `Algorithm` is free to do so."""
    flow = build_flow(bench.config, bench.plugins)
    if flow.is_custom:
        return
    together = assign_credit(groups(), flow, sepa_lambda=0.5).token_advs
    for number, group in reversed(list(enumerate(groups()))):
        alone = assign_credit([group], flow, sepa_lambda=0.5).token_advs[0]
        expect(
            all(np.array_equal(a, b) for a, b in zip(alone, together[number], strict=True)),
            f"{group.name} gets different credit alone than in a step with other groups",
            why="a run would depend on its batch size and on the order of its prompts",
            fix="keep no state between calls; a schedule belongs in a controller",
        )


def measures_every_token(bench: Bench) -> None:
    """Every action token gets one finite number >= 0, even in empty, long or nearly impossible completions."""
    flow = build_flow(bench.config, bench.plugins)
    for group in groups():
        measure_uncertainty(group, flow)


def declares_that_it_needs_entropies(bench: Bench) -> None:
    """Without `needs_entropy` it works with engines that provide no entropies."""
    flow = build_flow(bench.config, bench.plugins)
    if flow.needs_entropy:
        return
    for group in groups(entropies=False):
        measure_uncertainty(group, flow)


def repeats_its_measure(bench: Bench) -> None:
    """The same completion has the same uncertainty, whatever came before, and in a new process too."""
    _expect_repeated(bench, lambda flow: lambda: [measure_uncertainty(group, flow) for group in groups()])


def names_a_controller_that_exists(bench: Bench) -> None:
    """The controller from which it takes lambda is installed."""
    flow = build_flow(bench.config, bench.plugins)
    spec = flow.algorithm or flow.transform
    if not flow.controller or not isinstance(bench.found.target, type(spec)):
        return  # a bare function may use lambda but declares nothing about it
    known = [entry.spec.name for entry in bench.plugins.registered(Kind.CONTROLLER)]
    expect(
        flow.controller in known,
        f"it takes lambda from controller {flow.controller!r}, which is not installed; known: {', '.join(known)}",
        why="a run with it ends before its first step",
        fix="correct TransformSpec(controller=...), or let your distribution require the one that provides it",
    )


def _sees_steps(flow: CreditFlow) -> bool:
    return flow.advantage.compute_step is not None


def _advantages(step: Sequence[CreditGroup], flow: CreditFlow) -> list[Floats]:
    """The advantages of each group; those of single tokens one after another."""
    given_PG = step_advantages(step, flow, [True] * len(step))
    return [given_G if isinstance(given_G, np.ndarray) else np.concatenate([*given_G, []]) for given_G in given_PG]


def _in_order(advs_G: Floats, order: NDArray[np.int64], group: CreditGroup, flow: CreditFlow) -> Floats:
    """The advantages of a group whose completions have another order."""
    if flow.advantage.compute_tokens is None:
        return advs_G[order]
    by_completion = np.split(advs_G, np.cumsum([len(logprobs) for logprobs in group.logprobs_G])[:-1])
    return np.concatenate([by_completion[number] for number in order])


def _credit(bench: Bench, flow: CreditFlow) -> Callable[[Sequence[CreditGroup], float], Arrays]:
    """`f(groups, lambda)`: token advantages by the flow, or by the plugin's own algorithm, which has no lambda."""
    if not flow.is_custom:
        return lambda given, sepa_lambda: assign_credit(given, flow, sepa_lambda=sepa_lambda).token_advs
    algorithm = build(bench)
    return lambda given, _: token_advantages(algorithm, given)


def _expect_repeated(bench: Bench, prepare: Callable[[CreditFlow], Callable[[], Arrays]]) -> None:
    """Expect the same numbers twice, and once more from a new flow and part."""
    compute = prepare(build_flow(bench.config, bench.plugins))
    rebuilt = prepare(build_flow(bench.config, bench.plugins))
    first = compute()
    for again, when in ((compute(), "called again"), (rebuilt(), "rebuilt")):
        expect(
            all(np.array_equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)),
            f"it returns different numbers when {when}",
            why="a run that is resumed, or repeated with its seed, must train on the same numbers",
            fix="use no randomness and no state: the answer may depend on the arguments alone",
        )


def _arrays(before: CreditGroup, after: CreditGroup) -> Iterator[tuple[str, Floats, Floats]]:
    yield "rewards", before.rewards_G, after.rewards_G
    fields = (
        ("log-probabilities", before.logprobs_G, after.logprobs_G),
        ("planning marks", before.planning_G, after.planning_G),
        ("entropies", before.entropies_G or (), after.entropies_G or ()),
    )
    for what, was_G, now_G in fields:
        for was_T, now_T in zip(was_G, now_G, strict=True):
            yield what, np.asarray(was_T), np.asarray(now_T)


def _show(values: Floats | NDArray[np.int64]) -> str:
    shown = [f"{value:.6g}" for value in values[:8]]
    return f"[{', '.join(shown)}{', ...' if len(values) > 8 else ''}]"


ADVANTAGE = (
    gives_one_finite_number_per_completion,
    follows_the_order_of_completions,
    follows_the_order_of_groups,
    leaves_rewards_alone,
    repeats_its_advantages,
)
TRANSFORM = (
    gives_one_finite_number_per_token,
    leaves_its_inputs_alone,
    repeats_its_credit,
    credits_a_group_by_itself,
    names_a_controller_that_exists,
)
ALGORITHM = (*TRANSFORM, *WHOLE_ALGORITHM)
UNCERTAINTY = (measures_every_token, declares_that_it_needs_entropies, leaves_its_inputs_alone, repeats_its_measure)
