"""Programs in the layouts of well-known data sets; right, wrong and hostile programs and replies; the sandbox."""

import decimal
import errno
import json
import re
import resource
import struct
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Config, Example, Kind, PluginContext, RewardError, Seeds
from retrain.kernel.config.schema import DataTable
from retrain.kernel.plugins.resolve import build_part
from retrain_rewards.sandbox import sandbox as box
from retrain_rewards.sandbox.process import Limits
from retrain_rewards.sandbox.values import Encoder, decoded, parsed
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.code.compare import matches, printed_as_expected, read_reply, reply_limit
from retrain_rewards.verifiers.code.layouts import CallTest, CodeTest, StdinTest, read_tests
from retrain_rewards.verifiers.code.reward import CodeReward
from tests.kit.problems import codes_in, refused
from tests.kit.tables import pairs

SANDBOX, REASON = box.find_sandbox()
TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))
needs_sandbox = pytest.mark.skipif(SANDBOX is None, reason=f"no sandbox works here: {REASON}")


def fenced(program):
    return f"```python\n{program}\n```"


def example_of(name):
    tests = TABLE[name]["tests"].replace("LONG", str(decimal.Context(prec=7000).power(2, 20_000)))
    tests = json.loads(tests) if tests.startswith('"') else tests  # the other layouts are read from JSON
    return Example(id=name, prompt="", reference="", info={**TABLE[name].get("info", {}), "tests": tests})


def reward_for(sandbox, **keys):
    has_numpy = keys.get("numpy", False)
    limits = Limits(memory_bytes=2**31 if has_numpy else 2**29, cpu_s=4)
    return CodeReward(
        sandbox=box.with_numpy(sandbox) if has_numpy else sandbox, limits=limits, time_limit_s=60.0, **keys
    )


def verdicts(name, sandbox):
    """The programs of a group that are judged wrongly, with the reasons."""
    if TABLE[name].get("keys", {}).get("numpy"):
        pytest.importorskip("numpy")
    reward = reward_for(sandbox, **TABLE[name].get("keys", {}))
    example, wrongly = example_of(name), {}
    for kind, value, timeout_s in (("right", 1.0, 20.0), ("wrong", 0.0, 0.6)):
        for label, program in TABLE[name].get(kind, {}).items():
            score = replace(reward, test_timeout_s=timeout_s).score(example, fenced(program))
            if score.value != value:
                wrongly[f"{kind}: {label}"] = score.detail
    return wrongly


GROUPS = [pytest.param(name, marks=pytest.mark.slow if "numpy" in name else ()) for name in TABLE]


@pytest.mark.parametrize("name", GROUPS)
def test_right_programs_pass_and_wrong_or_hostile_ones_do_not(name):
    assert verdicts(name, SANDBOX or box.NO_SANDBOX) == {}


@pytest.mark.long
@needs_sandbox
@pytest.mark.parametrize("name", TABLE)
def test_without_a_sandbox_the_verdicts_are_the_same(name):
    assert verdicts(name, box.NO_SANDBOX) == {}


CALL = Example(
    id="call", prompt="", reference="", info={"tests": {"fn_name": "f", "inputs": [[1]], "outputs": [[1, 2]]}}
)
MANY = range(3000)
FORGED = {
    "dicts": "b'{},' * 2_000_000",
    "lists": "b'[],' * 2_000_000",
    "numbers": "b'1,' * 4_000_000",
    "collisions": "b''.join(b'%d,' % (n * (2**61 - 1)) for n in range(200_000))",
}
FORGER = """
import os
def f(n):
    text = b'+["set",' + FORGED + b'1]'
    for fd in range(3, 30):
        try: os.write(fd, len(text).to_bytes(8, 'big') + text)
        except OSError: pass
    return [1, 2]
"""


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_reply_costs_the_scoring_process_next_to_nothing(name):
    """The reply is written to the channel directly, past all bounds inside."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    reward = replace(reward_for(SANDBOX or box.NO_SANDBOX), test_timeout_s=5.0)
    score = reward.score(CALL, fenced(FORGER.replace("FORGED", FORGED[name])))
    assert (score.value, score.detail) == (0.0, "test 1 of 1: the program answered with too much")
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime - before.ru_utime < 1.0
    assert after.ru_maxrss - before.ru_maxrss < 64 * 1024


@pytest.mark.parametrize(
    "expected",
    [{*MANY}, dict.fromkeys(MANY, 0), [frozenset(MANY)], {frozenset(MANY)}, {(n,) for n in MANY}],
    ids=["set", "dict", "frozenset", "set-of-frozenset", "set-of-tuples"],
)
def test_values_that_collide_are_never_put_into_a_table(expected):
    text = Encoder().encode(expected)
    hostile = re.sub(r"\d+", lambda found: str(int(found[0]) * (2**61 - 1)), text)  # all of the same hash
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    size, items = reply_limit(expected)
    assert len(hostile) <= size
    assert not matches(read_reply(hostile, items), expected)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 0.5
    assert matches(parsed(text), expected)


@pytest.mark.parametrize(
    "forged",
    [
        *(["tuple", ["nonsense"]], ["dict", 1], ["float", "x"], [{}], [[]], [], ["&", 5], ["&", "a"]),
        ["namedtuple", "x y", 1],
        *(["Fraction", 1, 0], ["Decimal", "x"], ["date", "yesterday"], ["range", 1, 2, 0], ["int", "zz"], ["ndarray"]),
        *(["object", 1, ["class", 1]], ["yours", 0], ["error"], ["deque", "x"], ["defaultdict"], ["array", "i", "x"]),
    ],
)
def test_forged_values_are_refused(forged):
    with pytest.raises(ValueError, match="no plain value"):
        decoded(forged)
    for text in NO_REPLIES:
        with pytest.raises(ValueError):  # noqa: PT011 - by any of several parts
            parsed(text)
    for expected in (1, "x", [1], (1,), {1}, {1: 2}, 1.5, None):
        assert not matches(forged, expected)
        assert not matches(forged, expected, as_json=True, tolerance=1e-3)


NO_REPLIES = [
    *("{}", "[{}]", '{"a":1}', "NaN", "[Infinity]", "[1", "1 2", "", "[" * 100_000, "1" * 5_000, "\ud800", "[,]"),
]
PRINTED = {
    0.0: ("7 => 7", "0.5 => 0.50   => 7"),
    1e-9: ("0.5 => 0.50  a 0.5 b => a 0.50 b  1 => 1.0  1e0 => 1.0", "1.0 => 1"),  # a whole number is expected
    0.1: ("nan => nan  1.1 => 1.0", "inf => 1.0  nan => 1.0  1_0 => 10.0  1e9999 => 1.0  0.5 0.5 => 0.5"),
}


@pytest.mark.parametrize("tolerance", PRINTED)
def test_printed_lines_agree_within_the_tolerance(tolerance):
    for text, same in zip(PRINTED[tolerance], (True, False), strict=True):
        for output, expected in pairs(text):
            assert printed_as_expected(output, expected, tolerance=tolerance) is same, (output, expected)
    assert printed_as_expected("7 \n\n", "7", tolerance=tolerance)
    assert printed_as_expected("0.5  1", "0.5 1", tolerance=tolerance) is (tolerance > 0)
    for output, expected in (("7\n8", "7"), ("7", "7\n8"), ("\n7", "7")):
        assert not printed_as_expected(output, expected, tolerance=tolerance)


@needs_sandbox
@pytest.mark.parametrize(
    "program",
    [
        "from multiprocessing import Pool\nwith Pool(2) as pool: print(sum(pool.map(int, input().split())))",
        "import multiprocessing\np = multiprocessing.Process(target=print, args=(3,))\np.start()\np.join()",
        "import subprocess\nprint(subprocess.check_output(['echo', '3'], text=True))",
    ],
)
def test_a_program_that_wants_processes_gets_a_reason(program):
    score = replace(reward_for(SANDBOX or box.NO_SANDBOX), test_timeout_s=2.0).score(
        example_of("stdin-sum"), fenced(program)
    )
    assert score.value == 0.0
    assert "does not offer further processes" in score.detail


@needs_sandbox
def test_threads_are_counted_from_outside():
    program = TABLE["stdin-sum"]["wrong"]["ten thousand threads"]
    limits = Limits(memory_bytes=2**32)  # room for all of them
    reward = replace(reward_for(SANDBOX or box.NO_SANDBOX), test_timeout_s=5.0, limits=limits)
    score = reward.score(example_of("stdin-sum"), fenced(program))
    assert (score.value, score.detail) == (0.0, "test 1 of 2: the program started too many threads")


APPS = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
HUMANEVAL = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\n"


def read(tests, column="tests", **info):
    example = Example(id="e", prompt="p", reference="", info={**info, "tests": tests})
    return read_tests(example, column, in_reference=False)


def test_tests_in_every_layout_are_read():
    wanted = (StdinTest(stdin="1 2\n", stdout="3\n"), StdinTest(stdin="3\n4", stdout="7"))
    assert read([{"input": "1 2\n", "output": "3\n"}, {"input": ["3", "4"], "output": 7}]) == wanted
    assert read(APPS) == read(json.dumps(APPS)) == wanted
    example = Example(id="e", prompt="p", reference=json.dumps(APPS))
    assert read_tests(example, "input_output", in_reference=True) == wanted
    stdin = {"input": "1", "output": "2", "testtype": "stdin"}
    assert read(json.dumps([stdin])) == (StdinTest(stdin="1", stdout="2"),)
    wanted = CallTest(function="add", arguments=[1, [2]], expected=3, is_json=True)
    assert read({"fn_name": "add", "inputs": [[1, [2]]], "outputs": [[3]]}) == (wanted,)
    assert read(
        None, verification={"tests": [{"function": "add", "args": [1, [2]], "output": 3}]}, column="verification.tests"
    ) == (wanted,)
    assert read([{"function": "add", "args": [1, [2]], "output": 3}]) == (wanted,)
    livecode = {"input": "1\n[2]\n", "output": "3", "testtype": "functional"}
    assert read([livecode], metadata='{"func_name": "add"}') == (wanted,)
    simple, more = read(["assert add(1, b=-2) == [(3,)]", "assert abs(add(1, 2) - 3) < 1e-9"])
    assert simple == CallTest(function="add", arguments=[1], keywords={"b": -2}, expected=[(3,)])
    assert isinstance(more, CodeTest)
    assert more.names == ["add"]
    (prepared,) = read(["assert near(f(1), 3)"], test_imports=["from math import isclose as near"])
    assert prepared.names == ["f"]
    assert prepared.source.startswith("from math import isclose as near\n")
    (check,) = read(HUMANEVAL, entry_point="double")
    assert check.names == ["double"]
    assert check.source.endswith("\ncheck(double)\n")


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        *(("no-tests", tests) for tests in (None, [], "  ", {"inputs": [], "outputs": []})),
        ("silent-tests", [{"input": "1", "output": " \n"}]),
        *(("unreadable-tests", tests) for tests in ({"inputs": ["1", "2"], "outputs": ["1"]}, [{"input": "1"}], [5])),
        *(("unreadable-tests", tests) for tests in (["assert f(1 == 2"], ["assert True"], "def check(f):\n    pass\n")),
    ],
)
def test_tests_that_any_program_would_pass_or_none_are_no_tests(code, tests):
    with pytest.raises(RewardError, match="example e") as caught:
        read(tests)
    assert codes_in(caught) == [f"reward.{code}"]


def test_tests_may_stand_in_the_answer_column(plugins, tmp_path):
    """Reward `code` reads them; for any other reward a list is no reference."""
    tests = [{"input": "1", "output": "2"}]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "Add one.", "tests": tests}), encoding="utf-8")
    data = DataTable(source="files", path=str(tmp_path / "p.jsonl"), answer_key="tests")

    def load(reward):
        config = Config(tables={"data": data, "reward": RewardTable(type=reward)})
        context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins)
        loaded = build_part(Kind.DATA_SOURCE, "files", "test", context, config.data.options, "test").load()
        return loaded

    (example,) = load("code").examples
    assert read_tests(example, "tests", in_reference=True) == (StdinTest(stdin="1", stdout="2"),)
    assert refused(load, "match") == ["data.bad-reference"]


REFUSED = box.DENY | errno.EPERM
READ = {"x86_64": 0, "aarch64": 63}


def played(filtered, architecture, number, flags=0):
    """What the kernel would do with a call."""
    data = {0: number, 4: architecture, 16: flags}
    steps = list(struct.iter_unpack("=HBBI", filtered))
    value, place = 0, 0
    while True:
        code, then, otherwise, operand = steps[place]
        place += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            value = data[operand]
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        place += then if holds else otherwise


@pytest.mark.parametrize("machine", box.AUDIT)
def test_it_denies_what_a_program_does_not_need(machine):
    filtered, here = box.system_call_filter(machine), box.AUDIT[machine]
    assert played(filtered, here, READ[machine]) == box.ALLOW
    assert played(filtered, here, box.CLONE[machine], box.CLONE_THREAD | 0x100) == box.ALLOW  # a thread
    assert played(filtered, here, box.CLONE[machine], 17) == REFUSED  # a process
    assert played(filtered, here, box.CLONE3) == box.DENY | errno.ENOSYS
    assert {played(filtered, here, number) for number in box.DENIED[machine]} == {REFUSED}
    assert played(filtered, here, READ[machine] + box.X32) == REFUSED
    assert box.system_call_filter("riscv64") == b"", "an unknown machine has no filter"
    assert {played(filtered, other, READ[machine]) for other in (0x40000003, 0x40000028)} == {REFUSED}  # 32 bits
