"""Agents that crash, hang, exit, return nonsense or never end: each has its outcome, and nothing is left running."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import ConfigError, PluginContext, Seeds, load_plugins
from retrain.kernel.declared import Kind
from retrain.kernel.types import Outcome, StopReason
from retrain.run.check import identity_of, selected_parts
from retrain.run.configure import load_file
from retrain.run.tables import registered_tables
from retrain.tasks.child.system import descendants
from retrain.use.agents.player import MOST_CALLS, AgentPlayer, make_agent
from retrain.use.agents.programs import CommandAgent, FunctionAgent, Program

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAMS))


def performed(
    play: Callable[..., Any], scripted: Any, program: Program, doing: list[str], *, timeout_s: float = 30.0
) -> list[Any]:
    """The episodes of a task each, once all are over."""
    infos = [{"do": each} for each in doing]
    played = play(scripted(lambda prompt, seed: "said"), infos=infos, most_calls=5)
    stage = AgentPlayer(program, name="agent", most_calls=5, concurrency=2, timeout_s=timeout_s, memory_gb=0.0)
    done: list[Any] = []
    try:
        stage.start()
        performance = stage.play(played.episodes, played.gateway.url, done.append)
        for thread in performance._threads:
            thread.join()
        assert performance.error is None
        assert performance.is_over
    finally:
        stage.close()
    assert len([episode for episode in done if episode is not None]) == len(doing)
    return list(played.episodes)


def test_every_end_of_a_function_has_its_outcome(play: Callable[..., Any], scripted: Any) -> None:
    before = descendants(1)
    program = FunctionAgent(entry="hostile:play", where="[environment] id")
    doing = ["hang", "good", "silent", "crash", "exit", "never", "none", "number", "leak"]
    episodes = performed(play, scripted, program, doing, timeout_s=3.0)
    found = dict(zip(doing, episodes, strict=True))
    failed = {name: e.score.detail for name, e in found.items() if e.score and e.score.outcome is Outcome.FAILED}
    assert "timeout_s" in failed.pop("hang")
    assert "ValueError: it broke with (its key)" in failed.pop("crash")
    assert "exited with code 3" in failed.pop("exit")
    assert "without a call" in failed.pop("none")
    assert "int" in failed.pop("number")
    assert not failed
    assert found["good"].text == "I heard said"
    assert found["silent"].text == "said"
    assert found["leak"].text == "(its key)"
    assert found["never"].completion().stop_reason is StopReason.TURNS
    assert (len(found["never"].calls), found["never"].text) == (5, "said")
    assert all(episode.is_over for episode in episodes)
    end = time.monotonic() + 60
    while sleeping := [pid for pid in descendants(1) - before if b"time.sleep(600)" in _command(pid)]:
        assert time.monotonic() < end, f"processes that the agent had started outlived it: {sleeping}"
        time.sleep(0.05)


def test_a_coroutine_is_an_agent_and_its_process_is_kept(play: Callable[..., Any], scripted: Any) -> None:
    program = FunctionAgent(entry="hostile:play_async", where="[environment] id")
    assert [e.text for e in performed(play, scripted, program, ["good"] * 3)] == ["I heard said"] * 3


def test_a_command_reads_its_task_and_answers_on_its_output(play: Callable[..., Any], scripted: Any) -> None:
    program = CommandAgent(command=f"{sys.executable} {PROGRAMS / 'hostile.py'}", where="[environment] args")
    good, silent, fail = performed(play, scripted, program, ["good", "silent", "fail"])
    assert (good.text, silent.text) == ("I heard said", "said")
    assert "exit code 1: a log line\nno luck" in fail.score.detail


@pytest.mark.parametrize(
    ("program", "word"),
    [
        (FunctionAgent(entry="hostile:nothing", where="w"), "has no attribute 'nothing'"),
        (FunctionAgent(entry="no_such_module:play", where="w"), "No module named"),
        (FunctionAgent(entry="hostile:__name__", where="w"), "not a function"),
        (CommandAgent(command="no-such-program --x", where="w"), "names no program"),
        (CommandAgent(command=" ", where="w"), "names no program"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_refused(program: Program, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        program.prepare()


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# ---------------------------------------------------------------- what [environment] says about an agent


def configured(*flags: str) -> Any:
    given = ["--environment-provider=agent", "--data-source=arithmetic", *flags]
    return load_file(None, given, load_plugins()).config


def made(*flags: str) -> Any:
    return make_agent(PluginContext(config=configured(*flags), seeds=Seeds(1), plugins=load_plugins()))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ["neither or both"]),
        (("--environment-id=a:b", '--environment-args={"command": "x"}'), ["neither or both"]),
        (("--environment-id=my_agent",), ["names no function"]),
        (("--environment-id=:play",), ["names no function"]),
        (("--environment-id=a:b:c",), ["names no function"]),
        (('--environment-args={"comand": "x"}',), ["use 'command'", "neither or both"]),
        (('--environment-args={"command": "x", "concurrency": 0}',), ["concurrency"]),
        (('--environment-args={"command": "x", "concurrency": true}',), ["concurrency"]),
        (('--environment-args={"command": ["x"]}',), ["args.command", "string"]),
        (("--environment-id=a:b", "--environment-max-turns=0"), ["without a call"]),
        (("--environment-id=a:b", "--max-thinking-tokens=9"), ["training.no-agent-budget"]),
    ],
)
def test_every_fault_is_said_at_once(flags: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        made(*flags)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    "flag", ["--environment-id=my_agent:play", '--environment-args={"command": "python my_agent.py"}']
)
def test_its_code_is_part_of_what_a_run_is(flag: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_agent.py").write_text("def play(task): return 'x'\n")
    plugins = load_plugins()
    identity = identity_of(configured(flag), plugins, registered_tables(plugins))
    assert [file.name for file in identity.code] == ["my_agent.py"]
    agent = made(flag, "--environment-max-turns=-1")
    assert agent.name in flag
    assert agent.most_calls == MOST_CALLS
    agent.close()
    agent.close()
    kinds = {part.kind for part in selected_parts(configured(flag), plugins, registered_tables(plugins))}
    assert {Kind.DATA_SOURCE, Kind.REWARD, Kind.ENVIRONMENT} <= kinds, "data and reward are the run's"
