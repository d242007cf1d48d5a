"""What an advantage, transform, uncertainty or algorithm must do with the rewards and tokens of a group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import CreditGroup, assign_credit, measure_uncertainty, step_advantages
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.errors import PluginError
from retrain.kernel.types import Floats, Group, GroupStatus, Kind, group_status
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.state import expect_plain_metrics, expect_plain_state, expect_same
from retrain.testing.toys import LAMBDAS, groups, reordered, rewarded_steps, scored_groups

# What a whole `Algorithm` must do: credit for a step's groups, rows to train, labels, and a state that resumes.


STEPS, RESUME_AT = 6, 3


def build(bench: Bench) -> Algorithm:
    """The algorithm, built as a run builds it."""
    return build_algorithm(build_flow(bench.config, bench.plugins), bench.context())


def token_advantages(algorithm: Algorithm, credit_groups: Sequence[CreditGroup]) -> list[tuple[Floats, ...]]:
    """Advantages of all action tokens of a step, by group and completion."""
    credit = algorithm.assign(0, scored_groups(credit_groups))
    return [tuple(tokens.advantages_A for tokens in tokens_G) for tokens_G in credit.tokens_PG]


def expect_untouched_groups(algorithm: Algorithm) -> None:
    """`assign` does not modify the groups of a step."""
    given, before = scored_groups(groups()), scored_groups(groups())
    algorithm.assign(0, given)
    for group, was in zip(given, before, strict=True):
        for now_T, was_T in zip(_credit_arrays(group), _credit_arrays(was), strict=True):
            expect(
                np.array_equal(now_T, was_T),
                f"the arrays of group {group.example.id!r} have changed after the call",
                why="the same arrays are recorded and trained on after credit is assigned",
                fix="make new arrays in place of writing into those of the completions",
            )


def names_its_condition(bench: Bench) -> None:
    """A whole `Algorithm` has text labels, the condition among them."""
    if not _is_whole(bench):
        return
    try:
        labels = build(bench).labels
    except PluginError as error:
        expect(False, error.problems[0].what, why="`retrain report` compares runs by it", fix=error.problems[0].fix)
        raise
    expect(
        all(isinstance(value, str) for value in labels.values()),
        f"its labels are {dict(labels)!r}",
        why="every line of metrics.jsonl carries them as text",
        fix="give text, and put numbers into Credit.metrics",
    )


def trains_informative_groups(bench: Bench) -> None:
    """A whole `Algorithm` returns rows of informative groups only, with the advantages that it records.

    The last informative group is surplus, as `[training] refill` leaves some: it is not trained.
    """
    if not _is_whole(bench):
        return
    given = scored_groups(groups())
    last = max(number for number, group in enumerate(given) if group_status(group) is GroupStatus.INFORMATIVE)
    given[last] = replace(given[last], is_surplus=True)
    credit = build(bench).assign(0, given)
    statuses = tuple(group_status(group) for group in given)
    expect(
        credit.statuses_P == statuses,
        "it gives groups another status than `group_status` does",
        why="the counts of useful, all-right and all-wrong groups would not be comparable between runs",
        fix="statuses_P=tuple(group_status(group) for group in groups)",
    )
    wanted = _credited(credit, given)
    trained = [row.advantages_T[row.action_T] for row in credit.rows]
    expect(
        len(trained) == len(wanted) and all(np.array_equal(a, b) for a, b in zip(trained, wanted, strict=True)),
        f"{len(trained)} rows do not carry the recorded advantages of the {len(wanted)} completions to train",
        why="the records would show other credit than the policy was trained on",
        fix="build rows with `train_rows(completion, advantages_A)` for every completion of an informative group",
    )
    expect_plain_metrics(credit.metrics, allows_text=True)


def goes_on_after_a_resume(bench: Bench) -> None:
    """A whole `Algorithm` restored from its state, after a JSON round trip, assigns the same credit from there on."""
    if not _is_whole(bench):
        return
    first = build(bench)
    _run(first, 0, RESUME_AT)
    state = expect_plain_state(first)
    resumed = build(bench)
    resumed.restore(state)
    went_on = _run(first, RESUME_AT, STEPS)
    expect_same(went_on, _run(resumed, RESUME_AT, STEPS), what=f"credit and metrics from step {RESUME_AT} on")


def _is_whole(bench: Bench) -> bool:
    return build_flow(bench.config, bench.plugins).is_custom


def _credit_arrays(group: Group) -> list[Any]:
    return [
        array
        for completion in group.completions
        for array in (completion.tokens_T, completion.action_T, completion.logprobs_T, completion.entropies_T)
    ]


def _credited(credit: Credit, given: Sequence[Group]) -> list[Floats]:
    """Recorded advantages of the completions to train, in order."""
    return [
        tokens.advantages_A
        for status, group, tokens_G in zip(credit.statuses_P, given, credit.tokens_PG, strict=True)
        if status is GroupStatus.INFORMATIVE
        for completion, tokens in zip(group.completions, tokens_G, strict=True)
        if completion.num_actions
    ]


def _run(algorithm: Algorithm, start: int, end: int) -> list[Any]:
    seen = []
    for step in range(start, end):
        given = scored_groups(groups()[step : step + 2])
        credit = algorithm.assign(step, given)
        algorithm.observe(step, given, credit)
        advantages = [tokens.advantages_A.tolist() for tokens_G in credit.tokens_PG for tokens in tokens_G]
        seen.append((advantages, dict(credit.metrics)))
    return seen


WHOLE_ALGORITHM = (names_its_condition, trains_informative_groups, goes_on_after_a_resume)


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
