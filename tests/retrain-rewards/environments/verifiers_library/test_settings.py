"""`[environment]` before the library is imported, and an environment that is not there."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from retrain.api import Config, ConfigError, Kind, PluginContext, Seeds, install_line, resolve
from retrain_rewards.environments.verifiers_library import environment
from retrain_rewards.tables import EnvironmentTable
from tests.kit.problems import codes_in, refused

needs_library = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="needs verifiers")


def made(plugins, **table):
    """As the kernel makes it: by its name, from the table."""
    found = resolve(plugins, Kind.ENVIRONMENT, "verifiers", where="test")
    config = Config(tables={"environment": EnvironmentTable(provider="verifiers", **table)})
    environment = found.target(PluginContext(config=config, seeds=Seeds(1), plugins=plugins))
    return environment


@needs_library
@pytest.mark.parametrize(
    ("code", "table"),
    [
        *(("bad-id", {"id": name}) for name in ("../elsewhere", "a/b/c", "a; rm -rf /", "--help", "a/--help")),
        ("no-turns", {"id": "b", "max_turns": 0}),
        ("bad-args", {"id": "b", "args": {"when": float("nan")}}),
    ],
)
def test_a_wrong_table_is_refused_at_once(plugins, code, table):
    assert refused(made, plugins, **table) == [f"environment.{code}"]
    settings = made(plugins, id="a/b@1.0", args='{"split": "train"}', max_turns=3, timeout_s=5.0).settings
    assert (settings.name, settings.hub_id, settings.library_id) == ("b", "a/b@1.0", "a/b")
    assert (settings.args, settings.max_turns, settings.timeout_s) == ({"split": "train"}, 3, 5.0)


def test_a_missing_library_is_told_with_the_install_line(plugins, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "verifiers" else find(name))
    with pytest.raises(ConfigError, match=re.escape(install_line("retrain-rewards", "verifiers"))):
        made(plugins, id="primeintellect/gsm8k")


@needs_library
def test_what_is_not_installed_is_named_with_its_neighbours(sit, tmp_path, monkeypatch):
    folder = tmp_path / "word_game-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: word-game\nVersion: 1.0\nRequires-Dist: verifiers\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as caught:
        sit("somebody/word_games")
    assert codes_in(caught) == ["environment.not-installed"]
    assert "word-game" in caught.value.problems[0].why
    assert "prime env install somebody/word_games" in caught.value.problems[0].fix
    assert refused(sit, "word_games", auto_install=True) == ["environment.not-installed"]
    (tmp_path / "breaks_on_import.py").write_text("raise SystemExit('no key')")
    with pytest.raises(ConfigError, match="SystemExit: no key") as caught:
        sit("breaks-on-import")
    assert codes_in(caught) == ["environment.import-failed"]


def fake_prime(folder, script):
    """A command `prime` that does this."""
    file = folder / "prime"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@needs_library
def test_an_environment_is_installed_from_the_hub(sit, tmp_path, monkeypatch):
    site = tmp_path / "site"
    site.mkdir()
    has_classic = importlib.util.find_spec("verifiers.legacy") is not None
    source = Path(__file__).parent / "packages" / ("guess_number.py" if has_classic else "taskset_sum.py")
    monkeypatch.syspath_prepend(str(site))
    script = f'test "$*" = "env install somebody/new-game" && cp {source} {site}/new_game.py'
    monkeypatch.setenv("PATH", fake_prime(tmp_path, script))
    assert sit("somebody/new-game", auto_install=True).data.examples
    sys.modules.pop("new_game")


@needs_library
@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 'Error: no such environment' >&2; exit 1", "no such environment"), ("sleep 60", "took longer than 0.5 s")],
)
def test_a_failed_install_says_why_and_how_by_hand(sit, tmp_path, monkeypatch, script, reason):
    monkeypatch.setenv("PATH", fake_prime(tmp_path, f"exec {script}" if script.startswith("sleep") else script))
    monkeypatch.setattr(environment, "INSTALL_TIMEOUT_S", 0.5)
    with pytest.raises(ConfigError, match=reason) as caught:
        sit("somebody/other-game", auto_install=True)
    assert codes_in(caught) == ["environment.install-failed"]
    assert "prime env install somebody/other-game" in str(caught.value)
