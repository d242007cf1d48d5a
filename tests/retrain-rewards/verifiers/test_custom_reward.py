from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from retrain.api import Config, ConfigError, Example, Kind, Outcome, PluginContext, Plugins, RewardError, Score, Seeds
from retrain.api import resolve as resolved
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.custom import CustomReward, Style
from tests.kit.problems import codes_in

Build = Callable[..., CustomReward]
EXAMPLE = Example(id="e", prompt="p", reference="5", info={"bonus": 0.25})


@pytest.fixture
def build(plugins: Plugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """`build("def score...")`: the reward of a module with this text, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    number = 0

    def make(text: str, function: str = "score", module: str = "") -> CustomReward:
        nonlocal number
        number += 1
        name = f"my_reward_{tmp_path.name}_{number}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        table = RewardTable(type="custom", custom_module=module or name, custom_function=function)
        context = PluginContext(config=Config(tables={"reward": table}), seeds=Seeds(0), plugins=plugins)
        made: CustomReward = resolved(plugins, Kind.REWARD, "custom", where="test").target(context)
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
def test_both_signatures_plain_and_async(build: Build, text: str, style: Style, value: float) -> None:
    reward = build(text)
    assert reward.style is style
    assert [reward.score(EXAMPLE, "5") for _ in range(3)] == [Score.of(value)] * 3


@pytest.mark.parametrize("value", ["'1.0'", "b'1'", "[1.0]", "{}", "object()", "1j", "float"])
def test_what_is_no_score_is_refused(build: Build, value: str) -> None:
    with pytest.raises(RewardError) as caught:
        build(f"def score(response, reference): return {value}").score(EXAMPLE, "5")
    assert codes_in(caught) == ["reward.bad-result"]


def test_an_exit_is_an_error_and_other_exceptions_go_through(build: Build) -> None:
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


def test_gold_is_taken_from_the_same_module(build: Build) -> None:
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
def test_faults_of_the_function_are_found_before_training(build: Build, code: str, text: str) -> None:
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
def test_a_module_that_is_not_there(build: Build, module: str, code: str) -> None:
    with pytest.raises(ConfigError, match=r"\[reward\] custom_module") as caught:
        build("", module=module)
    assert codes_in(caught) == [f"reward.{code}"]


@pytest.mark.parametrize("is_absolute", [False, True])
def test_a_path_to_a_file_is_a_module_too(build: Build, tmp_path: Path, is_absolute: bool) -> None:
    folder = tmp_path / "my rewards"
    folder.mkdir()
    (folder / "beside_my_reward.py").write_text("VALUE = 0.5", encoding="utf-8")
    text = "import beside_my_reward\nfrom dataclasses import dataclass\n@dataclass\nclass Part:\n    x: int = 1\n"
    text += "def score(response, reference): return beside_my_reward.VALUE * Part().x"
    (folder / "score-it.py").write_text(text, encoding="utf-8")
    reward = build("", module=str(folder / "score-it.py") if is_absolute else "my rewards/score-it.py")
    assert reward.score(EXAMPLE, "5").value == 0.5


def test_it_scores_in_a_fresh_process_in_another_folder(build: Build, tmp_path: Path) -> None:
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
