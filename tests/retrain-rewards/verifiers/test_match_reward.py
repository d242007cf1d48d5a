"""Boxes, and the rewards that read one: equal text, the last number, number puzzles; functions of the user."""

import pickle
import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import (
    Config,
    ConfigError,
    Example,
    Kind,
    Outcome,
    PluginContext,
    RewardError,
    Score,
    Seeds,
    resolve,
)
from retrain.api import resolve as resolved
from retrain_rewards.boxed import last_boxed
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.countdown import CountdownReward, evaluated, question, solution
from retrain_rewards.verifiers.custom import Style
from retrain_rewards.verifiers.match import last_number
from tests.kit.problems import codes_in, refused
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
def test_finds_the_last_box(text, answer):
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
def test_no_answer(text):
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
def test_a_megabyte_of_hostile_text_is_read_in_linear_time(unit, answer):
    # Anything quadratic would take hours here and run into the suite's time limit.
    assert last_boxed(unit * (1_000_000 // len(unit))) == answer
    assert last_boxed(r"\boxed{" + "{" * 500_000 + "}" * 500_000 + "}") == "{" * 500_000 + "}" * 500_000


def _simple_group(text, start):
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


def _simple_answer(text):
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
def test_brace_matching_agrees_with_a_simple_reader(pieces):
    text = "".join(pieces)
    assert last_boxed(text) == _simple_answer(text)


@given(st.text(alphabet=st.characters(exclude_characters="\\{}", exclude_categories=["Cs"])), st.text())
def test_a_box_put_at_the_end_is_found_whatever_stands_before(answer, before):
    assert last_boxed(f"{before}\\boxed{{{answer}}}") == answer.strip()
    assert (found := last_boxed(before)) is None or found in before


def make(plugins, **keys):
    context = PluginContext(config=Config(tables={"reward": RewardTable(**keys)}), seeds=Seeds(0), plugins=plugins)
    made = resolve(plugins, Kind.REWARD, "match", where="test").target(context)
    return made


@pytest.fixture
def reward(plugins):
    return make(plugins)


@pytest.fixture
def reads_numbers(plugins):
    return make(plugins, answer="last_number")


def example(reference):
    return Example(id="e", prompt="p", reference=reference)


EQUAL = [*pairs(r"5 => \boxed{5}  nan => \boxed{nan}"), (" 5 ", r"\boxed{ 5}"), ("a  b", "\\boxed{a\n b}")]
OTHER = pairs(
    r"5 => \boxed{6}  5 => \boxed{5} no, \boxed{6}  5 => \boxed{5  5 => 5  5 =>  5 => \boxed{}  0.5 => \boxed{1/2}"
)


@pytest.mark.parametrize(("reference", "text"), [*EQUAL, *OTHER])
def test_equal_as_text(reward, reference, text):
    score = reward.score(example(reference), text)
    assert score == Score.of(float((reference, text) in EQUAL))
    assert reward.score(example(reference), reward.gold(example(reference))).value == 1.0


@pytest.mark.parametrize("reference", ["", " \n"])
@pytest.mark.parametrize("text", ["", r"\boxed{}", "silence"])
def test_an_empty_reference_is_never_a_free_point(reward, reference, text):
    assert refused(reward.score, example(reference), text) == ["reward.no-reference"]


@pytest.mark.parametrize(
    ("text", "number"),
    pairs("""
        7 + 5 = 12. => 12  **12** => 12  x12y => 12  12.50 dollars => 12.50  1,234,567 => 1234567  1,2,3 => 3
        3,4567 => 4567  12, => 12  8 - 20 = -12 => -12  8-20 => 20  (8)-20 => 20  - 12 => 12  12\u0664 => 12
        v1.2.3 => 3  twelve =>   =>
    """),
)
def test_the_last_number(text, number):
    assert (last_number(text) or "") == number
    for flood in ("1" * 200_000, "1,111" * 40_000, "1," * 100_000, "-" * 200_000):
        last_number(flood)  # a quadratic search would take minutes


SAID = pairs("12 => 7 + 5 is 12  1,200 => That makes 1,200.  -3 => 9 - 12 = -3")
NOT_SAID = pairs("12 => 12, or 13  12 => 112  12 => -12  12 => 12.0  12 =>")


@pytest.mark.parametrize(("reference", "text"), [*SAID, *NOT_SAID])
def test_the_last_number_counts_where_the_configuration_says_so(reads_numbers, reference, text):
    assert reads_numbers.score(example(reference), text).value == float((reference, text) in SAID)
    gold = reads_numbers.gold(example(reference))
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
    *("9**9**9**9", "44**19**35", "(" * 5000 + "1" + ")" * 5000, "9" * 5000, "-" * 5000 + "1", "1/0", "1//1"),
    "9*" * 90,
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_solution_scores(text):
    assert CountdownReward().score(PUZZLE, text).value == 1.0


@pytest.mark.parametrize("text", GREEDY)
def test_what_is_no_solution_does_not(text):
    assert CountdownReward().score(PUZZLE, text).value == 0.0


def test_a_puzzle_names_its_numbers_and_division_is_exact():
    assert all(each in PUZZLE.prompt for each in ("44, 19, 35", "98"))
    puzzle = Example(id="e", prompt="", reference="", info={"nums": [3, 3, 8, 8], "target": 24})
    assert CountdownReward().score(puzzle, r"\boxed{8 / (3 - 8 / 3)}").value == 1.0
    assert evaluated("1 / 3") == (Fraction(1, 3), [1, 3])
    assert [evaluated(text) for text in HUGE] == [None] * len(HUGE), "9**9**9 would not end"
    assert solution([1, 1], 50) == ""
    assert CountdownReward().gold(Example(id="e", prompt="", reference="", info={"nums": [1, 1], "target": 50})) is None


@given(st.lists(st.integers(1, 100), min_size=3, max_size=4), st.lists(st.sampled_from("+-*"), min_size=3, max_size=3))
def test_gold_solves_what_can_be_solved(numbers, signs):
    text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=False))
    made = evaluated(text)
    assert made is not None
    puzzle = Example(id="e", prompt="", reference="", info={"nums": numbers, "target": int(made[0])})
    gold = CountdownReward().gold(puzzle)
    assert gold is not None
    assert CountdownReward().score(puzzle, gold).value == 1.0


EXAMPLE = Example(id="e", prompt="p", reference="5", info={"bonus": 0.25})


@pytest.fixture
def build(plugins, tmp_path, monkeypatch):
    """`build("def score...")`: the reward of a module with this text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    number = 0

    def make(text, function="score", module=""):
        nonlocal number
        number += 1
        name = f"my_reward_{tmp_path.name}_{number}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        table = RewardTable(type="custom", custom_module=module or name, custom_function=function)
        context = PluginContext(config=Config(tables={"reward": table}), seeds=Seeds(0), plugins=plugins)
        made = resolved(plugins, Kind.REWARD, "custom", where="test").target(context)
        return made

    yield make
    for name in set(sys.modules) - before:
        if "my_reward" in name:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "style", "value"),
    [
        ("def score(response, reference): return float(response == reference)", Style.TEXTS, 1.0),
        ("def score(pred, gold): return pred == gold", Style.TEXTS, 1.0),
        ("def score(a, b, /, strict=True): return 2", Style.TEXTS, 2.0),
        ("async def score(response, reference): return response == reference", Style.TEXTS, 1.0),
        ("score = lambda response, reference: -0.5", Style.TEXTS, -0.5),
        ("def score(example, completion): return example.info['bonus']", Style.EXAMPLE, 0.25),
        ("def score(example, text): return len(text) + example.info['bonus']", Style.EXAMPLE, 1.25),
        ("async def score(example, text): return example.info['bonus']", Style.EXAMPLE, 0.25),
        ("def score(task: 'retrain.api.Example', x): return task.info['bonus']", Style.EXAMPLE, 0.25),
        ("class Judge:\n    def __call__(self, response, reference): return 3\nscore = Judge()", Style.TEXTS, 3.0),
        ("import numpy\ndef score(response, reference): return numpy.float32(0.5)", Style.TEXTS, 0.5),
        (
            "import asyncio\nlock = asyncio.Lock()\nloops = set()\nasync def score(a, b):\n    async with lock:\n"
            "        loops.add(id(asyncio.get_running_loop()))\n    return len(loops)",
            *(Style.TEXTS, 1.0),
        ),
        ("import functools\ndef f(k, a, b): return k\nscore = functools.partial(f, 7)", Style.TEXTS, 7.0),
    ],
)
def test_both_signatures_plain_and_async(build, text, style, value):
    reward = build(text)
    assert reward.style is style
    assert [reward.score(EXAMPLE, "5") for _ in range(3)] == [Score.of(value)] * 3


@pytest.mark.parametrize("value", ["'1.0'", "b'1'", "[1.0]", "{}", "object()", "1j", "float"])
def test_what_is_no_score_is_refused(build, value):
    with pytest.raises(RewardError) as caught:
        build(f"def score(response, reference): return {value}").score(EXAMPLE, "5")
    assert codes_in(caught) == ["reward.bad-result"]


def test_an_exit_is_an_error_and_other_exceptions_go_through(build):
    plain = build("import sys\ndef score(a, b): sys.exit(3)")
    waiting = build("import sys\nasync def score(a, b): sys.exit(3)")
    for reward in (plain, waiting, waiting):
        with pytest.raises(RewardError, match=r"sys.exit\(3\)") as caught:
            reward.score(EXAMPLE, "5")
        assert codes_in(caught) == ["reward.function-exited"]
    for value in ("float('nan')", "float('inf')"):
        with pytest.raises(ValueError, match="finite"):
            build(f"def score(response, reference): return {value}").score(EXAMPLE, "5")
    text = "from retrain.api import Score\ndef score(a, b):\n    return Score.no_verdict(a) if a != 'none' else None"
    assert build(text).score(EXAMPLE, "why") == Score.no_verdict("why")
    assert build(text).score(EXAMPLE, "none").outcome is Outcome.NO_VERDICT
    with pytest.raises(KeyError, match="mine"):
        build("def score(a, b): raise KeyError('mine')").score(EXAMPLE, "5")
    reward = build("def score(a, b): return a == b\ndef gold(example): return example.reference")
    assert reward.gold(EXAMPLE) == "5"
    assert build("def score(a, b): return a == b").gold(EXAMPLE) is None
    assert build("gold = 'a bar'\ndef score(a, b): return a == b").gold(EXAMPLE) is None
    with pytest.raises(RewardError) as caught:
        build("def score(a, b): return a == b\ndef gold(example): return 5").gold(EXAMPLE)
    assert codes_in(caught) == ["reward.bad-gold"]


FAULTS = {
    "function-missing": ("def scroe(a, b): ...", "x = 1"),
    "not-a-function": ("score = 5",),
    "bad-signature": (
        *("def score(a): ...", "def score(a, b, c): ...", "def score(a, b, *, c): ...", "def score(*texts): ..."),
        *("def score(*, response, reference): ...", "score = min"),
    ),
    "arguments-swapped": ("def score(completion, example): ...", "def score(reference, response): ..."),
    "import-failed": ("import no_such_module_x", "1/0", "def score(a b): ...", "raise SystemExit(3)"),
    "bad-gold": ("def score(a, b): ...\ndef gold(a, b): ...",),
}


@pytest.mark.parametrize(("code", "text"), [(code, text) for code, texts in FAULTS.items() for text in texts])
def test_faults_of_the_function_are_found_before_training(build, code, text):
    with pytest.raises(ConfigError) as caught:
        build(text)
    assert codes_in(caught) == [f"reward.{code}"]
    (problem,) = caught.value.problems
    key = "custom_module" if code in ("import-failed", "bad-gold") else "custom_function"
    assert problem.where.startswith(f"[reward] {'custom_function' if code == 'bad-gold' else key}")
    assert problem.fix
    assert "scroe" not in text or problem.fix == "did you mean 'scroe'?"


@pytest.mark.parametrize(
    ("module", "code"),
    [
        (" ", "no-module"),
        *((name, "module-missing") for name in ("no_such_module_x", "no_such_module_x.y", "missing.py")),
        *((name, "bad-module-name") for name in ("a/b", "a-b", "..")),
    ],
)
def test_a_module_that_is_not_there(build, module, code):
    with pytest.raises(ConfigError, match=r"\[reward\] custom_module") as caught:
        build("", module=module)
    assert codes_in(caught) == [f"reward.{code}"]


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_path_to_a_file_is_a_module_too(build, tmp_path, is_absolute):
    folder = tmp_path / "my rewards"
    folder.mkdir()
    (folder / "beside_my_reward.py").write_text("VALUE = 0.5", encoding="utf-8")
    text = "import beside_my_reward\nfrom dataclasses import dataclass\n@dataclass\nclass Part:\n    x: int = 1\n"
    text += "def score(response, reference): return beside_my_reward.VALUE * Part().x"
    (folder / "score-it.py").write_text(text, encoding="utf-8")
    reward = build("", module=str(folder / "score-it.py") if is_absolute else "my rewards/score-it.py")
    assert reward.score(EXAMPLE, "5").value == 0.5


def test_it_scores_in_a_fresh_process_in_another_folder(build, tmp_path):
    reward = build("async def score(response, reference): return len(response)\ndef gold(example): return 'x'")
    file = tmp_path / "reward.pickle"
    file.write_bytes(pickle.dumps(reward))
    code = (
        "import pickle, sys; from retrain.api import Example\n"
        "reward = pickle.load(open(sys.argv[1], 'rb')); reward.prepare()\n"
        "example = Example(id='e', prompt='p', reference='r')\n"
        "print(reward.score(example, 'four').value, reward.gold(example))"
    )
    command = [sys.executable, "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout.split() == ["4.0", "x"]
