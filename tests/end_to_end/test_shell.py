"""The command line as a person and a script meet it: questions, completion, quiet, JSON, and odd streams."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.cli.command_line import main
from retrain.text.terminal_text import program
from tests.end_to_end.running import SCRIPT, Outcome, retrain, tiny
from tests.end_to_end.terminal import converse
from tests.kit.shared import first_or_long, made_once, slow_or_long

EXE = str(SCRIPT)
SHORT = ("--max-steps", "2", "--batch-size", "2", "--group-size", "4", "--eval-examples", "0", "--max-tokens", "16")
ESCAPE = "\x1b["


# ---------------------------------------------------------------- nothing to train


@pytest.mark.long
def test_without_a_configuration_one_is_offered_and_written_and_trains(tmp_path: Path) -> None:
    exchange = [
        ("Create one now? [Y/n]", "\n"),
        ("Model (hub id or folder) [builtin:tiny]", "\n"),
        ("Data [arithmetic]", "\n"),
        ("[default]", "\n"),
        ("Training steps [70]", "2\n"),
        ("Folder of the run [logs/arithmetic]", "logs/mine\n"),
    ]
    code, printed = converse([EXE], exchange, cwd=tmp_path)
    assert code == 0, printed
    assert "Wrote retrain.toml (your data). Next:\n  retrain explain\n  retrain\n" in printed
    text = (tmp_path / "retrain.toml").read_text()
    assert text.split("\n\n", 1)[1].strip() in printed  # all but the head, to which a line for editors is added
    document = tomllib.loads(text)
    assert (document["training"]["max_steps"], document["training"]["seed"]) == (2, 1)
    assert document["logging"] == {"log_dir": "logs/mine"}
    assert "# gpu:0 for a CUDA device" in text  # comments stay
    explained = json.loads(retrain("explain", "--json", cwd=tmp_path).out)
    assert (explained["max_steps"], explained["seed"], explained["log_dir"]) == (2, 1, "logs/mine")
    assert retrain("-q", *SHORT, cwd=tmp_path).code == 0
    assert (tmp_path / "logs/mine/metrics.jsonl").exists()


# ---------------------------------------------------------------- init --interactive


@pytest.mark.long
def test_questions_about_your_own_data_and_wrong_answers_are_asked_again(tmp_path: Path) -> None:
    rows = [{"story": f"What is {n} + 30?", "hint": "Use your fingers.", "sum": n + 30} for n in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    exchange = [
        ("Model (hub id or folder) [builtin:tiny]", "\n"),
        ("Data [tasks.jsonl]", "task.jsonl\n"),
        ("did you mean 'tasks.jsonl'?", ""),
        ("Data [tasks.jsonl]", "\n"),
        ("Column of the prompt", "story\n"),
        ("Column of the answer", "sum\n"),
        ("[match]", "nonsense\n"),
        ("[match]", "\n"),
        ("Training steps [70]", "0\n"),
        ("Training steps [70]", "3\n"),
        ("Folder of the run [logs/tasks]", "\n"),
    ]
    code, printed = converse([EXE, "init", "-i"], exchange, cwd=tmp_path)
    assert code == 0, printed
    for told in ("data.prompt-column-unclear", "hint ('Use your fingers.')", "'nonsense' is not the name"):
        assert told in printed
    assert "32 examples to train on, 8 held out" in printed
    document = tomllib.loads((tmp_path / "retrain.toml").read_text())
    source = {"source": "files", "path": "tasks.jsonl", "prompt_key": "story", "answer_key": "sum"}
    assert (document["data"], document["training"]["max_steps"]) == (source, 3)


def test_a_named_template_and_file_leave_fewer_questions(tmp_path: Path) -> None:
    exchange = [("Model", "\n"), ("Training steps", "\n"), ("Seed", "\n"), ("wandb", "\n"), ("Folder", "\n")]
    argv = [EXE, "init", "--interactive", "--template", "quickstart", "-o", "conf.toml"]
    code, printed = converse(argv, exchange, cwd=tmp_path)
    assert code == 0, printed
    assert "Number" not in printed
    assert "  retrain explain conf.toml\n  retrain conf.toml\n" in printed
    assert tomllib.loads((tmp_path / "conf.toml").read_text())["training"]["seed"] == 42  # the template has none


def test_a_dialog_that_is_declined_interrupted_or_impossible_leaves_everything_as_it_is(tmp_path: Path) -> None:
    code, printed = converse([EXE], [("[Y/n]", "n\n")], cwd=tmp_path)
    assert (code, "retrain init --template tiny" in printed) == (2, True)
    code, printed = converse([EXE, "init", "-i"], [("Model", "\n"), ("Data [", "\x03")], cwd=tmp_path)
    assert (code, "retrain: interrupted" in printed, "Traceback" in printed) == (130, True, False)
    for words, said in (
        ([], "no configuration in this folder"),
        (["init", "-i"], "there is no terminal for the questions"),
    ):
        done = subprocess.run([EXE, *words], cwd=tmp_path, input="y\n", capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, said in done.stderr) == (2, "", True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "retrain.toml").write_text("# mine\n")
    code, printed = converse([EXE, "init", "-i", "-t", "tiny"], [], cwd=tmp_path)
    assert (code, "the file exists already; nothing was written" in printed) == (2, True)
    assert "Training steps" not in printed
    assert (tmp_path / "retrain.toml").read_text() == "# mine\n"


# ---------------------------------------------------------------- completion in a real shell


def modern_bash() -> str | None:
    """bash from 4.4 on, which is what the script needs; macOS ships 3.2."""
    bash = shutil.which("bash")
    if bash is None:
        return None
    text = subprocess.run([bash, "-c", "echo ${BASH_VERSINFO[0]} ${BASH_VERSINFO[1]}"], capture_output=True, text=True)
    major, minor = map(int, text.stdout.split())
    return bash if (major, minor) >= (4, 4) else None


@pytest.mark.skipif(modern_bash() is None, reason="needs bash 4.4")
def test_bash_completes_commands_flags_names_and_files(tmp_path: Path) -> None:
    (tmp_path / "exotic.toml").write_text("")
    path = f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"
    # the prompt that is waited for is ours, whatever the shell of whoever runs the tests exports
    environ = {"PATH": path, "PS1": "first> ", "PROMPT_COMMAND": "", "INPUTRC": os.devnull}
    setup = 'PS1="> "; bind "set enable-bracketed-paste off"; eval "$(retrain --completion bash)"; echo rea""dy\n'
    exchange = [
        ("first> ", setup),
        ("ready", "retrain expl\t --transform-mo\tgtpo_s\t --max-steps 3 --json | grep transform_mode\n"),
        ('"transform_mode": "gtpo_sepa"', "retrain explain --uncertainty-kind=predic\t --json | grep uncert\n"),
        ('"uncertainty_kind": "predictive_variance"', "retrain explain exo\t --json | grep config\n"),
        ('"config": "exotic.toml"', "exit\n"),
    ]
    argv = [str(modern_bash()), "--norc", "--noprofile", "-i"]
    code, printed = converse(argv, exchange, cwd=tmp_path, environ=environ)
    assert code == 0, printed
    assert '"config": "exotic.toml"' in printed


# ---------------------------------------------------------------- quiet and JSON


@pytest.mark.long
def test_a_quiet_run_or_campaign_says_how_it_ended_and_nothing_else(tmp_path: Path) -> None:
    outcome = tiny("-q", *SHORT, cwd=tmp_path)
    assert re.fullmatch(
        r"Training complete\. maxrl\+gtpo_sepa, 2 steps, running correct rate: \d+\.\d%\n"
        r"Adapter saved to logs/tiny/adapter/final\nMetrics saved to logs/tiny/metrics.jsonl\n",
        outcome.out,
    )
    code, printed = converse([EXE, "--quiet", *SHORT], [], cwd=tmp_path)
    assert code == 0
    assert ESCAPE not in printed
    assert "Training complete." in printed
    assert "Step 0" not in printed
    one = 'seeds = [1]\nmax_steps = 1\nconditions = [{advantage_mode = "grpo", transform_mode = "none"}]\n'
    (tmp_path / "c.toml").write_text(f"{(tmp_path / 'retrain.toml').read_text()}\n[campaign]\n{one}")
    campaign = retrain("c.toml", "-q", *SHORT[2:], "--log-dir", "logs/campaign", cwd=tmp_path)
    _, head, manifest, *following = campaign.out.splitlines()
    assert head.startswith("Campaign done: 1 of 1 runs done, 0 failed ("), campaign.err
    assert manifest.startswith("  manifest: logs/campaign")
    for line, verb in zip(following, ("compare", "report"), strict=True):
        assert line.startswith(f"  next: {program()} {verb} logs/campaign")


JSON_COMMANDS = (
    *("--version", "init --list", "init -t default -o other.toml", "explain", "explain --keys", "trace", "audit"),
    *("capacity", "plugins", "backends", "doctor", "migrate-config retrain.toml", "man", "status"),
    *("diff logs/tiny logs/tiny", "compare logs/tiny", "report logs/tiny", "credit logs/tiny"),
    *("status logs/tiny --resume", "squeeze logs/tiny"),
)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run and a `.env`."""

    def make(folder: Path) -> None:
        tiny(*SHORT, cwd=folder)
        (folder / ".env").write_text("SOME_VARIABLE=1\n")

    return made_once(tmp_path_factory, "trained", make)


@pytest.fixture
def script(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Outcome]]:
    """What the `retrain` script does, in this process; all that reaches either descriptor is seen."""
    before = dict(os.environ)
    monkeypatch.chdir(trained)
    monkeypatch.syspath_prepend(str(trained))
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process goes on

    def call(*words: str) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main(words)
        out, err = capfd.readouterr()
        return Outcome(code=int(left.value.code or 0), out=out, err=err)

    yield call
    os.environ.clear()
    os.environ.update(before)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize("words", JSON_COMMANDS)
def test_json_on_stdout_is_json_alone(
    words: str, script: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    outcome = script(*words.split(), "--json")
    assert outcome.code in (0, 1), outcome.err
    assert json.loads(outcome.out, parse_constant=refuse)
    assert "Loaded .env" in outcome.err


# ---------------------------------------------------------------- streams


def shell(command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """One line of POSIX shell in which `retrain` is the script under test."""
    env = {**os.environ, **environ, "PATH": f"{SCRIPT.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["sh", "-c", command], cwd=cwd, env=env, capture_output=True, text=True, errors="replace", check=False
    )


OLD = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
STREAMS = [  # the command, its exit code, words of its messages
    *((f"{words} {closed}", 0, "") for words, closed in (("plugins", ">&-"), ("explain", ">&- 2>&- <&-"))),
    ("explain --seed pl\u00e4ne", 2, ""),
    ("plugins > /dev/full", 1, "the output cannot be written"),
    ("man", 0, ""),
    ("status", 0, ""),
    ("diff logs/tiny logs/tiny", 0, ""),
    (f"{' '.join(SHORT)} --log-dir logs/old", 0, ""),
]


@pytest.mark.parametrize(("words", "code", "said"), slow_or_long(STREAMS, *STREAMS[:4]))
def test_closed_and_full_streams_and_an_old_encoding_give_no_traceback(
    words: str, code: int, said: str, trained: Path
) -> None:
    if "full" in words and not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    done = shell(f"retrain {words}", trained, **({} if code == 1 or "&-" in words else OLD))
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not re.search("Traceback|Exception ignored", done.stderr)


@pytest.mark.parametrize("words", slow_or_long(("plugins", "explain", "--help", "status"), "plugins"))
def test_forty_columns_are_enough(words: str, trained: Path) -> None:
    code, printed = converse([EXE, *words.split()], [], cwd=trained, columns=40)
    assert (code, "Traceback" in printed) == (0, False), printed


@pytest.mark.parametrize(
    ("environ", "is_colored"), first_or_long([({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({}, True)])
)
def test_color_on_a_terminal(environ: dict[str, str], is_colored: bool, trained: Path) -> None:
    for words in (["nope"], ["plugins"]):
        _, printed = converse([EXE, *words], [], cwd=trained, environ={"NO_COLOR": "", "FORCE_COLOR": ""} | environ)
        assert (re.search(r"\x1b\[[0-9;]*m", printed) is not None) == is_colored, printed
