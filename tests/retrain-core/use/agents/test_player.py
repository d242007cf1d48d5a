"""What `[environment]` says about an agent, read before anything loads."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.api import ConfigError, PluginContext, Seeds, load_plugins
from retrain.kernel.declared import Kind
from retrain.run.check import identity_of, selected_parts
from retrain.run.configure import load_file
from retrain.run.tables import registered_tables
from retrain.use.agents.player import MOST_CALLS, make_agent


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
