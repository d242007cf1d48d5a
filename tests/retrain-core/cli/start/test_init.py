"""`retrain init`: every template is a configuration that loads, and nothing is ever overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Kind
from tests.kit.problems import codes_in
from tests.kit.shared import first_or_long

TEMPLATES = [entry.spec.name for entry in load_plugins({}).registered(Kind.TEMPLATE)]


@pytest.mark.parametrize("name", first_or_long(TEMPLATES))
def test_every_template_explains_cleanly(name: str, command: Callable[..., Any], tmp_path: Path) -> None:
    written = command("init", "--template", name)
    assert (written.code, written.err) == (0, "")
    file = "campaign.toml" if name.startswith("campaign") else "retrain.toml"
    assert written.out.startswith(f"Wrote {file} ({name}). Next:\n  retrain explain")
    result = command("explain", file, "--json")
    assert result.code == 0, result.err
    content = json.loads(result.out)
    assert content["warnings"] == [] or name == "quickstart"
    assert all(f"{file}:" in row["origin"] for row in content["origins"].values())


def test_documented_templates_exist_with_their_documented_numbers(command: Callable[..., Any], tmp_path: Path) -> None:
    assert {"default", "quickstart", "experiment"} <= set(TEMPLATES)
    found = {}
    for name in ("default", "quickstart", "experiment"):
        command("init", *(["-t", name] if name != "default" else []))
        content = json.loads(command("explain", "--json").out)
        found[name] = [content[k] for k in ("max_steps", "batch_size", "group_size", "max_tokens", "condition", "seed")]
        (tmp_path / "retrain.toml").unlink()
    assert found == {
        "default": [100, 4, 16, 10240, "maxrl+gtpo_sepa", -1],
        "quickstart": [20, 2, 8, 1024, "grpo+none", -1],
        "experiment": [500, 8, 16, 10240, "maxrl+gtpo_sepa", 42],
    }


@pytest.mark.parametrize("obstacle", ["file", "folder", "dangling link"])
def test_nothing_is_overwritten(obstacle: str, command: Callable[..., Any], tmp_path: Path) -> None:
    target = tmp_path / "retrain.toml"
    if obstacle == "file":
        target.write_text("mine")
    elif obstacle == "folder":
        target.mkdir()
    else:
        target.symlink_to(tmp_path / "elsewhere")
    result = command("init")
    assert (result.code, result.out, codes_in(result.err)) == (2, "", ["init.file-exists"])
    assert not (tmp_path / "elsewhere").exists()
    if obstacle == "file":
        assert target.read_text() == "mine"


def test_the_list_as_text_and_as_json_and_the_nearest_name(command: Callable[..., Any], tmp_path: Path) -> None:
    unknown = command("init", "--template", "quikstart")
    assert (unknown.code, "'quickstart'" in unknown.err) == (2, True)
    text, data = command("init", "--list"), command("init", "--list", "--json")
    assert (text.code, data.code) == (0, 0)
    rows = json.loads(data.out)
    assert [row["name"] for row in rows] == TEMPLATES
    assert all(row["summary"] in text.out for row in rows)
    assert list(tmp_path.iterdir()) == []


def test_a_plugins_template_is_written_under_its_own_file_name(
    distribution: Callable[..., Path], command: Callable[..., Any], tmp_path: Path
) -> None:
    source = (
        "from retrain.api import PluginSpec, hookimpl\n@hookimpl\ndef retrain_register_init_templates(register):\n"
        "    register(PluginSpec(name='mine', summary='s', factory=lambda: '[training]\\n', traits='mine.toml'))\n"
    )
    distribution("templater", {"templater": source})
    result = command("init", "-t", "mine")
    assert result.out == "Wrote mine.toml (mine). Next:\n  retrain explain mine.toml\n  retrain mine.toml\n"
    assert (tmp_path / "mine.toml").read_text() == "#:schema ./retrain.schema.json\n[training]\n"
