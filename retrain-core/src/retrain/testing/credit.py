"""The suites of credit: advantages, transforms, uncertainties, whole algorithms and planning detectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import CreditGroup, assign_credit, measure_uncertainty, step_advantages
from retrain.kernel.contracts.algorithm import Algorithm
from retrain.kernel.errors import PluginError
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats, GroupStatus, Kind, Mask, Tokens, group_status
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_plain_metrics, expect_plain_state, expect_same, expect_unchanged, fail
from retrain.testing.toys import LAMBDAS, groups, reordered, rewarded_steps, scored_groups

STEPS, RESUME_AT = 6, 3
MARKED_TEXTS = (
    "Wait, let me think again. First I add 12 and 30 to get 42.",
    "",
    "42",
    "let me check this step by step " * 20,
    "\U0001f680 caf\u00e9 \u202e24 \x00",
)
Arrays = Sequence[Sequence[Floats]]


def gives_one_finite_number_per_completion(bench: Bench) -> None:
    """Every group gets one finite advantage per completion, even for equal, single, negative, huge, graded rewards."""
    flow = _flow(bench)
    for step in rewarded_steps(whole=_sees_steps(flow)):
        _advantages(step, flow)


def follows_the_order_of_completions(bench: Bench) -> None:
    """The completions of a group have no order: permuting them permutes their advantages alike."""
    flow = _flow(bench)
    for step in rewarded_steps(whole=_sees_steps(flow)):
        # Reversed and then shifted: a plain reversal would leave symmetric groups unchanged.
        orders = [np.roll(np.arange(len(group.rewards_G))[::-1], 1) for group in step]
        moved_PG = _advantages([reordered(group, order) for group, order in zip(step, orders, strict=True)], flow)
        for group, order, plain_G, moved_G in zip(step, orders, _advantages(step, flow), moved_PG, strict=True):
            if flow.advantage.compute_tokens is None:
                wanted_G = plain_G[order]
            else:
                ends = np.cumsum([len(logprobs_T) for logprobs_T in group.logprobs_G])[:-1]
                by_completion = np.split(plain_G, ends)
                wanted_G = np.concatenate([by_completion[number] for number in order])
            expect(
                # Means in another order round differently.
                np.allclose(moved_G, wanted_G, rtol=1e-6, atol=1e-9),
                f"{group.name}: {_show(group.rewards_G)} get {_show(plain_G)}, and {_show(moved_G)} in the order "
                f"{_show(order)}",
                why="an advantage that does not stay with its completion rewards the wrong text",
                fix="return the advantages in the order of the rewards; do not sort",
            )


def follows_the_order_of_groups(bench: Bench) -> None:
    """The groups of a step have no order: an advantage that sees the whole step gives each the same in any."""
    flow = _flow(bench)
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
    flow = _flow(bench)
    given, before = (rewarded_steps(whole=_sees_steps(flow)) for _ in range(2))
    for step, step_before in zip(given, before, strict=True):
        _advantages(step, flow)
        for group, was in zip(step, step_before, strict=True):
            named = [(group.named_rewards[name], was_G) for name, was_G in was.named_rewards.items()]
            expect_unchanged(
                all(np.array_equal(now_G, was_G) for now_G, was_G in [(group.rewards_G, was.rewards_G), *named]),
                f"rewards {_show(was.rewards_G)} of {group.name} to {_show(group.rewards_G)}",
                why="the same array is recorded, and read by every other part of the step",
            )


def repeats_its_advantages(bench: Bench) -> None:
    """The same rewards get the same advantages, whatever came before, and in a new process too."""

    def prepare(flow: CreditFlow) -> Callable[[], Arrays]:
        return lambda: [_advantages(step, flow) for step in rewarded_steps(whole=_sees_steps(flow))]

    _expect_repeated(bench, prepare)


def gives_one_finite_number_per_token(bench: Bench) -> None:
    """Every action token gets one finite number, even in empty, single-token, long or nearly impossible completions."""
    compute = _credit(bench, _flow(bench))
    for sepa_lambda in LAMBDAS:
        compute(groups(), sepa_lambda)


def leaves_its_inputs_alone(bench: Bench) -> None:
    """It does not modify rewards, log-probabilities, entropies or planning marks."""
    flow, why = _flow(bench), "the same arrays are recorded and trained on after credit is assigned"
    if flow.is_custom:
        given, given_before = scored_groups(groups()), scored_groups(groups())
        _algorithm(bench).assign(0, given)
        for whole, whole_before in zip(given, given_before, strict=True):
            for now, was in zip(whole.completions, whole_before.completions, strict=True):
                for name in ("tokens_T", "action_T", "logprobs_T", "entropies_T"):
                    is_same = np.array_equal(getattr(now, name), getattr(was, name))
                    expect_unchanged(is_same, f"{name} of group {whole.example.id!r}", why=why)
        return
    for before, group in zip(groups(), groups(), strict=True):
        assign_credit([group], flow, sepa_lambda=1.0)
        for what, was_T, now_T in _arrays(before, group):
            expect_unchanged(np.array_equal(was_T, now_T), f"the {what} of {group.name}", why=why)


def repeats_its_credit(bench: Bench) -> None:
    """The same group gets the same credit, whatever came before, and in a new process too."""

    def prepare(flow: CreditFlow) -> Callable[[], Arrays]:
        compute = _credit(bench, flow)
        return lambda: compute(groups(), 0.5)

    _expect_repeated(bench, prepare)


def credits_a_group_by_itself(bench: Bench) -> None:
    """The credit of a group does not depend on the other groups of the step; a whole `Algorithm` is free to do so."""
    flow = _flow(bench)
    if flow.is_custom:
        return
    together = assign_credit(groups(), flow, sepa_lambda=0.5).token_advs
    # Backwards, so that memory of an earlier group shows as a difference too.
    for number, group in reversed(list(enumerate(groups()))):
        single = assign_credit([group], flow, sepa_lambda=0.5).token_advs[0]
        expect(
            all(np.array_equal(a, b) for a, b in zip(single, together[number], strict=True)),
            f"{group.name} gets different credit by itself and in a step with other groups",
            why="a run would depend on its batch size and on the order of its prompts",
            fix="keep no state between calls; a schedule belongs in a controller",
        )


def names_a_controller_that_exists(bench: Bench) -> None:
    """The controller from which it takes lambda is installed."""
    flow = _flow(bench)
    spec = flow.algorithm or flow.transform
    if not flow.controller or not isinstance(bench.found.target, type(spec)):
        # A bare function may use lambda but declares nothing about it.
        return
    known = [entry.spec.name for entry in bench.plugins.registered(Kind.CONTROLLER)]
    expect(
        flow.controller in known,
        f"it takes lambda from controller {flow.controller!r}, but only these are installed: {', '.join(known)}",
        why="a run with it ends before its first step",
        fix="correct TransformSpec(controller=...), or let your distribution require the one that provides it",
    )


def names_its_condition(bench: Bench) -> None:
    """A whole `Algorithm` has text labels, the condition among them."""
    if not _flow(bench).is_custom:
        return
    try:
        labels = _algorithm(bench).labels
    except PluginError as error:
        fail(error.problems[0].what, why="`retrain report` compares runs by it", fix=error.problems[0].fix)
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
    if not _flow(bench).is_custom:
        return
    given = scored_groups(groups())
    last = max(number for number, group in enumerate(given) if group_status(group) is GroupStatus.INFORMATIVE)
    given[last] = replace(given[last], is_surplus=True)
    credit = _algorithm(bench).assign(0, given)
    expect(
        credit.statuses_P == tuple(group_status(group) for group in given),
        "it gives groups another status than `group_status` does",
        why="the counts of useful, all-right and all-wrong groups would not be comparable between runs",
        fix="statuses_P=tuple(group_status(group) for group in groups)",
    )
    recorded = [
        tokens.advantages_A
        for status, group, tokens_G in zip(credit.statuses_P, given, credit.tokens_PG, strict=True)
        if status is GroupStatus.INFORMATIVE
        for completion, tokens in zip(group.completions, tokens_G, strict=True)
        if completion.num_actions
    ]
    trained = [row.advantages_T[row.action_T] for row in credit.rows]
    expect(
        len(trained) == len(recorded) and all(np.array_equal(a, b) for a, b in zip(trained, recorded, strict=True)),
        f"{len(trained)} rows do not carry the recorded advantages of the {len(recorded)} completions to train",
        why="the records would show other credit than the policy was trained on",
        fix="build rows with `train_rows(completion, advantages_A)` for every completion of an informative group",
    )
    expect_plain_metrics(credit.metrics, allows_text=True)


def goes_on_after_a_resume(bench: Bench) -> None:
    """A whole `Algorithm` restored from its state, after a JSON round trip, assigns the same credit from there on."""
    if not _flow(bench).is_custom:
        return

    def run(algorithm: Algorithm, steps: range) -> list[Any]:
        seen = []
        for step in steps:
            given = scored_groups(groups()[step : step + 2])
            credit = algorithm.assign(step, given)
            algorithm.observe(step, given, credit)
            advantages = [tokens.advantages_A.tolist() for tokens_G in credit.tokens_PG for tokens in tokens_G]
            seen.append((advantages, dict(credit.metrics)))
        return seen

    first, resumed = _algorithm(bench), _algorithm(bench)
    run(first, range(RESUME_AT))
    resumed.restore(expect_plain_state(first))
    rest = range(RESUME_AT, STEPS)
    expect_same(run(first, rest), run(resumed, rest), what=f"credit and metrics from step {RESUME_AT} on")


def measures_every_token(bench: Bench) -> None:
    """Every action token gets one finite number >= 0, even in empty, long or nearly impossible completions."""
    flow = _flow(bench)
    for group in groups():
        measure_uncertainty(group, flow)


def declares_that_it_needs_entropies(bench: Bench) -> None:
    """Without `needs_entropy` it works with engines that provide no entropies."""
    flow = _flow(bench)
    for group in () if flow.needs_entropy else groups(entropies=False):
        measure_uncertainty(group, flow)


def repeats_its_measure(bench: Bench) -> None:
    """The same completion has the same uncertainty, whatever came before, and in a new process too."""
    _expect_repeated(bench, lambda flow: lambda: [measure_uncertainty(group, flow) for group in groups()])


def marks_every_token(bench: Bench) -> None:
    """One boolean mask per completion, of its length, even for empty, random and special tokens."""
    detector = bench.build()
    _masks(detector, _completions(bench))
    _masks(detector, [])


def leaves_tokens_alone(bench: Bench) -> None:
    """It does not modify the tokens it reads."""
    before, given = _completions(bench), _completions(bench)
    _masks(bench.build(), given)
    is_same = all(np.array_equal(was_T, now_T) for was_T, now_T in zip(before, given, strict=True))
    expect_unchanged(is_same, "the tokens", why="the same arrays are trained on")


def repeats_its_marks(bench: Bench) -> None:
    """The same completions get the same marks again, and from a second instance too."""
    detector, given = bench.build(), _completions(bench)
    first = _masks(detector, given)
    for again in (_masks(detector, given), _masks(bench.build(), given)):
        expect(
            all(np.array_equal(a, b) for a, b in zip(first, again, strict=True)),
            "the same tokens got other marks",
            why="a run that is resumed must give its tokens the same credit",
            fix="use no randomness, and no memory of earlier calls that changes the answer",
        )


def _flow(bench: Bench) -> CreditFlow:
    return build_flow(bench.config, bench.plugins)


def _algorithm(bench: Bench) -> Algorithm:
    return build_algorithm(_flow(bench), bench.context())


def _sees_steps(flow: CreditFlow) -> bool:
    return flow.advantage.compute_step is not None


def _advantages(step: Sequence[CreditGroup], flow: CreditFlow) -> list[Floats]:
    """The advantages of each group; advantages of single tokens follow one another."""
    given_PG = step_advantages(step, flow, [True] * len(step))
    return [given_G if isinstance(given_G, np.ndarray) else np.concatenate([*given_G, []]) for given_G in given_PG]


def _credit(bench: Bench, flow: CreditFlow) -> Callable[[Sequence[CreditGroup], float], Arrays]:
    """`f(groups, lambda)`: token advantages by the flow, or by the plugin's own algorithm, where lambda is unused."""
    if not flow.is_custom:
        return lambda given, sepa_lambda: assign_credit(given, flow, sepa_lambda=sepa_lambda).token_advs
    algorithm = _algorithm(bench)
    return lambda given, _: [
        tuple(tokens.advantages_A for tokens in tokens_G)
        for tokens_G in algorithm.assign(0, scored_groups(given)).tokens_PG
    ]


def _expect_repeated(bench: Bench, prepare: Callable[[CreditFlow], Callable[[], Arrays]]) -> None:
    """Expect the same numbers twice, and once more from a new flow and part."""
    compute, rebuilt = prepare(_flow(bench)), prepare(_flow(bench))
    first = compute()
    for again, when in ((compute(), "called again"), (rebuilt(), "rebuilt")):
        expect(
            all(np.array_equal(a, b) for x, y in zip(first, again, strict=True) for a, b in zip(x, y, strict=True)),
            f"it returns different numbers when {when}",
            why="a run that is resumed, or repeated with its seed, must train on the same numbers",
            fix="use no randomness and no state: the answer may depend only on the arguments",
        )


def _arrays(before: CreditGroup, after: CreditGroup) -> Iterator[tuple[str, Any, Any]]:
    yield "rewards", before.rewards_G, after.rewards_G
    fields = (
        ("log-probabilities", before.logprobs_G, after.logprobs_G),
        ("planning marks", before.planning_G, after.planning_G),
        ("entropies", before.entropies_G or (), after.entropies_G or ()),
    )
    for what, was_G, now_G in fields:
        for was_T, now_T in zip(was_G, now_G, strict=True):
            yield what, was_T, now_T


def _show(values: Floats | NDArray[np.int64]) -> str:
    shown = [f"{value:.6g}" for value in values[:8]]
    return f"[{', '.join(shown)}{', ...' if len(values) > 8 else ''}]"


def _completions(bench: Bench) -> list[Tokens]:
    """Tokens of texts, and random tokens of the vocabulary, special ones included."""
    tokenizer = bench.tokenizer
    texts = [
        np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64) for text in MARKED_TEXTS
    ]
    random_T = Seeds(0).stream("conformance detector").integers(0, len(tokenizer), size=64)
    return [*texts, random_T, np.full(3, tokenizer.eos_token_id, dtype=np.int64)]


def _masks(detector: Any, completions_G: Sequence[Tokens]) -> list[Mask]:
    masks_G = [np.asarray(mask_T) for mask_T in detector.masks(completions_G)]
    expect(
        len(masks_G) == len(completions_G),
        f"{len(masks_G)} masks for {len(completions_G)} completions",
        why="masks are matched to completions by position",
        fix="return one mask per completion, an empty one for an empty completion",
    )
    for number, (mask_T, tokens_T) in enumerate(zip(masks_G, completions_G, strict=True)):
        expect(
            mask_T.shape == tokens_T.shape and (mask_T.dtype == np.bool_ or not mask_T.size),
            f"the mask of completion {number} is {mask_T.dtype} of shape {mask_T.shape} for {len(tokens_T)} tokens",
            why="credit is assigned token by token",
            fix="return np.ndarray of bool, one entry per token",
        )
    return masks_G


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
ALGORITHM = (*TRANSFORM, names_its_condition, trains_informative_groups, goes_on_after_a_resume)
UNCERTAINTY = (measures_every_token, declares_that_it_needs_entropies, leaves_its_inputs_alone, repeats_its_measure)
PLANNING_DETECTOR = (marks_every_token, leaves_tokens_alone, repeats_its_marks)
