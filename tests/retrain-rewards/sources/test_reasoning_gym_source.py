import inspect
import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import ConfigError, Score, install_line
from retrain_rewards.sources import reasoning_gym_library as entries
from retrain_rewards.sources.reasoning_gym import GUARDS, affirms_one, harmless, is_literal
from retrain_rewards.sources.reasoning_gym_library import from_plain, to_plain
from tests.kit.problems import refused
from tests.kit.tables import cells, pairs

pytestmark = pytest.mark.usefixtures("one_entries_process")


def boxed(answer):
    return rf"I think it is \boxed{{{answer}}}"


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *(
            ("chain_sum", {"min_digits": 1, "max_digits": 2}),
            ("rotate_matrix", {}),
            ("rearc", {}),
            ("gsm_symbolic", {}),
        ),
        ("composite", {"datasets": [{"name": "gcd"}, {"name": "lcm", "weight": 2.0, "config": {"max_numbers": 2}}]}),
    ],
)
def test_right_answers_score_one_and_wrong_ones_do_not(load, name, config):
    loaded = load("reasoning_gym", options={"name": name, "size": 6, "config": config})
    assert loaded.reward is not None
    for each in loaded.examples:
        example = replace(each, info=json.loads(json.dumps(dict(each.info))))  # tuples and fractions survive
        assert loaded.reward.score(example, boxed(example.reference)).value == 1.0
        assert loaded.reward.score(example, boxed("no idea")).value < 0.1
        assert loaded.reward.score(example, example.reference).value == 0.0
        assert loaded.reward.score(example, "").value == 0.0


@pytest.mark.long
def test_entries_do_not_depend_on_the_hash_seed(monkeypatch, load):
    kept_alive = [e.id for e in load("reasoning_gym", options={"name": "word_ladder", "size": 3}).examples]
    monkeypatch.setattr(entries, "subprocess", subprocess)  # from here on each is made in a process of its own
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = load("reasoning_gym", options={"name": "word_ladder", "size": 3})
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert [e.id for e in load("reasoning_gym", options={"name": "word_ladder", "size": 3}).examples] == [
        e.id for e in first.examples
    ]
    assert [e.id for e in first.examples] == kept_alive


def test_a_data_set_without_a_single_answer_is_judged_by_its_verifier(load):
    loaded = load("reasoning_gym", options={"name": "graph_color", "size": 2})
    example = loaded.examples[0]
    assert example.reference == ""
    solution = json.dumps(
        {str(k): v for k, v in from_plain(example.info["entry"])["metadata"]["possible_answer"].items()}
    )
    assert loaded.reward.score(example, boxed(solution)).value == 1.0
    for hack in ("", "{}", "None", "0"):
        assert loaded.reward.score(example, boxed(hack)).value < 0.1


@pytest.mark.parametrize(
    ("code", "options"),
    [
        *(("unknown-data-set", {"name": name}) for name in ("chain_sums", "zzzz")),
        ("unknown-option", {"config": {"max_term": 3}}),
        *(("misplaced-option", {"config": {name: 3}}) for name in ("seed", "level")),
        *(("bad-options", {"config": {"min_terms": value, "max_terms": 3}}) for value in (9, "two")),
        ("bad-options", {"name": "composite"}),
        ("generation-failed", {"name": "composite", "config": {"datasets": [{"name": "nothing"}]}}),
        ("no-levels", {"name": "gsm_symbolic", "level": 1}),
    ],
)
def test_bad_options_are_one_clear_error(load, code, options):
    assert refused(load, "reasoning_gym", options={"name": "chain_sum", "size": 2} | options) == [f"data.{code}"]
    for refused_by_keys in ({}, {"name": ""}, {"name": "gcd", "size": 0}, {"name": "gcd", "conf": {}}):
        with pytest.raises(AssertionError, match="Problem"):
            load("reasoning_gym", options=refused_by_keys)


def test_every_verifier_that_evaluates_is_guarded_and_a_missing_library_is_told(load, monkeypatch):
    # number_sorting evaluates its own entry only, never the answer
    assert evaluating() - {"number_sorting"} <= GUARDS.keys()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=re.escape(install_line("retrain-rewards", "reasoning-gym"))):
        load("reasoning_gym", options={"name": "gcd"})


def evaluating():
    """Data sets of the installed library whose verifier mentions an evaluator."""
    import reasoning_gym  # noqa: F401
    from reasoning_gym.factory import DATASETS

    pattern = re.compile(r"\beval\(|\bexec\(|\bparse_expr\(|sympify\(|Fraction\(|Decimal\(|pickle|subprocess|compile\(")
    return {name for name, (kind, _) in DATASETS.items() if pattern.search(inspect.getsource(kind.score_answer))}


CODE = [
    *cells("""
    __import__('os').system('touch {path}')  [c for c in ().__class__.__base__.__subclasses__()]
    open('{path}', 'w').write('x')  exec("open('{path}', 'w')")  (lambda: open('{path}', 'w'))()
    [open('{path}', 'w')]  f'{open("{path}", "w")}'  x.__class__  [0]*10**10
"""),
    "  open('{path}', 'w')",
]
RUNAWAY = ["9**9**9**9", "((9**99)**99)**99", "2**(9*9*9*9*9*9)", "factorial(99999999)", "99999999!", "1e999999999"]
RUNAWAY += [
    *("exp(exp(exp(exp(9))))*9**9**9", "9**99999", "(" * 10_000, "-" * 100_000 + "1", "x" * 3000, "Integral(x, x)"),
]


@pytest.mark.parametrize("name", sorted(GUARDS))
def test_no_verifier_runs_model_output_and_honest_answers_still_count(load, name, tmp_path):
    path = tmp_path / "planted"
    loaded = load("reasoning_gym", options={"name": name, "size": 8})
    for code in CODE:
        answer = code.replace("{path}", str(path))
        assert not harmless(name, answer)
        assert loaded.reward.score(loaded.examples[0], boxed(answer)).value < 0.1
    for answer in RUNAWAY:
        assert not harmless(name, answer) or GUARDS[name] is is_literal
        assert loaded.reward.score(loaded.examples[0], boxed(answer)).value < 0.1
    assert not path.exists()
    honest = [example for example in loaded.examples if "Integral" not in example.reference]
    assert honest
    assert all(loaded.reward.score(example, boxed(example.reference)).value == 1.0 for example in honest)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.sampled_from(["__tuple__", "__pairs__", "__set__"]), inner)
        | st.sets(st.integers())
    ),
    max_leaves=15,
)


@given(PLAIN)
def test_plain_data_comes_back_as_it_was(value):
    back = from_plain(json.loads(json.dumps(to_plain(value))))
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | frozenset) or "{" in repr(value)
    with pytest.raises(TypeError, match="object is not plain data"):
        to_plain({"a": [object(), value]})


@pytest.mark.slow
def test_entries_whose_own_answer_may_not_be_verified_are_left_out_and_counted(load):
    loaded = load("reasoning_gym", options={"name": "intermediate_integration", "size": 60})
    assert not any("Integral" in e.reference for e in loaded.examples)
    (note,) = [note for note in loaded.notes if "left out" in note]
    assert re.search(
        r"[1-9]\d* rows left out: no answer that may be verified \(first: intermediate_integration entry", note
    )


HEDGED = pairs(r"""
    \neq 78 => 78  78\text{ or }79 => 78  78\text{, but maybe 79} => 78  78\text{ million} => 78  78 or 79 => 78
    not 78 => 78  not Oliver is a pioneer => Oliver is a pioneer  RD or UL => RD
""")
PLAINLY = pairs(r"""
    78 => 78  78\text{ dollars} => 78  \text{True} => True  not => not  to be or not to be => be to not or be to
    a \neq b => x \neq y  normal => 78
""")  # the verifier compares the words of a text


HONEST = [
    *pairs(r"""
        countdown => (3 + 4)*2 - 1/5  puzzle24 => 8*3*1**2  polynomial_multiplication => -60*x**4 + 3*x*y - 1.5
        simple_integration => 3*x**2/2 + sin(x)*exp(-x**2) + C  spiral_matrix => 1 2 3  coin_flip => 1/8
        intermediate_integration => x**(1/2) + 2**x + sqrt(x) + C  string_insertion => ABCDE
        binary_matrix => [[0, 1], [1, 0]]  coin_flip => 3.05e-05  power_function => -1.5E+21
    """),
    ("n_queens", "_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _"),
    ("chain_sum", "__import__('os')"),  # compared as text only
]


@pytest.mark.parametrize("name", ["gsm_symbolic", "knights_knaves"])
def test_a_lenient_verifier_of_the_library_gets_no_hedge_and_honest_answers_reach_it(load, name):
    for answer, right in (*HEDGED, *PLAINLY):
        assert affirms_one(answer, right) is ((answer, right) in PLAINLY), answer
    assert all(harmless(verifier, answer) for verifier, answer in HONEST)
    loaded = load("reasoning_gym", options={"name": name, "size": 2})
    for example in loaded.examples:
        right = example.info["entry"]["answer"]
        assert loaded.reward.score(example, rf"\boxed{{{right}}}") == Score.of(1.0)
        for wrong in (rf"\neq {right}", f"not {right}", rf"{right}\text{{ or }}7"):
            assert loaded.reward.score(example, rf"\boxed{{{wrong}}}") == Score.of(0.0), wrong


def test_difficulty_by_the_data_sets_own_levels(load):
    levels = (
        {"level": 0},
        {"level": 4},
        {"level": 4},
        {"level": 4, "seed": 99},
        {"level": 4, "config": {"max_terms": 2}},
    )
    easy, hard, of_level_4, other, own = (
        load("reasoning_gym", options={"name": "chain_sum", "size": 20, **options}).examples for options in levels
    )
    assert [e.id for e in hard] == [e.id for e in of_level_4]
    assert not {e.id for e in hard} & {e.id for e in other}
    terms = [max(str(e.prompt).count("+") + str(e.prompt).count("-") for e in found) for found in (easy, hard, own)]
    assert terms[0] == terms[2] == 1
    assert terms[1] > 1
