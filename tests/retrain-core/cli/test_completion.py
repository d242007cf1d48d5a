"""Completion through the protocol of each shell: what is offered, and at what cost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.command_line import SHELLS, RetrainGroup
from retrain.cli.completion import candidates
from retrain.cli.plugin import VARIABLE
from retrain.kernel.registry import Plugins

Script = Callable[..., subprocess.CompletedProcess[str]]


def offered(plugins: Plugins, *words: str) -> list[str]:
    return [item.value for item in candidates(plugins, words[:-1], words[-1], RetrainGroup(plugins).params)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("retrain.toml", "exp.toml", "pyproject.toml", "notes.md"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("di",), ["diff"]),
        (("ex",), ["explain", "export", "exp.toml"]),
        (("py",), [""]),  # a file, for the shell to find
        (("chat", "lo"), [""]),
        (("help", "dif"), ["diff"]),
        (("explain", ""), ["exp.toml", "retrain.toml"]),
        (("--transform-m",), ["--transform-mode"]),
        (("--transform-mode", "gtpo_"), ["gtpo_hicra", "gtpo_sepa"]),
        (("--transform-mode=gtpo_s",), ["--transform-mode=gtpo_sepa"]),  # zsh, fish
        (("--transform-mode", "="), ["gtpo", "gtpo_hicra", "gtpo_sepa", "none"]),  # bash splits at the sign
        (("--transform-mode", "=", "gtpo_s"), ["gtpo_sepa"]),
        (("--loss", "p"), ["ppo"]),
        (("--trust-remote-code", ""), ["true", "false"]),
        (("--max-steps", ""), []),
        (("--set", "training.max_ste"), ["training.max_steps="]),
        (("explain", "--js"), ["--json"]),
        (("explain", "--backend", "lo"), ["local"]),
        (("init", "--template", "quick"), ["quickstart"]),
        (("init", "--transform-m"), []),
        (("--completion", "z"), ["zsh"]),
        (("compare", "--align", "t"), ["tokens"]),
        (("credit", "run", "--transform", "gtpo_s"), ["gtpo_sepa"]),
        (("init-plugin", "--kind", "data"), ["data-source"]),
        (("init", "--output", ""), [""]),
        (("--log-dir", "lo"), [""]),
        (("--versi",), ["--version"]),
        (("no-such-command", "--see"), ["--seed", "--seeds"]),  # a configuration of that name
    ],
)
def test_what_is_offered(words: tuple[str, ...], wanted: list[str], plugins: Plugins, folder: Path) -> None:
    assert offered(plugins, *words) == wanted


def test_registered_commands_and_configurations_are_offered(plugins: Plugins, folder: Path) -> None:
    found = set(offered(plugins, ""))
    assert {"diff", "explain", "init", "help", "retrain.toml"} <= found
    assert not {"train", "pyproject.toml"} & found


def test_bash_is_answered_with_parts_of_plugins_and_the_environment_file_is_read_in_silence(
    toys: Path, script: Script, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("A=b\n")
    done = script(environ={VARIABLE: "bash_complete", "COMP_WORDS": "retrain\n--backend\nto", "COMP_CWORD": "2"})
    assert (done.stdout, done.stderr) == ("plain,toy\n", "")


@pytest.mark.long
def test_the_protocols_of_zsh_and_fish_carry_descriptions_and_nonsense_is_answered_without_a_word(
    script: Script, command: Callable[..., Any]
) -> None:
    for shell in SHELLS:
        assert f"{VARIABLE}={shell}_complete" in command("--completion", shell).out
    for question in ("bash_complete", "tcsh_complete", "nonsense", "bash_nonsense"):
        done = script(environ={VARIABLE: question})  # no COMP_WORDS
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 0 if question == "bash_complete" else 2)
    asked = {"COMP_WORDS": "retrain --loss", "COMP_CWORD": "1"}
    zsh = script(environ={VARIABLE: "zsh_complete", **asked}).stdout.splitlines()
    assert zsh[:2] == ["plain", "--loss"]
    assert zsh[2].startswith("Policy loss: importance_sampling, ppo")
    fish = script(environ={VARIABLE: "fish_complete", "COMP_WORDS": "retrain --los", "COMP_CWORD": "--los"}).stdout
    assert fish.startswith("plain,--loss\tPolicy loss: importance_sampling, ppo")


def test_completing_commands_imports_nothing_that_takes_time(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom retrain.kernel.plugins.discover import load_plugins\n"
        "from retrain.cli.completion import candidates\n"
        "plugins = load_plugins()\nassert candidates(plugins, [], 'e')\n"
        "assert candidates(plugins, ['init', '-t'], 't')\n"
        "slow = {'numpy', 'pydantic', 'rich', 'asyncio', 'scipy'} & set(sys.modules)\nassert not slow, slow\n"
        "assert candidates(plugins, [], '--trans')\n"
        "heavy = {'torch', 'transformers', 'datasets', 'scipy'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
