"""What counts as an answer: gamed ones, right ones in many forms, and the keys that change it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.answer_pairs import gamed_pairs, right_pairs
from retrain.api import Config, Example, Kind, LoadedData, PluginContext, Plugins, Reward, Seeds, resolve
from retrain_rewards.answers.answer import TOLERANCE, parsed
from retrain_rewards.boxed import boxed
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.math_reward import MathReward
from tests.kit.tables import cells, pairs

Load = Callable[..., LoadedData]
GAMED = {
    cause: table["pairs"]
    for cause, table in tomllib.loads(
        Path(__file__).with_name("gamed_answers.toml").read_text(encoding="utf-8")
    ).items()
}


def build(plugins: Plugins, name: str = "math", **keys: object) -> Reward:
    config = Config(tables={"reward": RewardTable.model_validate(keys)})
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins)
    made: Reward = resolve(plugins, Kind.REWARD, name, where="test").target(context)
    return made


@pytest.fixture(scope="session")
def reward(plugins: Plugins) -> MathReward:
    made = build(plugins)
    assert isinstance(made, MathReward)
    made.prepare()
    return made


@dataclass(frozen=True)
class Judge:
    """A reward, asked for its value."""

    reward: Reward

    def __call__(self, reference: str, answer: str, prompt: object = "") -> float | None:
        example = Example(id="e", prompt=prompt, reference=reference)  # type: ignore[arg-type]
        score = self.reward.score(example, boxed(answer))
        assert not hasattr(score, "__await__")
        return score.value  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def judge(reward: MathReward) -> Judge:
    return Judge(reward)


def direct(reference: str, answer: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(boxed(reference)), parse(boxed(answer))))


def answers(cause: str) -> list[tuple[str, str, str]]:
    return [(row["reference"], row["answer"], row.get("prompt", "")) for row in GAMED[cause] if "answer" in row]


@pytest.mark.parametrize("cause", GAMED)
def test_a_gamed_answer_scores_0_and_math_verify_alone_is_fooled(reward: MathReward, cause: str) -> None:
    strict = Judge(reward)
    for reference, answer, prompt in answers(cause):
        assert strict(reference, answer, prompt) == 0.0, (reference, answer)
        assert direct(reference, answer), (reference, answer)


@pytest.mark.parametrize("name", ["match", "math"])
def test_a_box_with_anything_beside_it_is_none(plugins: Plugins, name: str) -> None:
    made = build(plugins, name)
    rows = [row for rows in GAMED.values() for row in rows if "completion" in row]
    assert len(rows) >= 6
    for row in rows:
        score = made.score(Example(id="e", prompt="", reference=row["reference"]), row["completion"])
        assert score.value == 0.0, row  # type: ignore[union-attr]
    assert made.score(Example(id="e", prompt="", reference="5"), r"\boxed{\boxed{5}}").value == 1.0  # type: ignore[union-attr]


def test_restating_a_prompt_of_our_own_arithmetic_scores_0(reward: MathReward, load: Load) -> None:
    examples = load("arithmetic", options={"size": 96}).examples
    assert len(examples) == 96
    for example in examples:
        question = str(example.prompt).removeprefix("What is ").removesuffix("?")
        assert reward.score(example, boxed(question)).value == 0.0, question
        assert reward.score(example, boxed(question.replace("*", r"\times"))).value == 0.0, question
        assert reward.score(example, reward.gold(example)).value == 1.0
    assert reward.score(example, boxed(f"{question} = {example.reference}")).value == 1.0


def test_right_answers_score_1_and_gamed_ones_0(judge: Judge) -> None:
    for pair in gamed_pairs(80, seed=1):
        assert judge(pair.reference, pair.answer, pair.prompt) == 0.0, pair
    for pair in right_pairs(102, seed=1):
        assert judge(pair.reference, pair.answer, pair.prompt) == 1.0, pair


@pytest.mark.long
def test_no_right_form_of_1000_is_lost_and_no_gamed_one_of_500_is_won(judge: Judge) -> None:
    right, gamed = list(right_pairs(1000)), list(gamed_pairs(500))
    assert len({(pair.reference, pair.answer) for pair in right}) > 800
    for pair in right:
        assert direct(pair.reference, pair.answer), pair  # the table holds what agreed before, and nothing else
        assert judge(pair.reference, pair.answer, pair.prompt) == 1.0, pair
    for pair in gamed:
        assert direct(pair.reference, pair.answer), pair
        assert judge(pair.reference, pair.answer, pair.prompt) == 0.0, pair


ALIKE = {  # right answers that look like gamed ones, by the reason for which they are right
    "the reference is an expression itself": r"2^{10} => 1024  2^{10} => 4^5  \binom{5}{2} => \binom{5}{3}",
    "equations whose sides are all equal": r"10 => \binom{5}{2} = 10  5 => x = 2 + 3 = 5  5 => x \approx 5",
    "a column, and thousands": r"""
        \begin{pmatrix}1\\2\end{pmatrix} => \begin{pmatrix}1 & 2\end{pmatrix}^T  1000 => 1{,}000
    """,
    "units": r"""
        5\text{ m} => 5\text{ metres}  60\text{ mph} => 60\text{ mph}  3\text{ million} => 3\text{ million}
        \$5 => 5\text{ dollars}
    """,
    "percent, by meaning and by number": r"\frac{1}{2} => 50\%  50\% => 50  50 => 50\%",
    "decimals": r"""
        \frac{1}{3} => 0.333333  \frac{1}{3000} => 0.000333  0.333 => 0.333
        1.602 \times 10^{-19} => 1.602 \cdot 10^{-19}
    """,
    "names": r"""
        \text{no solution} => \mathrm{no solution}  \text{Not enough information} => \text{not enough information}
        5 => \text{Area of } ABC = 5  \{5\} => 5  101_2 => 101_{2}  101_2 => 101
    """,
}


@pytest.mark.parametrize("reason", ALIKE)
def test_right_answers_that_look_like_gamed_ones(judge: Judge, reason: str) -> None:
    for reference, answer in pairs(ALIKE[reason]):
        assert judge(reference, answer) == 1.0, (reference, answer)


def test_the_prompt_may_be_a_chat(judge: Judge) -> None:
    chat = [{"role": "system", "content": "You factor."}, {"role": "user", "content": "Factor $x^2-1$."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Factor $x^2-1$."}]}]
    for prompt in (chat, parts):
        assert judge("(x-1)(x+1)", "x^2-1", prompt) == 0.0
        assert judge("(x-1)(x+1)", "(x+1)(x-1)", prompt) == 1.0


ALLOWED = [
    # the form of the reference, though the prompt has it
    ("x^2 - 1", "x^2-1", "Multiply out (x - 1)(x + 1), or is x^2 - 1 right?"),
    (r"\frac{6}{4}", r"\dfrac{6}{4}", r"Which of $\frac{6}{4}$ and $\frac{4}{6}$ is larger?"),
    ("7", "7.0", "Is 7 or 6 larger?"),
    ("7.0", "7", "Is 7 or 6 larger?"),
    # units of the prompt
    ("5", r"5\text{ marbles}", "How many marbles are left?"),
    ("5", r"5\text{ floops}", "How many floops are left?"),
]


def test_the_prompt_may_hold_the_form_or_the_unit_and_keys_accept_more(judge: Judge, plugins: Plugins) -> None:
    assert [judge(reference, answer, prompt) for reference, answer, prompt in ALLOWED] == [1.0] * 6
    assert judge(r"\frac{1}{0}", r"\frac{1}{3}") is None, "a reference without a value still gives no verdict"
    lenient = Judge(build(plugins, unfinished="accept"))
    assert lenient("1024", "2^{10}") == lenient("10", r"\binom{5}{2}") == 1.0
    assert lenient("565", "348+217", "What is 348 + 217?") == 0.0  # the prompt's own
    assert lenient("5", "6=5") == lenient("5", r"5\text{ million}") == lenient("5", "5,5") == 0.0
    assert build(plugins) == build(plugins, strict=True, unfinished="refuse")
    assert Judge(build(plugins, strict=False))("565", "348+217", "What is 348 + 217?") == 1.0


@pytest.mark.parametrize("unit", [r"\(", "$", r"\[ 1.5 ", "1.5 + ", "{", r"\frac{1.5}{", "x 1.5; ", "\x00"])
def test_a_hostile_prompt_costs_no_more_than_a_bounded_time(judge: Judge, unit: str) -> None:
    assert judge(r"\frac{1}{4}", "0.250", unit * (400_000 // len(unit))) in (0.0, 1.0)


@pytest.mark.parametrize("exponent", [-5, -19, -34])
def test_small_numbers_agree_within_the_relative_tolerance(judge: Judge, exponent: int) -> None:
    reference = rf"4 \times 10^{{{exponent}}}"
    inside, outside = 4 * (1 + 0.9 * TOLERANCE), 4 * (1 + 1.1 * TOLERANCE)
    assert judge(reference, rf"{outside:.4f} \times 10^{{{exponent}}}") == 0.0
    if exponent < -6:  # above it, math-verify's six decimals are the stricter bound
        assert judge(reference, rf"{inside:.4f} \times 10^{{{exponent}}}") == 1.0


OTHER_TEXTS = [
    *cells(r"""
    $5$  $5$ or $6$  no idea  5 apples  6:00  the final answer is 5  answer: $x$  \[5\]  1,000  50 percent
    x=1=2=3  a=b=\foo=3  $1$,$2$  \$5  5 + $3$  [5]  -5%  5$%$  \boxed  \neq 5
"""),
    "",
]


@pytest.mark.parametrize("count", [34, pytest.param(170, marks=pytest.mark.long)])
def test_formulas_are_parsed_as_math_verify_does(reward: MathReward, count: int) -> None:
    from math_verify import parse

    made = [*right_pairs(count, seed=2), *gamed_pairs(count // 2, seed=2)]
    for text in {*OTHER_TEXTS, *(text for pair in made for text in (pair.reference, pair.answer))}:
        assert list(parsed(text)) == parse(boxed(text), parsing_timeout=None), text
