"""Programs against tests: what is right, what is wrong, and what tries to look right.

Where no sandbox works, the same programs run without one, except those that would reach out of it.
"""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.api import Config, ConfigError, Example, Kind, Outcome, PluginContext, RewardError, Seeds, resolve
from retrain.kernel.config.schema import DataTable, ScoringTable
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain_rewards.sandbox.process import Limits
from retrain_rewards.sandbox.sandbox import NO_SANDBOX, Sandbox, find_sandbox
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.code import reward as module
from retrain_rewards.verifiers.code.reward import CodeReward, last_program
from tests.kit.problems import codes_in, refused
from tests.kit.waiting import wait_until

SANDBOX, REASON = find_sandbox()
needs_sandbox = pytest.mark.skipif(SANDBOX is None, reason=f"no sandbox works here: {REASON}")
SECRET = 7919
HUMANEVAL = f"def check(candidate):\n    for n in range(3):\n        assert candidate(n) == n + {SECRET}\n"


def having(tests, name="e", **info):
    return Example(id=name, prompt="", reference="", info={"tests": tests, **info})


PAIRS = having({"inputs": ["1", "2"], "outputs": ["7920", "7921"]}, "pairs")
CALLS = having(["assert f(1) == 7920", "assert f(n=2) == 7921"], "calls")
CODE = having(HUMANEVAL, "code", entry_point="f")
RIGHT = "def f(n):\n    return n + 7919\nif __name__ == '__main__':\n    print(f(int(input())))"

PROGRAMS = tomllib.loads(Path(__file__).with_name("greedy_programs.toml").read_text(encoding="utf-8"))
GREEDY, REACHING = PROGRAMS["greedy"], PROGRAMS["reaching"]


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\n"


@pytest.fixture
def reward():
    return CodeReward(sandbox=SANDBOX or NO_SANDBOX, test_timeout_s=10.0, limits=Limits(memory_bytes=2**27, cpu_s=2))


@pytest.mark.parametrize("example", [PAIRS, CALLS, CODE], ids=lambda example: example.id)
def test_a_right_program_passes_and_a_wrong_one_does_not(reward, example):
    assert reward.score(example, fenced(RIGHT)).value == 1.0
    wrong = reward.score(example, fenced(RIGHT.replace("7919", "7918 + n % 2")))  # right for 1 alone
    assert wrong.value == 0.0
    assert "test " in wrong.detail
    broken = CodeReward(sandbox=Sandbox(name="broken", command=("/bin/sh", "-c", "echo no rights >&2; exit 1")))
    with pytest.raises(RewardError, match="no rights") as caught:
        broken.score(example, fenced(RIGHT))
    assert codes_in(caught) == ["reward.sandbox-failed"]


def test_a_script_begins_again_for_every_test_and_partial_counts_the_share(reward):
    ways = "import atexit, sys\nseen = globals().setdefault('seen', [])\nseen.append(1)\nassert len(seen) == 1\n"
    ways += f"n = int(open(0).read())\natexit.register(lambda: sys.stdout.write(str(n + {SECRET}) + '  \\n\\n'))"
    assert reward.score(PAIRS, fenced(ways)).value == 1.0
    example = having({"inputs": [*"1234"], "outputs": [*"1234"]})
    crashing = "import os\nn = int(input())\nif n == 2: os._exit(0)\nprint(n if n < 4 else 'four')"
    score = CodeReward(sandbox=SANDBOX or NO_SANDBOX, partial=True).score(example, fenced(crashing))
    assert (score.value, score.detail) == (0.5, "test 2 of 4: the program ended early"), "the process is replaced"
    values = r"[None, True, 1.5, float('inf'), 1j, b'\xff', '\u20ac\ud800', (1, [2]), {1: {2}}, frozenset({3}), 10**40]"
    example = having([f"v = {values}\nassert f(v) == v and type(f(v)[7]) is tuple"])
    assert reward.score(example, fenced("f = lambda v: v")).value == 1.0
    method = "class Solution:\n    def f(self, n: List[int]) -> Optional[int]:\n        return n + 7919"
    assert reward.score(CALLS, fenced(method)).value == 1.0  # and the names of typing, as the prompt has them
    raising = having(["try:\n    f(0)\nexcept KeyError:\n    pass\nelse:\n    assert 0"])
    assert reward.score(raising, fenced("def f(n): raise KeyError(n)")).value == 1.0
    assert reward.score(raising, fenced("def f(n): raise SystemExit")).value == 0.0


@pytest.mark.parametrize("name", GREEDY)
def test_a_greedy_program_is_wrong(reward, name):
    quick = replace(reward, test_timeout_s=0.3)
    for example in (CALLS, CODE) if "f = " in GREEDY[name] or "def f" in GREEDY[name] else (PAIRS,):
        score = quick.score(example, fenced(GREEDY[name]))
        assert (score.outcome, score.value) == (Outcome.SCORED, 0.0), (example.id, score)


@needs_sandbox
@pytest.mark.parametrize("name", REACHING)
def test_nothing_outside_of_the_sandbox_can_be_reached(reward, name):
    """The program prints the right answer if its attempt fails, and nothing else."""
    attempt = REACHING[name].replace("FILE", str(Path(__file__).resolve()))
    program = f"n = int(input())\ntry:\n    exec({attempt!r})\nexcept (OSError, KeyError, ValueError):\n"
    score = reward.score(PAIRS, fenced(program + f"    print(n + {SECRET})"))
    assert score.value == 1.0, score


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("no program", ""),
        ("```python\na\n```", "a"),
        ("```\na\n```\nthen\n```py\nb\nc\n```", "b\nc"),
        ("```python\na\n```\n```bash\nls\n```", "a"),
        ("```python\na\n```\n```python\nb", "b"),  # the last fence need not end
        ("````python\n```\na\n````", "```\na"),
        ("  ```Python3\n  a\n  ```", "a"),
        ('```py title="x"\na\n```', "a"),
        ("```{.python .numberLines}\na\n```", "a"),
        ("```python3.11\na\n```", "a"),
        ("```Python 3\na\n```", "a"),
        ("```python:main.py\na\n```", "a"),
        ("``` python\na\n```", "a"),
        ("~~~python\na\n```\nb\n~~~", "a\n```\nb"),
        ("~~~~\na\n~~~\nb\n~~~~~", "a\n~~~\nb"),
        ("1. so\n\n      ```python\n      if x:\n          y\n      ```", "if x:\n    y"),
        ("```python\n\tif x:\n\t\ty", "\tif x:\n\t\ty"),
        ("```python\n>>> def f(n):\n...     return n\n...\n>>> f(1)\n1\n```", "def f(n):\n    return n\n\nf(1)"),
        ("```python\ndef f(n): return n\n```\n```python\n>>> f(1)\n1\n```", "def f(n): return n"),
        ("```python\nprint(1)\n```\nOutput:\n```\n1\n```", "print(1)"),
        ("```python\nprint(1)\n```\n```\nhello, world\n```", "print(1)"),
        ("```python\nprint(1)\n```\n```\n{'a': [1, 2]}\nTrue\n```", "print(1)"),
        ("```python\nprint(1)\n```\n```python\n[1, 2]\n```", "print(1)"),
        ("```python\nprint(1)\n```\n```output\nprint(2)\n```", "print(1)"),
        ("```python\nprint(1)\n```\nbetter:\n```\nn = 2\nprint(n)\n```", "n = 2\nprint(n)"),
        ("```python\nprint(1)\n```\n```python\nprint(2\n```", "print(2"),
        ("use ```print(1)``` or\n```python\nb\n```", "b"),
        ("```print(1)```\n```python\nb\n```", "b"),
        ("```c++\nint a;\n```", ""),
    ],
)
def test_the_program_is_the_last_block(text, program):
    assert last_program(text) == program


def test_the_reference_is_the_right_answer():
    reward = CodeReward(sandbox=NO_SANDBOX)
    solved = Example(id="e", prompt="def f(n):\n", reference="    return n + 7919\n", info=CALLS.info)
    whole = "def f(n): return n + 7919"
    for reference in (whole, f"```python\n{whole}\n```", "    return n + 7919\n"):
        gold = reward.gold(Example(id="e", prompt="def f(n):\n", reference=reference))
        assert gold is not None
        assert reward.score(solved, gold).value == 1.0
    assert reward.gold(Example(id="e", prompt="p", reference="an explanation of it")) is None
    assert reward.gold(Example(id="e", prompt="p", reference="")) is None
    assert refused(reward.score, Example(id="e", prompt="", reference="r"), "no program") == ["reward.no-tests"]
    unused = having("def verify():\n    assert f(1) == 2\n")
    assert refused(reward.score, unused, fenced("def f(n): return n")) == ["reward.unused-program"]


def test_without_a_sandbox_it_is_refused_unless_the_user_says_unsafe(plugins, monkeypatch, caplog):
    def build(**keys):
        tables = {
            "reward": RewardTable(type="code", **keys),
            "scoring": ScoringTable(timeout_s=5.0),
            "data": DataTable(),
        }
        context = PluginContext(config=Config(tables=tables), seeds=Seeds(0), plugins=plugins)
        made = resolve(plugins, Kind.REWARD, "code", where="test").target(context)
        return made

    monkeypatch.setattr(module, "find_sandbox", lambda: (None, "bwrap: setting up uid map: Permission denied"))
    with pytest.raises(ConfigError, match="uid map: Permission denied") as caught:
        build()
    assert codes_in(caught) == ["reward.no-sandbox"]
    reward = build(unsafe=True, test_memory_mb=512, tests="answer")
    assert "WITHOUT A SANDBOX, with your rights" in caplog.text
    assert "[data] instruction (default) requests a box" in caplog.text
    assert reward.sandbox is NO_SANDBOX
    assert (reward.time_limit_s, reward.limits.memory_bytes, reward.in_reference) == (4.0, 2**29, True)


def test_a_run_scores_programs_beside_each_other_and_leaves_none_behind(reward):
    """In the scoring service: verdicts in order, a program that is too slow wrong and not failed, a clean end."""
    slow, settings = "while True: pass", ScoringTable(workers=1, retries=0, timeout_s=90.0)
    with ScoringService([NamedReward(name="code", reward=replace(reward, test_timeout_s=2.0))], settings) as service:
        with service.batch() as batch:
            for program in (RIGHT, slow, "print(1)", RIGHT + "\n"):
                batch.submit(PAIRS, fenced(program))
            scores = batch.collect(within_budget=False)
        assert [(score.outcome, score.value) for score in scores] == [(Outcome.SCORED, x) for x in (1.0, 0.0, 0.0, 1.0)]
    patient = NamedReward(name="code", reward=replace(reward, test_timeout_s=60.0))
    with ScoringService([patient], settings) as service, service.batch() as batch:
        batch.submit(PAIRS, fenced(slow))
        wait_until(is_running)
    wait_until(lambda: not is_running())


def is_running():
    """Whether a program, or the sandbox around one, runs below this process."""
    files = [Path(f"/proc/{pid}/cmdline") for pid in descendants(os.getpid())]
    return any(b"-S\0-P\0-B" in file.read_bytes() for file in files if file.exists())


@pytest.fixture
def alone():
    """A process that holds a program which never ends; it prints the id of the program's own process."""
    code = (
        "import sys, time\nfrom retrain_rewards.verifiers.code.reward import *\n"
        "s = find_sandbox()[0] or NO_SANDBOX\np = s.process(Limits())\n"
        "p.send(('script', 'while True: pass'), time.monotonic() + 9); p.send('', time.monotonic() + 9)\n"
        "print(p._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


@needs_sandbox
def test_a_program_dies_with_the_process_that_scores(alone):
    assert alone.stdout is not None
    program = int(alone.stdout.readline())
    alone.kill()
    alone.wait()
    stat = Path(f"/proc/{program}/stat")
    wait_until(lambda: not stat.exists() or " Z " in stat.read_text())
