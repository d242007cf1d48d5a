"""What counts as an answer: gamed ones, right ones in many forms, near misses, rewrites, units, keys that change it."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.answer_pairs import gamed_pairs, right_pairs
from retrain.api import Config, Example, Kind, PluginContext, Reward, Seeds, resolve
from retrain_rewards.answers.answer import TOLERANCE, are_cased, numbers_of, parsed
from retrain_rewards.answers.form import fingerprint, form_of, is_finished, is_literal, kind_of, reduced, value_of
from retrain_rewards.answers.notation import notation_of
from retrain_rewards.answers.statements import as_set, decimals, spellings, without_names
from retrain_rewards.answers.text import plain
from retrain_rewards.answers.units import NO_UNIT, dropped, objection_to_words
from retrain_rewards.boxed import boxed
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.math_reward import MathReward
from tests.kit.tables import cells, pairs

GAMED = {
    cause: table["pairs"]
    for cause, table in tomllib.loads(
        Path(__file__).with_name("gamed_answers.toml").read_text(encoding="utf-8")
    ).items()
}


def build(plugins, name="math", **keys):
    config = Config(tables={"reward": RewardTable.model_validate(keys)})
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins)
    made = resolve(plugins, Kind.REWARD, name, where="test").target(context)
    return made


@pytest.fixture(scope="session")
def reward(plugins):
    made = build(plugins)
    assert isinstance(made, MathReward)
    made.prepare()
    return made


@dataclass(frozen=True)
class Judge:
    """A reward, asked for its value."""

    reward: Reward

    def __call__(self, reference, answer, prompt=""):
        example = Example(id="e", prompt=prompt, reference=reference)
        score = self.reward.score(example, boxed(answer))
        assert not hasattr(score, "__await__")
        return score.value


@pytest.fixture(scope="session")
def judge(reward):
    return Judge(reward)


def direct(reference, answer):
    from math_verify import parse, verify

    return bool(verify(parse(boxed(reference)), parse(boxed(answer))))


def answers(cause):
    return [(row["reference"], row["answer"], row.get("prompt", "")) for row in GAMED[cause] if "answer" in row]


@pytest.mark.parametrize("cause", GAMED)
def test_a_gamed_answer_scores_0_and_math_verify_alone_is_fooled(reward, cause):
    strict = Judge(reward)
    for reference, answer, prompt in answers(cause):
        assert strict(reference, answer, prompt) == 0.0, (reference, answer)
        assert direct(reference, answer), (reference, answer)


@pytest.mark.parametrize("name", ["match", "math"])
def test_a_box_with_anything_beside_it_is_none(plugins, name):
    made = build(plugins, name)
    rows = [row for rows in GAMED.values() for row in rows if "completion" in row]
    assert len(rows) >= 6
    for row in rows:
        score = made.score(Example(id="e", prompt="", reference=row["reference"]), row["completion"])
        assert score.value == 0.0, row
    assert made.score(Example(id="e", prompt="", reference="5"), r"\boxed{\boxed{5}}").value == 1.0


def test_restating_a_prompt_of_our_own_arithmetic_scores_0(reward, load):
    examples = load("arithmetic", options={"size": 96}).examples
    assert len(examples) == 96
    for example in examples:
        question = str(example.prompt).removeprefix("What is ").removesuffix("?")
        assert reward.score(example, boxed(question)).value == 0.0, question
        assert reward.score(example, boxed(question.replace("*", r"\times"))).value == 0.0, question
        assert reward.score(example, reward.gold(example)).value == 1.0
    assert reward.score(example, boxed(f"{question} = {example.reference}")).value == 1.0


def test_right_answers_score_1_and_gamed_ones_0(judge):
    for pair in gamed_pairs(80, seed=1):
        assert judge(pair.reference, pair.answer, pair.prompt) == 0.0, pair
    for pair in right_pairs(102, seed=1):
        assert judge(pair.reference, pair.answer, pair.prompt) == 1.0, pair


@pytest.mark.long
def test_no_right_form_of_1000_is_lost_and_no_gamed_one_of_500_is_won(judge):
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
        1.602 \times 10^{-19} => 1.602 \cdot 10^{-19}  (0,0.0001) => (0,10^{-4})
    """,
    "names": r"""
        \text{no solution} => \mathrm{no solution}  \text{Not enough information} => \text{not enough information}
        5 => \text{Area of } ABC = 5  \{5\} => 5  101_2 => 101_{2}  101_2 => 101
    """,
}


@pytest.mark.parametrize("reason", ALIKE)
def test_right_answers_that_look_like_gamed_ones(judge, reason):
    for reference, answer in pairs(ALIKE[reason]):
        assert judge(reference, answer) == 1.0, (reference, answer)


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


def test_the_prompt_may_hold_the_form_or_the_unit_and_keys_accept_more(judge, plugins):
    assert [judge(reference, answer, prompt) for reference, answer, prompt in ALLOWED] == [1.0] * 6
    assert judge(r"\frac{1}{0}", r"\frac{1}{3}") is None, "a reference without a value still gives no verdict"
    lenient = Judge(build(plugins, unfinished="accept"))
    assert lenient("1024", "2^{10}") == lenient("10", r"\binom{5}{2}") == 1.0
    assert lenient("565", "348+217", "What is 348 + 217?") == 0.0  # the prompt's own
    assert lenient("5", "6=5") == lenient("5", r"5\text{ million}") == lenient("5", "5,5") == 0.0
    assert build(plugins) == build(plugins, strict=True, unfinished="refuse")
    assert Judge(build(plugins, strict=False))("565", "348+217", "What is 348 + 217?") == 1.0
    chat = [{"role": "system", "content": "You factor."}, {"role": "user", "content": "Factor $x^2-1$."}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Factor $x^2-1$."}]}]
    for prompt in (chat, parts):
        assert judge("(x-1)(x+1)", "x^2-1", prompt) == 0.0
        assert judge("(x-1)(x+1)", "(x+1)(x-1)", prompt) == 1.0


@pytest.mark.parametrize("unit", [r"\(", "$", r"\[ 1.5 ", "1.5 + ", "{", r"\frac{1.5}{", "x 1.5; ", "\x00"])
def test_a_hostile_prompt_costs_no_more_than_a_bounded_time(judge, unit):
    assert judge(r"\frac{1}{4}", "0.250", unit * (400_000 // len(unit))) in (0.0, 1.0)


@pytest.mark.parametrize("exponent", [-5, -19, -34])
def test_small_numbers_agree_within_the_relative_tolerance(judge, exponent):
    reference = rf"4 \times 10^{{{exponent}}}"
    inside, outside = 4 * (1 + 0.9 * TOLERANCE), 4 * (1 + 1.1 * TOLERANCE)
    assert judge(reference, rf"{outside:.4f} \times 10^{{{exponent}}}") == 0.0
    if exponent < -6:  # above it, math-verify's six decimals are the stricter bound
        assert judge(reference, rf"{inside:.4f} \times 10^{{{exponent}}}") == 1.0


def test_letters_stand_for_distinct_numbers_and_their_cases_for_two_letters_where_both_occur():
    values = {
        r"x+1": [2.234], r"x-y": [-0.711], r"(3,1,2)": [1, 2, 3], r"[1,3)": [1, 3], r"\{2,1\}": [1, 2],
        r"\begin{pmatrix}4\\2\end{pmatrix}": [2, 4], r"1<2": [], r"10^{-400}": [0],
    }  # fmt: skip
    for formula, expected in values.items():
        found = [complex(number) for number in numbers_of(parsed(formula)[0])]
        assert found == pytest.approx(expected, abs=1e-12), formula
    assert numbers_of(parsed("10^{-400}")[0])[0] != 0
    cased = {"Rr": True, "R": False, "r R": True, "Rs": False, r"r\text{R}": False, r"\Re r": False}
    assert {formula: are_cased(formula) for formula in cased} == cased
    assert are_cased("x", "Yy")
    assert not are_cased("x", "X")


OTHER_TEXTS = [
    *cells(r"""
    $5$  $5$ or $6$  no idea  5 apples  6:00  the final answer is 5  answer: $x$  \[5\]  1,000  50 percent
    x=1=2=3  a=b=\foo=3  $1$,$2$  \$5  5 + $3$  [5]  -5%  5$%$  \boxed  \neq 5
"""),
    "",
]


@pytest.mark.parametrize("count", [34, pytest.param(170, marks=pytest.mark.long)])
def test_formulas_are_parsed_as_math_verify_does(reward, count):
    from math_verify import parse

    made = [*right_pairs(count, seed=2), *gamed_pairs(count // 2, seed=2)]
    for text in {*OTHER_TEXTS, *(text for pair in made for text in (pair.reference, pair.answer))}:
        assert list(parsed(text)) == parse(boxed(text), parsing_timeout=None), text


FINISHED = cells(r"""
    \ln 1.5  0.5\pi  \begin{pmatrix}1 & 2\end{pmatrix}^T  5  -5  0.25  1,234  1/2  \frac{6}{2}  -\frac{3}{4}
    2\frac{1}{2}  6.63 \times 10^{-34}  10^6  5\%  \infty  2\pi  \frac{2}{3}\pi  \pi^2/6  e^2  e^{-1}
    \frac{1}{2e}  \ln 2  \log_2 3  \sqrt{12}  \frac{\sqrt{2}}{2}  \frac{1}{\sqrt{2}}  \frac{1+\sqrt{5}}{2}
    \sqrt[3]{2}  2^{\frac13}  \arctan 2  3+4i  \sqrt{6}+\sqrt{2}  \sqrt{\sqrt{3}}  4\sqrt{3}-2\pi  90^\circ
    x  A  n!  x^2-1  (x-1)(x+1)  x+\sqrt{12}  \binom{n}{k}  e^{-x^2}  \frac{x}{y}  \frac{x^2}{3^2}  (1, 2)
    [1, 2)  \{1, 2\}  1, 2  \pm 2  (-\infty, 0) \cup (0, \infty)  \mathbb{R}\setminus\{0\}  x = 5
    x^2 + y^2 = 5^2  1 < x < 2  x \in [1, 2)  f(x) = x^2  \emptyset
    \begin{pmatrix}1 & \frac{1}{2}\\3 & 4\end{pmatrix}  \frac{1}{5}\begin{pmatrix}1\\2\end{pmatrix}  -5\%  -10^6
""")
UNFINISHED = cells(r"""
    \sqrt{0.25}  \begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}^T  1.5 \cdot 2  348+217  348 217  2(3)  2 \cdot 3
    5^1  2^{10}  5!  -(-5)  |5|  6 \div 2  6:2  5 \mod 3  \sqrt{4}  \sqrt{3+4}  \sqrt{2}+\sqrt{8}
    \sqrt{2}\sqrt{2}  (1+\sqrt{2})^2  \ln e^2  \log_2 8  e^{\ln 5}  \sin\frac{\pi}{6}  \sin\frac{\pi}{3}
    \pi \cdot 3^2  3 \cdot 4\pi  0.5+0.5  \infty+1  \binom{5}{2}  \gcd(4, 6)  \max(1, 5)
    \lfloor 5.5 \rfloor  \Gamma(5)  \phantom{5}  2_3  5^{1}_{3}  \int_0^1 x^2 dx  \sum_{k=1}^{n} k
    \prod_{k=1}^{n} k  \lim_{x \to 0} x  \frac{d}{dx} x^2  \det\begin{pmatrix}1&0\\0&1\end{pmatrix}
    \begin{vmatrix}1&2\\3&4\end{vmatrix}  \begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}3\\4\end{pmatrix}
    \begin{pmatrix}1+3\\6\end{pmatrix}  3x+2x  2 \cdot 3x  x-x  x \cdot x  x^1  x+0  x \cdot 1  \frac{x}{1}
    x = 2+3  (1, 1+1)  \{1+1\}  [1-1, 2]  1+1 < x  [0, 5] \cap [1, 2]  \frac{4!}{2}  \frac{1+3}{2}
    \frac{1}{2} \cdot \frac{2}{3}  2\frac{3}{2}  -1 \cdot 5  -(-5\%)  2 \cdot 5\%  x^0  1^x  \frac{\pi}{0}  x/1
    \frac{2}{3} \cdot 3\pi  \frac{1}{2} \cdot \frac{1}{3\pi}  \pi/\sqrt{4}  2\frac{0}{3}  2\frac33  x^{y+y}
    \frac{2}{1} \cdot 3x  \begin{pmatrix}1 & 2\end{pmatrix}\begin{pmatrix}1\\2\end{pmatrix}  x|_{x=1}  6\div x
""")


@pytest.mark.parametrize("formula", [*FINISHED, *UNFINISHED])
def test_what_still_has_to_be_computed_is_not_finished(formula):
    assert is_finished(form_of(formula)) is (formula in FINISHED)


@pytest.mark.parametrize(
    ("formula", "kind"),
    pairs(r"""
        5 =>  1, 2 => list  \{1\} => {}  (1, 2, 3) => ()  (1, 2) => ()  [1, 2) => [)  (1, 2] => (]
        \left[1, 2\right] => []  x = 5 => =  x \in [1, 2] => =  \{1\} \cup \{2\} => union  x < 1 => <
        x \notin [1, 2) => \notin  x \approx 5 => =  x \equiv 5 => =  \lbrack 1, 2\rbrack => []  1, 2; 3 => list
    """),
)
def test_kinds(formula, kind):
    assert kind_of(form_of(formula)) == kind
    assert all(is_literal(form_of(literal)) for literal in ("-5", r"-2\frac{1}{2}", r"-5\%"))
    assert not any(is_literal(form_of(each)) for each in cells(r"2\pi  2+3  (1, 2)  10^{0.5}  5x^2  -1 \cdot 5"))
    for no_form in (r"\neq 1", r"\not 5", r"6 \to 5", "5.", r"\foo", "", "5 &"):
        with pytest.raises(Exception, match=r".*"):
            form_of(no_form)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        *(("348 + 217", "217+348", True), (r"\frac{6}{2}", "6/2", True), (r"\frac{6}{2}", "3", False)),
        *((r"\dfrac1{\sqrt 2}", r"\frac{1}{\sqrt{2}}", True), (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}", False)),
        *(("x^2 - 1", "-1 + x^{2}", True), ("x^2 - 1", "(x-1)(x+1)", False), ("0.25", r"\frac{1}{4}", False)),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
        *(("1, 2", r"\{1, 2\}", False), ("2x", "3x", False), ("x + 1", "1 + X", True)),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
    ],
)
def test_a_fingerprint_is_that_of_the_form_not_of_the_value(one, other, equal):
    assert (fingerprint(form_of(one)) == fingerprint(form_of(other))) is equal
    assert fingerprint(reduced(form_of(r"x \cdot x - 1 + 0"))) == fingerprint(reduced(form_of("x^2 - 1")))
    assert reduced(form_of(r"\int x dx")) == form_of(r"\int x dx"), "integrals are left"
    assert str(reduced(form_of(r"2\frac{1}{2}"))) == "5/2"
    assert form_of("x").is_real
    assert value_of("x")[0].is_real
    assert not form_of("i").is_real
    assert not value_of("i")[0].is_real


HARMLESS = pairs(r"""
    5\text{ cm} => 5  5 => 5\text{ cm}  5\text{ cm} => 5\text{ centimeters}  5 cm => 5\,\mathrm{cm}
    12\text{ square inches} => 12\text{ in}^2  50\text{ mph} => 50\text{ miles per hour}  \$5 => 5
    5\text{ dollars} => \$5  90^\circ => 90\text{ degrees}  90 => 90^{\circ}  5\% => 5\text{ percent}
    9.8\text{ m/s}^2 => 9.8  5 => 5\text{ kJ}  6 => 6\text{ pairs of socks}  6 => 6\text{ people}
    70\% \text{ of the voters} => 70\% \text{ of the voters}  70\% => 70\% \text{ of the voters}  5^\circ => 5\%
    5x => 5  5\text{ qqq} => 5  5 => \text{Area} = 5  5 => \text{a} 5  at 5 => \text{at} 5  5 => \text{km} 5
    5 => (\text{foo}.)  about 5 => \text{about}5  5\text{ kms} => 5 km  5\text{ cm}\text{ or }5 => 5\text{ or }5
    \text{Evelyn} => evelyn  \text{not enough} => \text{Not enough}  A => \text{(A)}  5 => \text{Area} = 5
""")
HARMFUL = pairs(r"""
    1 => 1\text{ million}  1 => 1\text{ dozen}  1 => 1\text{ or so}  1 => 1\text{ not}  1 => 1\text{, 2}
    3\text{ million} => 3  2t => 2  2 => 2t  5\text{ m} => 5\text{ km}  5\text{ cm} => 5\%
    5\text{ cm} => 5\text{ cm}^2  \$5 => 5\text{ euros}  5\text{ a.m.} => 5\text{ p.m.}
    5 => 5\text{ squared}  5 => 5\text{ floops}  5 => 5\text{ a }6\text{ b}  5 => \text{not } = 5
    5 => \text{roughly }5  5 => 5 no change  5\text{ floops} => 5\text{ cm}  5 => 5\text{ prime}
    2 => 2\text{ per}  70\% \text{ of the voters} => 70\% \text{ of the dogs}  5\text{ of those not red} => 5
    5^\circ => 5\text{ cm}  5\% => 5\text{ dollars}  5\text{ qqq} => 5\text{ rrr}  5 => \text{Area} 5  5 => \text{at} 5
    5 => \text{about}5  5 => \text{foo} 5 \text{ cm}  5\text{ qqq} => 5\text{ cm}  5\text{ floo} => 5^\circ
""")


@pytest.mark.parametrize(("reference", "answer"), [*HARMLESS, *HARMFUL])
def test_units_that_agree_or_are_left_out_are_harmless(reference, answer):
    reason = objection_to_words(reference, answer, "")
    assert bool(reason) is ((reference, answer) in HARMFUL)
    assert isinstance(reason, str)
    assert objection_to_words("5", r"5\text{ floops}", "How many floops are there?") == ""
    assert objection_to_words("5", r"5\text{ owl}", "owl") == ""
    assert objection_to_words("5", r"5\text{ go}", "How many go home?")
    assert objection_to_words("5", r"5\text{ million}", "How many million floops are there?")
    endings = {r"5\text{ cm}": r"\text{ cm}", "5 apples": "apples", r"x^2 + 1": "", r"\text{Evelyn}": ""}
    assert {text: dropped(text) for text in endings} == endings


# `and` and `or` separate values for math-verify, and `percent` is its sign: they do not end up in what it drops.
@given(
    st.sampled_from(sorted(NO_UNIT - {"and", "or", "percent"})), st.sampled_from(["cm", "apples", ""]), st.booleans()
)
def test_no_unit_has_a_word_that_changes_the_value(word, unit, first):
    words = f"{word} {unit}" if first else f"{unit} {word}"
    assert objection_to_words("5", rf"5\text{{ {words}}}", f"How many {word} {unit} are there?")


@given(st.text(max_size=40), st.text(max_size=20))
def test_any_text_is_survived(answer, prompt):
    assert isinstance(objection_to_words("5", answer, prompt), str)


FORMS = tomllib.loads(Path(__file__).with_name("answer_forms.toml").read_text(encoding="utf-8"))


def value(reward, reference, answer):
    return reward.score(Example(id="e", prompt="", reference=reference), f"So {boxed(answer)}.").value


def failures(reward, pairs):
    scored = [(reference, answer, value(reward, reference, answer), wanted) for reference, answer, wanted in pairs]
    return [(reference, answer, got) for reference, answer, got, wanted in scored if got != wanted]


@pytest.mark.parametrize("family", FORMS)
def test_right_forms_score_1_and_near_misses_0(reward, family):
    pairs = [(*pair, float(verdict == "right")) for verdict, found in FORMS[family].items() for pair in found]
    assert failures(reward, pairs) == []


@pytest.mark.parametrize(
    "formula",
    cells(r"""
        5  -5  x^2 - 1  \frac{1}{2}  1,2  (1,2)  [1,2)  \sqrt{2}  x = 5  n!  \pi r^2  2^{10}
        \begin{pmatrix}1\\2\end{pmatrix}  \{1, 2\}  \$5  50\%  f(x) = x^2  3:4  A  10^{-3}
    """),
)
def test_plain_mathematics_is_left_as_it_is(formula):
    assert plain(formula).replace("{", "").replace("}", "").replace(" ", "") == (
        formula.replace("{", "").replace("}", "").replace(" ", "")
    )
    for each in ("x", "5", "xy", "n^2", "F_{10}", "a_{2}", r"\sin x", r"\frac{1}{2}", "(x)", "3:4"):
        assert notation_of(each) is None, "no words, choice or numeral"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"0123456789{}()[]$.,;:%^_ -+/*=<>|xeA√½²°" + "\\",
                *(r"\text{", r"\pm", r"\overline{", r"\begin{cases}", r"\\", r"\frac", r"\mathrm{", r"\langle"),
                *(r"\text{ or }", r"\le ", r"\left(", "km", " or ", "1,200", "..."),
            ]
        ),
        max_size=25,
    )
)
def test_any_text_is_rewritten_without_an_error(parts):
    text = "".join(parts)
    for read in (plain, notation_of, as_set):
        read(text)
    assert isinstance(plain(plain(text)), str)


@pytest.mark.parametrize(
    "unit",
    [
        *cells(r"""
        \text{  \text{a}  {  }  1,  1,000,  .  ;  \sqrt(  √(  \frac{1}  km  *  \mathrm{  \pm  \left(  x<
        \begin{cases}  \begin{array}{c}  0.  0.1(  \text{a:}  9 9/  (A)  1:  ^2  \text{ km}^2  5/  ]  <
        \text{Answer:}  `  \,  \dot1  \mathbf{i}+  , k \in \mathbb{Z}  \text{ or }1  1 \approx 1.
    """),
        "1 ",
        r"\\",
        "km ",
        " or ",
        "a ",
        r"\cup ",
        "\\ ",
        "one hundred and ",
        " of the",
    ],
)
def test_a_text_of_the_greatest_length_is_rewritten_at_once(unit):
    text = unit * (1000 // len(unit))  # a pattern that backtracks exponentially would not come back
    for read in (plain, notation_of, as_set):
        read(text)
        read(text + "!")
    spellings(text), decimals(text), without_names(text, "5")
