"""Dispatch, help, exit codes and start-up, through the installed script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest

import retrain
from retrain.cli.command_line import GROUPS, RetrainGroup
from retrain.cli.completion import FORMER_NAMES
from retrain.cli.plugin import PUBLIC_NAMES
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from tests.kit.shared import first_or_long

Script = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = ("torch", "transformers", "datasets", "peft", "tokenizers", "reasoning_gym", "starlette", "uvicorn")
SLOW = (
    *HEAVY,
    "numpy",
    "scipy",
    "pydantic",
    "rich",
    "asyncio",
    "plotly",
    "jinja2",
    "tomlkit",
    "retrain.run.configure",
)
COMMANDS = RetrainGroup(load_plugins({})).list_commands(click.Context(click.Command("retrain")))


def test_version_names_every_distribution(script: Script) -> None:
    done = script("--version")
    head, *others = done.stdout.splitlines()
    assert (done.returncode, head, done.stderr) == (0, f"retrain {retrain.__version__}", "")
    assert f"  retrain-sepa {version('retrain-sepa')}" in others
    versions = json.loads(script("--version", "--json").stdout)
    assert versions["retrain-core"] == retrain.__version__
    assert [f"  {name} {number}" for name, number in versions.items() if name != "retrain-core"] == others


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


def test_the_help_lists_few_commands_in_groups(command: Callable[..., Any]) -> None:
    text = command("--help").out.partition("Exit codes:")[0]
    _, *groups = re.split(rf"^({'|'.join(map(str.capitalize, GROUPS))}):\n", text, flags=re.MULTILINE)
    listed = {name: re.findall(r"^  (\S+)", text, re.MULTILINE) for name, text in zip(*[iter(groups)] * 2, strict=True)}
    names = [name for group in listed.values() for name in group]
    assert sorted(names) == sorted(COMMANDS)
    assert list(listed) == [group.capitalize() for group in GROUPS]


SHARED = {  # spelling: name of the parameter, metavar
    "--json": ("as_json", None),
    "--html": ("html", "FILE"),
    "--set": ("settings", "TABLE.KEY=VALUE"),
    "--quiet": ("is_quiet", None),
}


@pytest.mark.parametrize("name", [*COMMANDS, "train"])
def test_an_option_that_commands_share_is_the_same_everywhere(name: str, plugins: Plugins) -> None:
    command: click.Command = plugins.find(Kind.COMMAND, name)[0].spec.load()
    for option in (param for param in command.params if isinstance(param, click.Option)):
        for spelling in SHARED.keys() & set(option.opts):
            assert (option.name, option.metavar) == SHARED[spelling]


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_a_name_of_the_public_package_works_and_says_what_it_is_now(name: str, command: Callable[..., Any]) -> None:
    result = command(name, "--help")
    assert (result.code, result.err) == (0, f"retrain: `retrain {name}` is now `retrain {PUBLIC_NAMES[name]}`\n")
    assert command("help", name) == result
    assert not command("--help").out.count(f"\n  {name} ")


@pytest.mark.parametrize("name", sorted(FORMER_NAMES.keys() - PUBLIC_NAMES))
def test_a_former_name_says_what_it_is_now(name: str, command: Callable[..., Any]) -> None:
    result = command(name, "some", "--words")
    assert (result.code, result.out) == (2, "")
    assert f"fix: use `retrain {FORMER_NAMES[name]}`" in result.err


@pytest.mark.parametrize("name", [*COMMANDS, "train"])
def test_every_command_explains_itself_with_examples_and_exit_codes(name: str, command: Callable[..., Any]) -> None:
    result = command(name, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: retrain {name} ")
    assert command(name, "-h") == result
    assert command("help", name) == result
    if "Commands:" not in result.out:  # a group: its commands tell
        assert "Example" in result.out
        assert "xit code" in result.out


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (("diff", "--jsn"), ("retrain diff: no such option: --jsn", "fix: use --json")),
        (("explain", "--jsn"), ("retrain explain: no such option: --jsn", "fix: use --json")),
        (("explain", "--temperatur", "1"), ("unknown flag --temperatur", "did you mean --temperature?")),
        (("--qiet",), ("no such option: --qiet", "fix: use --quiet")),
        (("--versio",), ("no such option: --versio", "fix: use --version")),
        (("diff",), ("retrain diff: Missing argument 'A'.", "fix: `retrain diff --help` lists its options")),
        (("--completion", "tcsh"), ("'tcsh' is not one of 'bash', 'zsh', 'fish'", "fix: ")),
        (("init", "-i", "--json"), ("exclude each other", "fix: ")),
        (("trian",), ("did you mean `retrain train`?", "fix: ")),
        (("",), ("'' is neither a command nor a file", "fix: ")),
    ],
)
def test_a_usage_error_is_told_like_every_other(
    words: tuple[str, ...], fragments: tuple[str, ...], command: Callable[..., Any]
) -> None:
    result = command(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("retrain: ")
    assert all(fragment in result.err for fragment in fragments), result.err
    assert result.err.count("fix: ") == 1


def test_a_command_whose_room_is_missing_is_answered_by_name(plugins: Plugins) -> None:
    del plugins.registries[Kind.COMMAND].entries["diff"]
    with pytest.raises(ConfigError, match="`retrain diff` is not part of this installation"):
        RetrainGroup(plugins).make_context("retrain", ["diff"])


def test_quiet_is_taken_before_and_after_the_configuration(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[training]\nlr = 'x'\n")
    for words in (["-q", "my.toml"], ["my.toml", "-q"], ["--quiet", "my.toml"], ["my.toml", "--seed", "1", "--quiet"]):
        result = command(*words)
        assert "my.toml:2 [training] lr" in result.err
        assert result.err.count("fix: ") == 1


@pytest.mark.parametrize(
    ("environ", "is_colored"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": ""}, True),
    ],
)
def test_color_is_as_the_environment_wishes(environ: dict[str, str], is_colored: bool, script: Script) -> None:
    told = script("nope", environ={"NO_COLOR": "", "FORCE_COLOR": ""} | environ)
    assert ("\x1b[31m" in told.stderr) == is_colored


def test_help_of_training_is_reached_from_a_configuration(command: Callable[..., Any]) -> None:
    result = command("any.toml", "--help")
    assert result.code == 0
    assert "`retrain explain --keys` lists every key" in result.out


@pytest.mark.parametrize(
    ("word", "fragments"),
    [
        ("explian", ("'explian' is neither a command nor a file", "did you mean `retrain explain`?")),
        ("zzzzz", ("'zzzzz' is neither a command nor a file", "commands: ", "compare, credit, diff")),
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


@pytest.mark.parametrize("flags", [("--max-steps", "3"), ("--set", "training.seed=1"), ("--lr=1e-4",)])
@pytest.mark.parametrize("verb", [(), ("train",), ("-q",), ("audit",), ("capacity",)])
def test_flags_without_a_configuration_are_refused_with_the_next_step(
    verb: tuple[str, ...], flags: tuple[str, ...], command: Callable[..., Any], tmp_path: Path
) -> None:
    result = command(*verb, *flags)
    assert (result.code, result.out) == (2, "")
    assert "retrain.toml: no configuration in this folder" in result.err
    assert "retrain init --template tiny" in result.err
    assert f"retrain my.toml {' '.join(flags)}" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_not_there_is_named_where_there_is_no_configuration(command: Callable[..., Any]) -> None:
    result = command("--resume", "logs/gone")
    assert result.code == 2
    assert "logs/gone" in result.err


def test_a_model_without_tasks_is_refused_before_it_is_loaded(command: Callable[..., Any]) -> None:
    result = command("--model", "builtin:tiny")
    assert (result.code, result.out) == (2, "")
    assert "no configuration in this folder" in result.err


def test_a_typo_is_told_where_there_is_no_configuration(command: Callable[..., Any]) -> None:
    result = command("--max-stps", "3")
    assert result.code == 2
    assert "did you mean --max-steps?" in result.err


def test_flags_are_enough_where_nothing_is_loaded(command: Callable[..., Any]) -> None:
    content = json.loads(command("explain", "--json", "--max-steps", "7").out)
    assert (content["config"], content["max_steps"]) == ("(defaults)", 7)
    assert "no configuration in this folder" in command("explain", "--max-steps", "7").out
    assert command("trace", "--transform-mode", "none").code == 0
    assert command("capacity", "--known-models", "--max-tokens", "64").code == 0


def loaded_modules(arguments: list[str], cwd: Path, tmp_path: Path) -> set[str]:
    """The modules in `sys.modules` after a command line, run in a fresh process."""
    dump = tmp_path / "modules.json"
    code = (
        "import json, sys\n"
        "from retrain.cli.command_line import main\n"
        "try:\n    main(sys.argv[2:])\n"
        "except SystemExit as done:\n    assert not done.code, done.code\n"
        "json.dump(sorted(sys.modules), open(sys.argv[1], 'w'))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(dump), *arguments], cwd=cwd, check=True, capture_output=True)
    return set(json.loads(dump.read_text()))


@pytest.mark.parametrize(
    "arguments",
    first_or_long(
        [
            ["--help"],
            ["--version"],
            ["plugins"],
            ["plugins", "--json"],
            ["init", "--list"],
            ["explain", "--keys"],
            ["explain", "--max-steps", "3"],
        ]
    ),
)
def test_light_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    modules = loaded_modules(arguments, tmp_path, tmp_path)
    assert "retrain.cli.command_line" in modules
    assert modules & set(HEAVY) == set()


@pytest.mark.parametrize("arguments", [["--help"], ["help"], ["--version"], ["train", "--help"]])
def test_help_imports_next_to_nothing(arguments: list[str], tmp_path: Path) -> None:
    """What keeps `retrain --help` fast; `benchmarks/help_time.py` measures it."""
    (tmp_path / "retrain.toml").write_text("")
    assert loaded_modules(arguments, tmp_path, tmp_path) & set(SLOW) == set()


def test_a_bad_configuration_is_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom retrain.cli.command_line import run\n"
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


LINES = """
import logging
from retrain.observe.console.console import run_console
from retrain.kernel.plugins.discover import load_plugins
with run_console(load_plugins()):
    for number in range(10_000):
        logging.getLogger("retrain.test").info("line %d", number)
"""


@pytest.mark.parametrize(
    ("reader", "reason"),
    first_or_long([("| head -1", "nothing reads the output any more"), ("> /dev/full", "No space left")]),
)
def test_a_run_outlives_its_reader_and_says_so_once(reader: str, reason: str, tmp_path: Path) -> None:
    if "full" in reader and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "lines.py").write_text(LINES)
    done = subprocess.run(
        f"'{sys.executable}' lines.py {reader}; exit ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1, done.stderr
    assert reason in done.stderr


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


def test_init_through_the_script(script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    assert script("init").returncode == 0
    assert script("init").returncode == 2
