import gc
import pickle
import signal
import threading
import time
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import math_reward
from retrain.api import Config, Example, Kind, Outcome, PluginContext, RewardError, Score, Seeds, resolve
from retrain.kernel.config.schema import RewardLimits, ScoringTable
from retrain_rewards.answers.size import refusal
from retrain_rewards.boxed import boxed
from retrain_rewards.verifiers.math_reward import TimeUp, time_limit
from tests.kit.problems import codes_in
from tests.kit.tables import pairs


def build(plugins, **scoring):
    config = Config(tables={"scoring": ScoringTable.model_validate(scoring)})
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins)
    made = resolve(plugins, Kind.REWARD, "math", where="test").target(context)
    return made


@pytest.fixture(autouse=True)
def lasting_time_limits():
    """No callbacks of the garbage collector: Hypothesis times it in one, and a time limit raised there is lost."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = callbacks


@pytest.fixture(scope="session")
def reward(plugins):
    made = build(plugins)
    made.prepare()
    return made


def example(reference):
    return Example(id="e", prompt="p", reference=reference)


def judged(reward, reference, answer):
    return reward.score(example(reference), boxed(answer))


EQUAL = pairs(r"""
    \frac{1}{2} => so \boxed{0.5}  \frac{1}{2} => \boxed{\dfrac{2}{4}}  \frac{1}{2} => \boxed 0.5.
    x^2 - 1 => \boxed{(x-1)(x+1)}  \{1, 2\} => \boxed{\{2,1\}}  [1,2) => \boxed{\left[1,2\right)}
    5\text{ cm} => \boxed{5}  2^{-3} => \boxed{\frac{1}{8}}  \text{Evelyn} => \boxed{evelyn}
""")
OTHER = pairs(r"""
    \frac{1}{2} => \boxed{0.5} no, \boxed{0.6}  \frac{1}{2} => 0.5  \frac{1}{2} =>  \frac{1}{2} => \boxed{}
    \frac{1}{2} => \boxed{0.5  \frac{1}{2} => \boxed{\boxed{}}  \frac{1}{2} => \boxed{no idea}
    [1,2) => \boxed{(1,2)}  \text{Evelyn} => \boxed{\text{Peter}}
""")


@pytest.mark.parametrize(("reference", "text"), [*EQUAL, *OTHER, ("5", "\\boxed{5\x00}")])
def test_mathematically_equal(reward, reference, text):
    assert reward.score(example(reference), text) == Score.of(float((reference, text) in EQUAL))


def direct(reference, answer):
    """What math-verify says of two boxes, called as its documentation does."""
    from math_verify import parse, verify

    return bool(verify(parse(boxed(reference)), parse(boxed(answer))))


@pytest.mark.long
def test_agrees_with_math_verify_on_500_pairs(reward):
    made = math_reward.pairs()
    assert len(made) == 500
    right = 0
    for kind, reference, answer in made:
        is_equal = direct(reference, answer.rstrip("."))  # a full stop behind a unit, which math-verify stumbles over
        assert judged(reward, reference, answer) == Score.of(float(is_equal)), (kind, reference, answer)
        right += is_equal
    assert 200 < right < 300  # both verdicts are well represented


# All the ways in which we mean to differ from math-verify, which says False to each of these.
TEXT_IS_EQUAL = [(r"\{", r"\{ "), ("$", "$"), ("9^{9^{9^9}}", "9^{9^{9^9}}"), ("7" * 5000, "7" * 5000)]
NOT_COMPARABLE = [
    (r"\frac{1}{0}", "5", r"the reference '\\frac{1}{0}' has no value, and its text differs"),
    (r"\frac{0}{0}", "5", "has no value, and its text differs"),
    (r"\foo", "5", r"the reference '\\foo' is not mathematics, and its text differs"),
    ("5", "9^{9^{9^9}}", "the answer can mean a number of more than"),
    ("9^{9^{9^9}}", "5", "the reference can mean a number of more than"),
    ("5", "1+" * 600 + "1", "the answer is longer than 1000 characters"),
    ("5", "(" * 30 + "5" + ")" * 30, "the answer nests more than 20 levels deep"),
]


@pytest.mark.parametrize(("reference", "answer"), TEXT_IS_EQUAL)
def test_equal_text_is_equal_before_anything_is_parsed(reward, reference, answer):
    if len(reference) <= 2:
        assert not direct(reference, answer)
    assert judged(reward, reference, answer).value == 1.0
    assert reward.score(example(reference), reward.gold(example(reference))).value == 1.0


@pytest.mark.parametrize(("reference", "answer", "reason"), NOT_COMPARABLE)
def test_what_cannot_be_compared_is_no_verdict_and_not_wrong(reward, reference, answer, reason):
    score = judged(reward, reference, answer)
    assert score.outcome is Outcome.NO_VERDICT
    assert reason in score.detail


HOSTILE = [
    *("9^{9^{9^9}}", "9^9^9^9", "9**9**9**9", "10^{10^{10}}", "10^{10}!", "(((9!)!)!)!", "5!!!!!!!!"),
    *(r"\binom{10^{10}}{10^9}", "((((9^9)^9)^9)^9)^9", r"\prod_{k=1}^{10^{9}} k", "x^{10^{10}}"),
    *("10^{-99999999999}", "0.1^{-99999999}", r"10^{\frac{1}{0.00000000001}}", r"2^{\sqrt{10^{40}}}"),
    *("1e999999999", r"\pi^{\pi^{\pi^\pi}}", r"\exp(\exp(\exp(\exp(10))))", "2^{2^{2^{n}}}"),
    *("{" * 1000, "}" * 1000, "(" * 1000 + ")" * 1000, "{" * 21 + "5" + "}" * 21, r"\frac{1}{" * 300 + "2" + "}" * 300),
    *("\x00", "\x00" * 100_000, "7" * 1_000_000, "x" * 1000, "-" * 999 + "5", "!" * 900, "$" * 999, "^" * 999),
    *("\ud800", "\u0667\u0668", "9⁹⁹⁹⁹", "∞" * 100, "", r"\boxed{}", r"\boxed{\boxed{}}", "\\", "{\\", r"\boxed{"),
    *(r"\frac", r"\frac" * 150, r"\begin{pmatrix}" * 60, "NaN", "inf", r"\frac{0}{0}", "__import__('os').abort()"),
    *("answer: " * 120, "final answer is " * 60, "$1$," * 249, "||||" * 60, r"\left(" * 40, "1, " * 300),
]


@pytest.fixture(scope="session")
def brief(reward):
    return replace(reward, time_limit_s=1.0)


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: ascii(answer[:20]))
def test_hostile_answers_end_in_a_score_or_no_verdict(brief, answer):
    for reference in (r"\frac{1}{2}", "x^2 + 1"):
        score = judged(brief, reference, answer)
        assert score.outcome in (Outcome.SCORED, Outcome.NO_VERDICT)
        assert score.value in (0.0, None)


def test_a_comparison_beyond_the_time_limit_is_no_verdict(reward, plugins):
    score = judged(replace(reward, time_limit_s=0.2), "5", "(x+y+z+w)^{500} - (x+y+z)^{499}")
    assert score == Score.no_verdict("comparing took longer than 0.2 s")
    assert judged(reward, r"\frac{1}{2}", "0.5").value == 1.0  # and the next one is none the worse
    assert build(plugins).time_limit_s == 8.0, "a part of the limit for scoring"
    limits = {"math": RewardLimits(timeout_s=5.0), "judge": RewardLimits(timeout_s=60.0)}
    assert build(plugins, limits=limits).time_limit_s == 4.0
    copy = pickle.loads(pickle.dumps(reward))
    assert copy == reward
    scores = []
    thread = threading.Thread(target=lambda: scores.append(judged(copy, r"\frac{1}{2}", "0.5")))
    thread.start()
    thread.join()
    assert scores == [Score.of(1.0)]


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *(("retrain_rewards.answers.form.syntax_tree", MemoryError), ("math_verify.parse", MemoryError)),
        *(("math_verify.parse", RecursionError), ("math_verify.verify", MemoryError)),
        ("math_verify.verify", RecursionError),
    ],
)
def test_running_out_of_memory_is_no_verdict(reward, where, error, monkeypatch):
    def broken(*arguments, **options):
        raise error

    monkeypatch.setattr(where, broken)
    score = judged(reward, f"1{where}{error.__name__}", r"\answer")  # a text that only `math_verify.parse` takes
    assert score == Score.no_verdict(f"comparing ended in {error.__name__}")


@pytest.mark.parametrize(
    "formula",
    [
        *("", "^", "!", "2^", r"\binom", "5", "-5", "1,000,000", "7" * 1000, r"\frac{1}{2}", "2^{2019}", "2019^{2019}"),
        *("2^{2^{n}}", "2^{2^{10}}", "e^{-x^2/2}", r"\binom{100}{50}", r"\binom{2n}{n}", "100!", "n!", "x^{2n+1}"),
        *(r"\frac{1}{\sqrt{2\pi}\sigma}e^{-\frac{(x-\mu)^2}{2\sigma^2}}", r"90^\circ", r"\sum_{k=1}^{1000} k^2"),
        *(r"\left(\frac{1+\sqrt{5}}{2}\right)^{100}", r"(\frac12)^{2^{n-1}}", r"10^{-9}", "e^{e^{x}}", r"A^{-1}B^T"),
    ],
)
def test_ordinary_formulas_are_not_refused(formula):
    assert refusal(formula) == ""


@pytest.mark.parametrize(
    "formula",
    [
        *("7" * 1001, "(" * 21 + "1" + ")" * 21, "10^{20000}", "10000!", r"\binom{100000}{50000}", "9^{9^{9^9}}"),
        "10^{" + r" \cdot ".join("2" * 15) + "}",
    ],
)
def test_formulas_that_may_run_away_are_refused(formula):
    assert refusal(formula)


def test_long_texts_cost_neither_time_nor_memory_and_references_must_be_text(reward):
    long = [r"\boxed{5}", "\\boxed{" + "x" * 1_000_000 + "}", "\\boxed{" * 100_000, "{" * 1_000_000]
    assert all(reward.score(example("5"), text).outcome is not Outcome.FAILED for text in long)
    tracemalloc.start()
    judged(reward, "5", "9^{9^{9^9}}")
    judged(reward, "5", "7" * 1_000_000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6
    for reference in (None, float("nan"), float("inf"), 5):
        with pytest.raises(RewardError, match="example e") as caught:
            judged(reward, reference, "5")
        assert codes_in(caught) == ["reward.reference-not-text"]


@given(base=st.integers(2, 30), exponents=st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_a_formula_that_is_not_refused_means_a_number_of_bounded_size(base, exponents):
    tower = "^{".join(map(str, [base, *exponents])) + "}" * len(exponents)
    if not refusal(tower):
        exponent = 1
        for level in reversed(exponents):
            exponent = level**exponent
        assert exponent <= 20_000


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=30))
def test_any_text_has_one_of_two_outcomes(brief, text):
    score = judged(brief, "5", text)
    assert score.outcome in (Outcome.SCORED, Outcome.NO_VERDICT)
    assert isinstance(refusal(text), str)


class Slow:
    """Takes half the limit to go away."""

    def __del__(self):
        end = time.monotonic() + 0.15
        while time.monotonic() < end:
            pass


def test_a_time_limit_is_not_swallowed_and_leaves_nothing_behind():
    before = signal.getsignal(signal.SIGALRM)

    def stubborn():
        for _ in range(3):
            try:
                while True:
                    pass
            except Exception:
                continue

    with pytest.raises(TimeUp), time_limit(0.05):
        stubborn()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_limit(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with pytest.raises(TimeUp), time_limit(0.05):  # noqa: PT012 -- the alarm comes twice
        Slow().__del__()
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
