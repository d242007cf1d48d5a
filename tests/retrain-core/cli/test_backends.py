"""`retrain plugins --kind backend`: capabilities, options and dependencies of every backend, without importing one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from retrain.api import Capabilities
from retrain.cli.plugins import option_schema

Command = Callable[..., Any]
STRANGER = """
from retrain.api import PluginSpec, hookimpl

@hookimpl
def retrain_register_backends(register):
    register(PluginSpec(name="far", summary="Elsewhere.", factory="far_away:make", params="far_away:Options"))
"""


def content_of(command: Command) -> dict[str, Any]:
    result = command("plugins", "--kind", "backend", "--json")
    assert (result.code, result.err) == (0, "")
    content: dict[str, Any] = json.loads(result.out)
    return content


def test_the_local_backend_shows_all_that_it_promises_and_takes(command: Command) -> None:
    (local,) = (row for row in content_of(command)["backends"] if row["name"] == "local")
    assert set(local["capabilities"]) == {field.name for field in fields(Capabilities)}
    assert local["capabilities"]["checkpoint_resume_mode"] == "exact"
    assert local["dependency"]["importable"] is True
    assert "torch" in {package["name"] for package in local["dependency"]["packages"]}
    option = local["option_schema"]["micro_batch_tokens"]
    assert option.pop("description")
    assert option == {"type": "integer", "default": 0, "choices": None, "range": {"minimum": 0}, "required": False}


def test_promised_backends_are_listed_with_what_to_do(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-local")
    content = content_of(command)
    assert "local" not in {row["name"] for row in content["backends"]}
    hints = {row["name"]: row["hint"] for row in content["promised"]}
    assert hints["local"] == "RETRAIN_PLUGINS or RETRAIN_BLOCK leaves retrain-local out: change that"
    assert "local  not installed: RETRAIN_PLUGINS" in command("plugins", "--kind", "backend").out


def test_a_strangers_backend_that_lacks_a_package_says_so(command: Command, distribution: Callable[..., Path]) -> None:
    site = distribution("far-backend", {"far_plugin": STRANGER})
    with (site / "far_backend-1.0.dist-info" / "METADATA").open("a") as metadata:
        metadata.write("Requires-Dist: numpy>=1\nRequires-Dist: no-such-package>=2\n")
    (row,) = (row for row in content_of(command)["backends"] if row["name"] == "far")
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
