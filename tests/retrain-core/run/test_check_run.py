"""What is tried before a run loads anything: parts of credit on synthetic groups, in a copy of the process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run import check
from retrain.run.configure import load_checked
from retrain.tasks.child.process import in_copy

FIRST = "import os, signal, time\nimport numpy as np\nfrom retrain.advantages import AdvantageSpec\nCALLS = []\n"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """`module("def adv(rewards): ...")` writes `parts_of_mine.py`, forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> Path:
        (tmp_path / "parts_of_mine.py").write_text(FIRST + source)
        return tmp_path

    yield write
    sys.modules.pop("parts_of_mine", None)


ADVANTAGE, TRANSFORM, UNCERTAINTY = "--advantage-mode", "--transform-mode", "--uncertainty-kind"
BROKEN = [
    (ADVANTAGE, "def part(r):\n    return r.undefined", "raised AttributeError", "(parts_of_mine.py:6)"),
    (ADVANTAGE, "def part(r):\n    return r * np.nan", "is nan at position 0"),
    (ADVANTAGE, "def part(r):\n    return r[:-1]", "has length 5, expected 6"),
    (ADVANTAGE, "def part(r):\n    return None", "is not a list of numbers"),
    (ADVANTAGE, "def part(r):\n    return ['good'] * len(r)", "is not a list of numbers"),
    (ADVANTAGE, "def part(r):\n    raise SystemError('no')", "raised SystemError: no"),
    (TRANSFORM, "def part(ctx):\n    return ctx.advantages", "raised AttributeError", "(parts_of_mine.py:6)"),
    (TRANSFORM, "def part(ctx):\n    return [ctx.advantages_G]", "has 1 entries, expected 6"),
    (TRANSFORM, "def part(ctx):\n    return [u * np.inf for u in ctx.uncertainties_G]", "it must be finite"),
    (
        TRANSFORM,
        "def part(ctx):\n    return [u / (1 - ctx.sepa_lambda) for u in ctx.uncertainties_G]",
        "must be finite",
    ),
    (UNCERTAINTY, "def part(ctx):\n    return ctx.logprobs_T", "it must not be negative"),
    (UNCERTAINTY, "def part(ctx):\n    return 1.0", "is one number"),
    ("--algorithm-mode", "def part(ctx):\n    return {}['x']", "raised KeyError", "(parts_of_mine.py:6)"),
]


@pytest.mark.parametrize(("flag", "source", "texts"), [(flag, source, texts) for flag, source, *texts in BROKEN])
def test_a_broken_part_of_credit_ends_the_run_before_anything_loads(
    command: Callable[..., Any], module: Callable[[str], Path], flag: str, source: str, texts: list[str]
) -> None:
    folder = module(source)
    result = command(flag, "parts_of_mine.part", "--group-size", "6", "--model", "nobody/nothing")
    assert (result.code, result.out) == (2, "")  # not even the tokenizer was asked for
    key = flag.removeprefix("--").replace("-", "_")
    assert f"{flag} [algorithm] {key}: probe group 0" in result.err
    assert "parts_of_mine.part'" in result.err
    assert all(text in result.err for text in texts), result.err
    assert result.err.count("fix:") == 1
    assert not (folder / "logs").exists()


ALL_RIGHT = [
    "def part(r):\n    CALLS.append(r)\n    np.random.rand()\n    print('mine')\n    return r - r.mean()",
    "def part(r):\n    assert (r > 0).all()\n    return r",
    "def part(r):\n    assert set(r) <= {-1.0, 1.0}\n    return r",
    "def part(r):\n    return (r - r.mean()) / r.std()",  # NaN for equal rewards, which no step passes to it
    "def part(r):\n    assert len(r) == 5\n    return list(r)",
    "def part(r):\n    breakpoint()\n    return r",
    "def part(r):\n    time.sleep(60)\n    return r",  # slow is not broken
    "def part(r):\n    os.kill(os.getpid(), signal.SIGKILL)",  # nothing is known about it
]


@pytest.mark.parametrize("source", ALL_RIGHT)
def test_a_part_that_could_work_is_not_refused_and_keeps_its_state(
    module: Callable[[str], Path], source: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module(source)
    monkeypatch.setattr(check, "TRIAL_S", 1.0)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    arguments = [ADVANTAGE, "parts_of_mine.part", "--group-size", "5"]
    checked = load_checked(arguments, load_plugins(), starts_run=True)
    assert checked.flow.advantage.name == "parts_of_mine.part"
    assert sys.modules["parts_of_mine"].CALLS == []
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]
    assert "mine" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments", [[ADVANTAGE, "grpo"], ["--algorithm-mode", "maxrl_gtpo"], [ADVANTAGE, "parts_of_mine.GROUPED"]]
)
def test_a_group_of_one_is_refused_where_the_advantage_needs_a_group(
    command: Callable[..., Any], module: Callable[[str], Path], arguments: list[str]
) -> None:
    module("GROUPED = AdvantageSpec(name='grouped', compute=lambda ctx: ctx.rewards_G, needs_group=True)\n")
    result = command(*arguments, "--group-size", "1", "--model", "nobody/nothing")
    assert (result.code, result.out) == (2, "")
    assert "--group-size [training] group_size: advantage '" in result.err
    assert "fix: set group_size to 2 or more" in result.err


@pytest.mark.parametrize("arguments", [[ADVANTAGE, "parts_of_mine.part"], ["--algorithm-mode", "parts_of_mine.whole"]])
def test_a_group_of_one_is_left_to_parts_that_need_no_group(
    module: Callable[[str], Path], arguments: list[str]
) -> None:
    module("def part(r):\n    return r\ndef whole(ctx):\n    return [0 * u for u in ctx.uncertainties_G]\n")
    load_checked([*arguments, "--group-size", "1"], load_plugins(), starts_run=True)
    load_checked([ADVANTAGE, "grpo", "--group-size", "1"], load_plugins())  # to look at an old run is no training


def test_a_campaign_is_refused_for_a_broken_part_of_a_condition(
    command: Callable[..., Any], module: Callable[[str], Path]
) -> None:
    folder = module("def part(r):\n    return r.undefined")
    campaign = (
        "[campaign]\nseeds = [1]\nconditions = [{ advantage_mode = 'parts_of_mine.part', transform_mode = 'none' }]\n"
    )
    (folder / "many.toml").write_text(campaign)
    result = command("many.toml")
    assert result.code == 2
    assert (
        "raised AttributeError: 'numpy.ndarray' object has no attribute 'undefined' (parts_of_mine.py:6)" in result.err
    )


def test_a_copy_of_the_process_answers_fails_and_ends() -> None:
    seen: list[int] = []

    def work() -> list[str]:
        seen.append(1)
        return ["x" * 200_000]  # more than a pipe holds

    def fail() -> None:
        raise SystemExit(3)

    assert in_copy(work, timeout_s=20.0) == ["x" * 200_000]
    assert seen == []
    assert in_copy(fail, timeout_s=20.0) is None
    with pytest.raises(ConfigError):
        raise ConfigError("this process is still itself")


def test_a_module_of_two_files_is_refused_with_both(command: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("--model", "builtin:tiny", "--data-source", "arithmetic", "--reward-type", "custom")
    source, package = "def score(response, reference):\n    return 1.0\n", tmp_path / "two_files_reward/__init__.py"
    (tmp_path / "two_files_reward.py").write_text(source)
    asked = ("explain", *arguments, "--reward-custom-module", "two_files_reward")
    assert command(*asked).code == 0
    package.parent.mkdir()
    package.write_text(source)
    result = command(*asked)
    assert result.code == 2
    assert "[reward] custom_module" in result.err
    assert all(name in result.err for name in ("two_files_reward/__init__.py", "two_files_reward.py"))
