"""Boxes, and the rewards that read one: equal text, the last number, number puzzles."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import Config, Example, Kind, PluginContext, Plugins, Reward, Score, Seeds, resolve
from retrain_rewards.boxed import last_boxed
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.countdown import CountdownReward, evaluated, question, solution
from retrain_rewards.verifiers.match import last_number
from tests.kit.problems import refused
from tests.kit.shared import first_or_long
from tests.kit.tables import cells, pairs


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        *pairs(r"""
        so \boxed{5} => 5  \boxed{1} then \boxed{2} => 2  \boxed{\frac{1}{2}} => \frac{1}{2}
        \boxed { 7 } => 7  \fbox{8} => 8  \boxed 5 => 5  It is \boxed 5. => 5
        It is \boxed 5.25, I think. => 5.25  $\boxed -3$ is it => -3  \(\boxed 4\) => 4  \[\fbox 9\] => 9
        \boxed5 => 5  {\boxed 5} and more => 5  \boxed\frac{1}{2} done => \frac{1}{2}
        \boxed \text{a b}. => \text{a b}  \boxed{\{1, 2\}} => \{1, 2\}
        \boxed{\left\{ x \right.} => \left\{ x \right.  \boxed{\boxed{b}} => b  \boxed{ $\fbox{b}$. } => b
        \boxed{\boxed b} => b  \boxed{a \boxed{b} => b  \boxed{a} then \boxed{\{b\}} => \{b\}
        \boxed 5 apples, I think. => 5  \boxed{a}\fbox{b} => b  \boxed{} =>  \\boxed{6} => 6
    """),
        ("\\boxed 5\n\n6 more lines", "5"),
        ("\\boxed{two\nlines}", "two\nlines"),
        ("\\boxed{\x00\u202e5}", "\x00\u202e5"),
    ],
)
def test_finds_the_last_box(text: str, answer: str) -> None:
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text",
    [
        *cells(r"""
        no box, just 5  boxed{5}  \boxedanswer{5}  \framebox{5}  \boxed{5  \boxed{5\}
        \boxed{1} but then \boxed{2  \boxed  \boxed}  \boxed $5$  \boxed .  \boxed \frac{1
        \boxed{a \boxed{b} c}  \boxed{\boxed{5} or 6}  \boxed{6, \boxed{5}}  \boxed{\boxed{5}, \boxed{6}}
        \boxed{\boxed{5}\boxed{6}}  \boxed{not \boxed 5}  \boxed 5, 6  \boxed 5 or 6  \boxed 5 + 6
        \boxed 5 \text{ or } 6  \boxed 5 million
    """),
        "",
        r"\boxed ",
        "\\",
    ],
)
def test_no_answer(text: str) -> None:
    assert last_boxed(text) is None


@pytest.mark.parametrize(
    ("unit", "answer"),
    first_or_long(
        [
            *((text, None) for text in (r"\boxed{", r"\boxed", r"\fboxed", r"\boxed ", "{", "\\", r"\boxed{\}")),
            (r"\boxed{1}", "1"),
        ]
    ),
)
def test_a_megabyte_of_hostile_text_is_read_in_linear_time(unit: str, answer: str | None) -> None:
    # Anything quadratic would take hours here and run into the suite's time limit.
    assert last_boxed(unit * (1_000_000 // len(unit))) == answer
    assert last_boxed(r"\boxed{" + "{" * 500_000 + "}" * 500_000 + "}") == "{" * 500_000 + "}" * 500_000


def _simple_group(text: str, start: int) -> str | None:
    """What stands between the braces whose first one ends at `start`, one character at a time."""
    depth, index = 1, start
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += (text[index] == "{") - (text[index] == "}")
        if depth == 0:
            return text[start:index]
        index += 1
    return None


def _simple_answer(text: str) -> str | None:
    """The last box, unless one around it holds anything else."""
    starts = [match.end() for match in re.finditer(r"\\boxed\{", text)]
    answer = _simple_group(text, starts[-1]) if starts else None
    if answer is None:
        return None
    for start in starts[:-1]:
        around = _simple_group(text, start)
        if around is not None and start + len(around) > starts[-1]:
            beside = around[: starts[-1] - start], around[starts[-1] - start + len(answer) :]
            if re.sub(r"\\boxed\{|[\s$]", "", beside[0]) or re.sub(r"[\s$}]", "", beside[1]):
                return None
    return answer.strip()


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\{", "\\}", "\\\\", "\\", "a", " ", "\n", "$"]), max_size=30))
def test_brace_matching_agrees_with_a_simple_reader(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert last_boxed(text) == _simple_answer(text)


@given(st.text(alphabet=st.characters(exclude_characters="\\{}", exclude_categories=["Cs"])), st.text())
def test_a_box_put_at_the_end_is_found_whatever_stands_before(answer: str, before: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{answer}}}") == answer.strip()
    assert (found := last_boxed(before)) is None or found in before


def make(plugins: Plugins, **keys: object) -> Reward:
    context = PluginContext(config=Config(tables={"reward": RewardTable(**keys)}), seeds=Seeds(0), plugins=plugins)
    made: Reward = resolve(plugins, Kind.REWARD, "match", where="test").target(context)
    return made


@pytest.fixture
def reward(plugins: Plugins) -> Reward:
    return make(plugins)


@pytest.fixture
def reads_numbers(plugins: Plugins) -> Reward:
    return make(plugins, answer="last_number")


def example(reference: str) -> Example:
    return Example(id="e", prompt="p", reference=reference)


EQUAL = [*pairs(r"5 => \boxed{5}  nan => \boxed{nan}"), (" 5 ", r"\boxed{ 5}"), ("a  b", "\\boxed{a\n b}")]
OTHER = pairs(
    r"5 => \boxed{6}  5 => \boxed{5} no, \boxed{6}  5 => \boxed{5  5 => 5  5 =>  5 => \boxed{}  0.5 => \boxed{1/2}"
)


@pytest.mark.parametrize(("reference", "text"), [*EQUAL, *OTHER])
def test_equal_as_text(reward: Reward, reference: str, text: str) -> None:
    score = reward.score(example(reference), text)
    assert score == Score.of(float((reference, text) in EQUAL))
    assert reward.score(example(reference), reward.gold(example(reference))).value == 1.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("reference", ["", " \n"])
@pytest.mark.parametrize("text", ["", r"\boxed{}", "silence"])
def test_an_empty_reference_is_never_a_free_point(reward: Reward, reference: str, text: str) -> None:
    assert refused(reward.score, example(reference), text) == ["reward.no-reference"]


@pytest.mark.parametrize(
    ("text", "number"),
    pairs("""
        7 + 5 = 12. => 12  **12** => 12  x12y => 12  12.50 dollars => 12.50  1,234,567 => 1234567  1,2,3 => 3
        3,4567 => 4567  12, => 12  8 - 20 = -12 => -12  8-20 => 20  (8)-20 => 20  - 12 => 12  12\u0664 => 12
        v1.2.3 => 3  twelve =>   =>
    """),
)
def test_the_last_number(text: str, number: str) -> None:
    assert (last_number(text) or "") == number
    for flood in ("1" * 200_000, "1,111" * 40_000, "1," * 100_000, "-" * 200_000):
        last_number(flood)  # a quadratic search would take minutes


SAID = pairs("12 => 7 + 5 is 12  1,200 => That makes 1,200.  -3 => 9 - 12 = -3")
NOT_SAID = pairs("12 => 12, or 13  12 => 112  12 => -12  12 => 12.0  12 =>")


@pytest.mark.parametrize(("reference", "text"), [*SAID, *NOT_SAID])
def test_the_last_number_counts_where_the_configuration_says_so(
    reads_numbers: Reward, reference: str, text: str
) -> None:
    assert reads_numbers.score(example(reference), text).value == float((reference, text) in SAID)
    gold = reads_numbers.gold(example(reference))  # type: ignore[attr-defined]
    assert reads_numbers.score(example(reference), gold).value == 1.0


PUZZLE = Example(id="e", prompt=question([44, 19, 35], 98), reference="", info={"nums": [44, 19, 35], "target": 98})
RIGHT = [
    r"\boxed{44 + 19 + 35}",
    r"\boxed{(19+44)+35 = 98}",
    r"\boxed{35 - (-44 - 19)}",
    r"so \boxed{44 \times 1} no, \boxed{\left(44 + 35\right) + 19}",
]
# What a policy finds that wants the reward and not the solution.
GREEDY = cells(r"""
    98  \boxed{98}  \boxed{98 = 98}  \boxed{44 + 19 + 35 + 0}  \boxed{44 + 19 + 35 - 1 + 1}  \boxed{44 + 54}
    \boxed{4 + 4 + 1 + 9 + 35 + 45}  \boxed{44 + 44 + 10}  \boxed{44 + 19}  \boxed{4419 + 35 - 4356}
    \boxed{44 + 1935}  \boxed{44 + 19 + 35 = 98 = 44 + 19 + 35}  \boxed{44 + 19 + 35 or 98}
    \boxed{44 + 19 + 35 == 98}  \boxed{[44, 19, 35] and 98}
    \boxed{__import__('os').system('true') or 44 + 19 + 35}  \boxed{44 + 19 + 35 # 98}
    \boxed{44 + 19 + 35 if 1 else 0}  \boxed{044 + 19 + 35}  \boxed{44.0 + 19 + 35}
    \boxed{44 + 19 + 35; 98}  \boxed{44 + 19 + 35, 98}  \boxed{４４ + 19 + 35}  \boxed{}  44 + 19 + 35
""")
HUGE = [
    "9**9**9**9",
    "44**19**35",
    "(" * 5000 + "1" + ")" * 5000,
    "9" * 5000,
    "-" * 5000 + "1",
    "1/0",
    "1//1",
    "9*" * 90,
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_solution_scores(text: str) -> None:
    assert CountdownReward().score(PUZZLE, text).value == 1.0


@pytest.mark.parametrize("text", GREEDY)
def test_what_is_no_solution_does_not(text: str) -> None:
    assert CountdownReward().score(PUZZLE, text).value == 0.0


def test_division_is_exact() -> None:
    puzzle = Example(id="e", prompt="", reference="", info={"nums": [3, 3, 8, 8], "target": 24})
    assert CountdownReward().score(puzzle, r"\boxed{8 / (3 - 8 / 3)}").value == 1.0
    assert evaluated("1 / 3") == (Fraction(1, 3), [1, 3])
    assert [evaluated(text) for text in HUGE] == [None] * len(HUGE), "9**9**9 would not end"
    assert solution([1, 1], 50) == ""
    assert CountdownReward().gold(Example(id="e", prompt="", reference="", info={"nums": [1, 1], "target": 50})) is None


@given(st.lists(st.integers(1, 100), min_size=3, max_size=4), st.lists(st.sampled_from("+-*"), min_size=3, max_size=3))
def test_gold_solves_what_can_be_solved(numbers: list[int], signs: list[str]) -> None:
    text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=False))
    made = evaluated(text)
    assert made is not None
    puzzle = Example(id="e", prompt="", reference="", info={"nums": numbers, "target": int(made[0])})
    gold = CountdownReward().gold(puzzle)
    assert gold is not None
    assert CountdownReward().score(puzzle, gold).value == 1.0
