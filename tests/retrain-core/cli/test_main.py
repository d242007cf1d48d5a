"""Dispatch, help, exit codes, start-up and completion, through the installed script."""

from __future__ import annotations

import json
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
from retrain.cli.command_line import GROUPS, SHELLS, RetrainGroup
from retrain.cli.completion import FORMER_NAMES, candidates
from retrain.cli.plugin import PUBLIC_NAMES, VARIABLE
from retrain.kernel.declared import Kind
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from tests.kit.problems import codes_in, refused
from tests.kit.shared import first_or_long

Command = Callable[..., Any]
Script = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = {"torch", "transformers", "datasets", "peft", "tokenizers", "reasoning_gym", "starlette", "uvicorn"}
SLOW = {*HEAVY, "numpy", "scipy", "pydantic", "rich", "asyncio", "plotly", "jinja2", "tomlkit", "retrain.run.configure"}
COMMANDS = RetrainGroup(load_plugins({})).list_commands(click.Context(click.Command("retrain")))


def test_version_names_every_distribution(script: Script) -> None:
    done = script("--version")
    head, *others = done.stdout.splitlines()
    assert (done.returncode, head, done.stderr) == (0, f"retrain {retrain.__version__}", "")
    assert f"  retrain-sepa {version('retrain-sepa')}" in others
    versions = json.loads(script("--version", "--json").stdout)
    assert versions["retrain-core"] == retrain.__version__
    assert [f"  {name} {number}" for name, number in versions.items() if name != "retrain-core"] == others


def test_help_says_how_to_train_and_lists_every_command_in_a_group(command: Command) -> None:
    result = command("--help")
    assert (result.code, result.err) == (0, "")
    assert command("-h") == command("help") == result
    text = result.out.partition("Exit codes:")[0]
    head, *groups = re.split(rf"^({'|'.join(map(str.capitalize, GROUPS))}):\n", text, flags=re.MULTILINE)
    assert all(wanted in head for wanted in ("retrain init --template tiny", "retrain my.toml --lr 1e-4", "--version"))
    listed = dict(zip(groups[::2], groups[1::2], strict=True))
    names = [name for rows in listed.values() for name in re.findall(r"^  (\S+)", rows, re.MULTILINE)]
    assert (sorted(names), list(listed)) == (sorted(COMMANDS), [group.capitalize() for group in GROUPS])


SHARED = {  # spelling: name of the parameter, metavar
    "--json": ("as_json", None),
    "--html": ("html", "FILE"),
    "--set": ("settings", "TABLE.KEY=VALUE"),
    "--quiet": ("is_quiet", None),
}


@pytest.mark.parametrize("name", [*COMMANDS, "train", *PUBLIC_NAMES])
def test_every_command_explains_itself_and_shares_its_options(name: str, command: Command, plugins: Plugins) -> None:
    result = command(name, "--help")
    now = PUBLIC_NAMES.get(name, "")  # of the public package
    assert (result.code, result.err) == (0, f"retrain: `retrain {name}` is now `retrain {now}`\n" if now else "")
    assert command("help", name) == command(name, "-h") == result
    if now:
        assert not command("--help").out.count(f"\n  {name} ")
        return
    assert result.out.startswith(f"Usage: retrain {name} ")
    if "Commands:" not in result.out:  # a group: its commands tell
        assert "Example" in result.out
        assert "xit code" in result.out
    found: click.Command = plugins.find(Kind.COMMAND, name)[0].spec.load()
    for option in (param for param in found.params if isinstance(param, click.Option)):
        for spelling in SHARED.keys() & set(option.opts):
            assert (option.name, option.metavar) == SHARED[spelling]


USAGE = [
    (("diff", "--jsn"), "usage.unknown-option", "use --json"),
    (("explain", "--jsn"), "usage.unknown-option", "use --json"),
    (("--qiet",), "usage.unknown-option", "use --quiet"),
    (("--versio",), "usage.unknown-option", "use --version"),
    (("diff",), "usage.bad-arguments", "`retrain diff --help` lists its options"),
    (("--completion", "tcsh"), "usage.bad-arguments", "--help"),
    (("init", "-i", "--json"), "usage.bad-arguments", "--help"),
    (("trian",), "usage.unknown-command", "`retrain train`"),
    (("explian",), "usage.unknown-command", "`retrain explain`"),
    (("",), "usage.unknown-command", ".toml"),
    (("zzzzz",), "usage.unknown-command", "compare, credit, diff"),
    *(
        ((name, "some"), "usage.former-command", FORMER_NAMES[name])
        for name in sorted(FORMER_NAMES.keys() - PUBLIC_NAMES)
    ),
]


@pytest.mark.parametrize(("words", "code", "fix"), USAGE)
def test_a_usage_error_has_a_code_and_one_fix(words: tuple[str, ...], code: str, fix: str, command: Command) -> None:
    result = command(*words)
    assert (result.code, result.out, codes_in(result.err)) == (2, "", [code])
    text, _, found = result.err.partition("fix: ")
    assert text.startswith("retrain: ")
    assert (fix in found, "fix: " in found) == (True, False)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("explain", "--temperatur", "1"), "--temperature"),
        (("--max-stps", "3"), "--max-steps"),
        (("nope.toml",), "nope.toml: "),
        (("some/nope.toml",), "some/nope.toml: "),
        (("--resume", "logs/gone"), "logs/gone"),
        (("explian",), "explian:2 [training] lr"),  # a configuration need not be called .toml
        *(
            (words, "my.toml:2 [training] lr")
            for words in (("-q", "my.toml"), ("my.toml", "-q"), ("--quiet", "my.toml"))
        ),
        (("my.toml", "--seed", "1", "--quiet"), "my.toml:2 [training] lr"),
    ],
)
def test_a_file_or_flag_that_cannot_be_used_is_named(
    words: tuple[str, ...], named: str, command: Command, tmp_path: Path
) -> None:
    if "lr" in named:
        (tmp_path / named.partition(":")[0]).write_text("[training]\nlr = 'x'\n")
    result = command(*words)
    assert (result.code, result.out, result.err.count("fix: ")) == (2, "", 1)
    assert named in result.err


def test_a_command_that_is_not_installed_is_answered_by_name(plugins: Plugins) -> None:
    del plugins.registries[Kind.COMMAND].entries["diff"]
    assert refused(lambda: RetrainGroup(plugins).make_context("retrain", ["diff"])) == ["usage.command-not-installed"]


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


def test_the_configuration_of_the_folder_is_the_default_and_flags_do_where_nothing_is_loaded(
    command: Command, tmp_path: Path
) -> None:
    content = json.loads(command("explain", "--json", "--max-steps", "7").out)
    assert (content["config"], content["max_steps"]) == ("(defaults)", 7)
    assert "`retrain` refuses to run this: " in command("explain", "--max-steps", "7").out
    assert command("trace", "--transform-mode", "none").code == 0
    assert command("capacity", "--known-models", "--max-tokens", "64").code == 0
    (tmp_path / "retrain.toml").write_text("[training]\nmax_steps = 7\n")
    assert json.loads(command("explain", "--json").out)["max_steps"] == 7
    assert json.loads(command("explain", "--json", "--lr", "1e-3").out)["config"] == "retrain.toml"


@pytest.mark.parametrize("verb", [(), ("train",), ("-q",), ("audit",), ("capacity",)])
def test_without_a_configuration_the_next_step_is_named(
    verb: tuple[str, ...], command: Command, tmp_path: Path
) -> None:
    for flags in ((), ("--max-steps", "3"), ("--set", "training.seed=1")):
        result = command(*verb, *flags)
        assert (result.code, result.out) == (2, "")
        assert "retrain.toml: " in result.err
        assert "retrain init --template tiny" in result.err
        assert f"retrain my.toml {' '.join(flags)}".strip() in result.err or not flags
    assert list(tmp_path.iterdir()) == []


def loaded_modules(arguments: list[str], tmp_path: Path, code: int = 0) -> set[str]:
    """The modules in `sys.modules` after a command line with this exit code, run in a fresh process."""
    dump = tmp_path / "modules.json"
    program = (
        "import json, sys\nfrom retrain.cli.command_line import main\n"
        f"try:\n    main(sys.argv[2:])\nexcept SystemExit as done:\n    assert (done.code or 0) == {code}, done.code\n"
        "json.dump(sorted(sys.modules), open(sys.argv[1], 'w'))\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(dump), *arguments], cwd=tmp_path, check=True, capture_output=True
    )
    return set(json.loads(dump.read_text()))


@pytest.mark.parametrize("arguments", [["--help"], ["help"], ["--version"], ["train", "--help"]])
def test_help_imports_next_to_nothing(arguments: list[str], tmp_path: Path) -> None:
    """What keeps `retrain --help` fast; `benchmarks/help_time.py` measures it."""
    (tmp_path / "retrain.toml").write_text("")
    assert loaded_modules(arguments, tmp_path) & SLOW == set()


@pytest.mark.parametrize(
    ("arguments", "code"),
    first_or_long(
        [
            (["--lr", "fast", "--transform-mode", "nope"], 2),
            (["plugins"], 0),
            (["init", "--list"], 0),
            (["explain", "--keys"], 0),
            (["explain", "--max-steps", "3"], 0),
        ]
    ),
)
def test_light_commands_and_bad_configurations_import_nothing_heavy(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    modules = loaded_modules(arguments, tmp_path, code)
    assert ("retrain.cli.command_line" in modules, modules & HEAVY) == (True, set())


def test_dotenv_is_loaded_the_real_environment_wins_and_json_stays_pure(script: Script, tmp_path: Path) -> None:
    lines = "# comment\nRETRAIN__TRAINING__MAX_STEPS=7\nRETRAIN__TRAINING__BATCH_SIZE='3'\nRETRAIN__TRAINING__LR=9\n"
    (tmp_path / ".env").write_text(lines)
    done = script("explain", "--json", "--group-size", "2", environ={"RETRAIN__TRAINING__LR": "0.5"})
    assert done.returncode == 0, done.stderr
    assert done.stderr == "Loaded .env\n"
    content = json.loads(done.stdout)
    assert (content["max_steps"], content["batch_size"], content["lr"]) == (7, 3, 0.5)
    assert content["origins"]["training.max_steps"]["origin"] == "RETRAIN__TRAINING__MAX_STEPS"
    (tmp_path / ".env").write_bytes(b"A=\xff\xfe\n")
    done = script("plugins", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert (".env" in done.stderr, "fix: " in done.stderr, "Traceback" in done.stderr) == (True, True, False)


def test_the_folder_is_on_the_path_of_the_installed_script(script: Script, tmp_path: Path) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "mine.py").write_text("def shape(ctx):\n    return ctx.uncertainties_G\n")
    (tmp_path / "plain.py").write_text("def raw(rewards):\n    return rewards\n")
    done = script("explain", "--json", "--transform-mode", "mine.shape", "--advantage-mode", "plain.raw")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["condition"] == "plain.raw+mine.shape"


LINES = """
import logging
from retrain.observe.console.console import run_console
from retrain.kernel.plugins.discover import load_plugins
with run_console(load_plugins()):
    for number in range(10_000):
        logging.getLogger("retrain.test").info("line %d", number)
"""


@pytest.mark.parametrize(
    ("program", "reader", "reason"),
    [("-m retrain explain --keys", "| head -1", ""), ("lines.py", "| head -1", "nothing reads the output any more")],
)
def test_a_reader_may_leave_and_a_run_reports_it_once(program: str, reader: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(LINES)
    shell = f"'{sys.executable}' {program} {reader}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["/bin/bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n"), reason in done.stderr) == (0, bool(reason), True)


def test_what_a_plugin_registers_shows_up_as_a_command(distribution: Callable[..., Path], command: Command) -> None:
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
    assert "`retrain greet`" in command("greeet").err


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
