"""Dispatch, help, exit codes and start-up, through the installed script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrain

Script = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = ("torch", "transformers", "datasets", "peft", "tokenizers", "reasoning_gym")


def test_version(script: Script) -> None:
    done = script("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"retrain {retrain.__version__}\n", "")


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_the_commands_and_how_to_train(word: str, command: Callable[..., Any]) -> None:
    result = command(word)
    assert (result.code, result.err) == (0, "")
    for wanted in (
        "retrain init --template tiny",
        "retrain my.toml --lr 1e-4",
        "explain",
        "init",
        "plugins",
        "--version",
    ):
        assert wanted in result.out


@pytest.mark.parametrize("name", ["init", "explain", "plugins"])
def test_every_command_explains_itself(name: str, command: Callable[..., Any]) -> None:
    result = command(name, "--help")
    assert result.code == 0
    assert "Usage: retrain" in result.out
    assert "--json" in result.out


def test_help_of_training_is_reached_from_a_configuration(command: Callable[..., Any]) -> None:
    result = command("any.toml", "--help")
    assert result.code == 0
    assert "`retrain explain --keys` lists every key" in result.out


@pytest.mark.parametrize(
    ("word", "fragments"),
    [
        ("explian", ("'explian' is neither a command nor a file", "did you mean `retrain explain`?")),
        ("zzzzz", ("'zzzzz' is neither a command nor a file", "commands: ", "explain, init, plugins")),
        ("doctor", ("`retrain doctor` is not built in this version", "retrain --help")),
        ("migrate-config", ("`retrain migrate-config` is not built in this version",)),
        ("nope.toml", ("nope.toml: file not found", "retrain init")),
        ("some/nope.toml", ("some/nope.toml: file not found",)),
    ],
)
def test_a_word_that_means_nothing_is_answered(
    word: str, fragments: tuple[str, ...], command: Callable[..., Any]
) -> None:
    result = command(word)
    assert (result.code, result.out) == (2, "")
    assert all(fragment in result.err for fragment in fragments), result.err
    assert "Traceback" not in result.err


def test_a_configuration_need_not_be_called_toml(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "explian").write_text("[training]\nlr = 'x'\n")
    result = command("explian")
    assert result.code == 2
    assert "explian:2 [training] lr" in result.err


def test_without_configuration_the_next_step_is_told(script: Script) -> None:
    done = script()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no configuration in this folder" in done.stderr
    assert "retrain init --template tiny" in done.stderr


def test_the_configuration_of_the_folder_is_the_default(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text("[training]\nmax_steps = 7\n")
    assert json.loads(command("explain", "--json").out)["max_steps"] == 7
    assert json.loads(command("explain", "--json", "--lr", "1e-3").out)["config"] == "retrain.toml"


def test_overrides_alone_run_on_the_defaults(command: Callable[..., Any]) -> None:
    content = json.loads(command("explain", "--json", "--max-steps", "7").out)
    assert (content["config"], content["max_steps"]) == ("(defaults)", 7)


def loaded_modules(arguments: list[str], cwd: Path, tmp_path: Path) -> set[str]:
    """The modules in `sys.modules` after a command line, from a process of its own."""
    dump = tmp_path / "modules.json"
    code = (
        "import json, sys\n"
        "from retrain.cli.main import main\n"
        "try:\n    main(sys.argv[2:])\n"
        "except SystemExit as done:\n    assert not done.code, done.code\n"
        "json.dump(sorted(sys.modules), open(sys.argv[1], 'w'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(dump), *arguments], cwd=cwd, check=True, capture_output=True)
    return set(json.loads(dump.read_text()))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["plugins"],
        ["plugins", "--json"],
        ["init", "--list"],
        ["explain", "--keys"],
        ["explain", "--max-steps", "3"],
    ],
)
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    modules = loaded_modules(arguments, tmp_path, tmp_path)
    assert "retrain.cli.main" in modules
    assert modules & set(HEAVY) == set()


def test_a_bad_configuration_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom retrain.cli.main import run\n"
        "assert run(['--lr', 'fast', '--transform-mode', 'nope']) == 2\n"
        f"assert not set({HEAVY!r}) & set(sys.modules), set({HEAVY!r}) & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dotenv_is_loaded_the_real_environment_wins_and_json_stays_pure(script: Script, tmp_path: Path) -> None:
    lines = "# comment\nRETRAIN__TRAINING__MAX_STEPS=7\nRETRAIN__TRAINING__BATCH_SIZE='3'\nRETRAIN__TRAINING__LR=9\n"
    (tmp_path / ".env").write_text(lines)
    done = script("explain", "--json", "--group-size", "2", environ={"RETRAIN__TRAINING__LR": "0.5"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "Loaded .env\n"
    content = json.loads(done.stdout)
    assert (content["max_steps"], content["batch_size"], content["lr"]) == (7, 3, 0.5)
    assert content["origins"]["training.max_steps"]["origin"] == "RETRAIN__TRAINING__MAX_STEPS"


def test_a_dotenv_that_is_no_text_is_a_config_error(script: Script, tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe\n")
    done = script("plugins", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert ".env cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_folder_is_on_the_path_of_the_installed_script(script: Script, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text("def shape(ctx):\n    return ctx.uncertainties_G\n")
    (tmp_path / "plain.py").write_text("def raw(rewards):\n    return rewards\n")
    done = script("explain", "--json", "--transform-mode", "mine.shape", "--advantage-mode", "plain.raw")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["condition"] == "plain.raw+mine.shape"


def test_a_reader_that_has_enough_is_no_error(script: Script, tmp_path: Path) -> None:
    exe = Path(sys.executable).with_name("retrain")
    done = subprocess.run(
        f"'{exe}' explain --keys | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_what_a_plugin_registers_shows_up_as_a_command(
    distribution: Callable[..., Path], command: Callable[..., Any]
) -> None:
    source = (
        "import click\nfrom retrain.api import PluginSpec, hookimpl\n"
        "@click.command('greet')\n@click.pass_context\ndef greet(context):\n"
        "    click.echo('hello')\n    context.exit(3)\n"
        "@hookimpl\ndef retrain_register_commands(register):\n"
        "    register(PluginSpec(name='greet', summary='Say hello.', factory=greet))\n"
    )
    distribution("greeter", {"greeter": source})
    assert (command("greet").out, command("greet").code) == ("hello\n", 3)
    assert "Say hello." in command("--help").out
    assert "did you mean `retrain greet`?" in command("greeet").err
