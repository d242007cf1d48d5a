"""`retrain plugins`: what is installed, failed and selected, and every backend, without importing one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

import retrain
from retrain.api import Capabilities
from retrain.cli.plugins import option_schema

Command = Callable[..., Any]
REGISTERS = "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_"
TRANSFORM = """
from retrain.advantages import TransformSpec
print("a plugin that talks")
flat = TransformSpec(name="flat")
"""


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """A folder with two good modules, one that cannot be imported, one that calls sys.exit, and a private one."""
    folder = tmp_path / "plugins_of_this_test"
    folder.mkdir()
    (folder / "fine.py").write_text(TRANSFORM)
    (folder / "broken.py").write_text("import there_is_no_such_module\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    (folder / "_private.py").write_text("raise RuntimeError('nobody imports me')\n")
    (tmp_path / "run.toml").write_text(
        '[plugins]\nsearch_paths = ["plugins_of_this_test"]\n'
        '[algorithm]\ntransform_mode = "fine.flat"\nadvantage_mode = "grpp"\n'
    )
    return folder


def content_of(command: Command, *arguments: str) -> dict[str, Any]:
    result = command("plugins", *arguments, "--json")
    assert (result.code, result.err.replace("a plugin that talks\n", "")) == (0, "")
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_every_row_names_distribution_version_and_file(command: Command) -> None:
    content = content_of(command)
    rows = {(kind, row["name"]): row for kind, rows in content["kinds"].items() for row in rows}
    row = rows["command", "plugins"]
    assert (row["distribution"], row["version"]) == ("retrain-core", retrain.__version__)
    assert Path(row["file"]) == Path(retrain.__file__).parent / "cli" / "plugins.py"
    for row in rows.values():
        assert Path(row["file"]).is_file(), row
    assert "config" not in content
    assert list(content_of(command, "--kind", "data-source")["kinds"]) == ["data source"]
    result = command("plugins", "--kind", "data-sauce")
    assert (result.code, "data-source" in result.err) == (2, True)


def test_nothing_is_imported_to_find_the_files(command: Command, distribution: Callable[..., Path]) -> None:
    plugin = (
        f"{REGISTERS}transforms(register):\n"
        '    register(PluginSpec(name="heavy", summary="s", factory="weighty.inner.part:make"))\n'
        '    register(PluginSpec(name="nowhere", summary="s", factory="there_is_none:make"))\n'
    )
    site = distribution("strangers", {"light_plugin": plugin})
    package = site / "weighty" / "inner"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "part.py").write_text("raise RuntimeError('imported')\n")
    rows = {row["name"]: row for row in content_of(command)["kinds"]["transform"]}
    assert rows["heavy"]["file"] == str(package / "part.py")
    assert rows["nowhere"]["file"] == ""


def test_with_a_configuration_its_modules_have_a_status_and_its_parts_are_traced(
    searched: Path, command: Command
) -> None:
    content = content_of(command, "run.toml")
    assert content["runtime"] == {"search_paths": ["plugins_of_this_test"], "strict": True}
    broken, fine, leaves = content["discovered"]
    assert fine == {"module": "plugins_of_this_test.fine", "file": str(searched / "fine.py"), "status": "ok"}
    assert broken["status"] == "error: ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert leaves["status"] == "error: SystemExit: 3"
    content = content_of(command, "run.toml", "--seed", "3")
    selected = {part["key"]: part for part in content["selected"]}
    dotted = selected["algorithm.transform_mode"]
    assert (dotted["name"], dotted["source"], dotted["file"]) == ("fine.flat", "dotted path", str(searched / "fine.py"))
    missing = selected["algorithm.advantage_mode"]
    assert (missing["source"], missing["file"], "grpp" in missing["problem"]) == ("", "", True)
    assert selected["backend.backend"]["distribution"] == "retrain-local"
    assert selected["data.source"]["name"] == "math"
    assert any("grpp" in problem for problem in content["problems"])
    shown = command("plugins", "run.toml").out
    assert "plugins_of_this_test.leaves  plugins_of_this_test/leaves.py  error: SystemExit: 3" in shown
    assert "not provided" in shown
    (searched.parent / "run.toml").rename(searched.parent / "retrain.toml")
    assert content_of(command)["config"] == "retrain.toml"


def test_a_clash_and_a_broken_plugin_are_shown(command: Command, distribution: Callable[..., Path]) -> None:
    second = '    register(PluginSpec(name="grpo", summary="Mine.", factory=len))\n'
    distribution("second-owner", {"second_owner": f"{REGISTERS}advantages(register):\n{second}"})
    distribution("broken-one", {"broken_one": "raise OSError('\\x1b[31mlibfoo.so')\n"})
    out = command("plugins").out
    assert out.count("CLASH: two owners") == 2
    (failure,) = (line for line in out.splitlines() if line.startswith("failed to load"))
    assert failure == "failed to load: broken-one 1.0 (broken_one): OSError: �[31mlibfoo.so"
    (failed,) = content_of(command)["failures"]
    assert (failed["distribution"], failed["source"]) == ("broken-one 1.0", "broken_one")


STRANGER = """
from retrain.api import PluginSpec, hookimpl

@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="far", summary="Elsewhere.", factory="far_away:make", params="far_away:Options"))
"""


def test_the_local_backend_shows_all_that_it_promises_and_takes(command: Command) -> None:
    (local,) = (row for row in content_of(command, "--kind", "backend")["backends"] if row["name"] == "local")
    assert set(local["capabilities"]) == {field.name for field in fields(Capabilities)}
    assert local["capabilities"]["checkpoint_resume_mode"] == "exact"
    assert local["dependency"]["importable"] is True
    assert "torch" in {package["name"] for package in local["dependency"]["packages"]}
    option = local["option_schema"]["micro_batch_tokens"]
    assert option.pop("description")
    assert option == {"type": "integer", "default": 0, "choices": None, "range": {"minimum": 0}, "required": False}


def test_what_the_environment_leaves_out_is_said_with_what_to_do(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    assert "left out by RETRAIN_PLUGINS or RETRAIN_BLOCK: retrain-local" in command("plugins").out
    assert content_of(command)["left_out"] == ["retrain-local"]
    content = content_of(command, "--kind", "backend")
    assert "local" not in {row["name"] for row in content["backends"]}
    hints = {row["name"]: row["hint"] for row in content["promised"]}
    assert hints["local"] == "RETRAIN_PLUGINS or RETRAIN_BLOCK leaves retrain-local out: change that"
    assert "local  not installed: RETRAIN_PLUGINS" in command("plugins", "--kind", "backend").out


def test_a_strangers_backend_that_lacks_a_package_says_so(command: Command, distribution: Callable[..., Path]) -> None:
    site = distribution("far-backend", {"far_plugin": STRANGER})
    with (site / "far_backend-1.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: numpy>=1\nRequires-Dist: no-such-package>=2\n")
    (row,) = (row for row in content_of(command, "--kind", "backend")["backends"] if row["name"] == "far")
    assert row["dependency"]["importable"] is False
    assert row["dependency"]["hint"] == "pip install far-backend"
    packages = {package["name"]: package["is_met"] for package in row["dependency"]["packages"]}
    assert packages == {"numpy": True, "no-such-package": False}
    assert row["option_error"].startswith("ModuleNotFoundError")
    assert row["capabilities"] == {}
    shown = command("plugins", "--kind", "backend").out
    assert "not usable    lacks no-such-package: pip install far-backend" in shown
    assert "[backend.options] cannot be read: ModuleNotFoundError" in shown


def test_options_of_every_form_are_described() -> None:
    class Options(BaseModel):
        transport: Literal["filesystem", "zmq"] = Field("filesystem", description="How batches travel.")
        port: int = Field(gt=0, le=65535)
        wait_s: float | None = Field(None, ge=0.0)

    schema = option_schema(Options)
    named = {"choices": ["filesystem", "zmq"], "range": {}, "required": False, "description": "How batches travel."}
    assert schema["transport"] == {"type": "string", "default": "filesystem", **named}
    assert (schema["port"]["required"], schema["port"]["range"]) == (True, {"exclusiveMinimum": 0, "maximum": 65535})
    assert (schema["wait_s"]["type"], schema["wait_s"]["range"]) == ("number or null", {"minimum": 0.0})
