"""The documentation says what the code does: generated pages are current, commands parse, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from retrain.cli.main import run
from retrain.config.load import load_config
from retrain.config.overrides import PARAM_FLAGS
from retrain.plugins.check import registered_tables
from retrain.plugins.manager import load_plugins
from retrain.types import Kind

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("retrain-*/README.md")])


def test_the_page_of_keys_is_current(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "docs")
    assert run(["explain", "--keys", "--markdown"]) == 0
    hint = "run `retrain explain --keys --markdown > docs/configuration.md`"
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == capsys.readouterr().out, hint


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_toml_blocks_load(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in blocks:
        if re.search(r"^\[(project|tool|build)", block, flags=re.MULTILINE):
            continue  # a pyproject, not a configuration
        file = tmp_path / "block.toml"
        file.write_text(block, encoding="utf-8")
        _, problems = load_config(file, tables=registered_tables(load_plugins()))
        assert not problems, f"{page}: {[str(problem) for problem in problems]}\n{block}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_flags_exist(page: Path) -> None:
    plugins = load_plugins()
    commands = {entry.spec.name for entry in plugins.registered(Kind.COMMAND)}
    tables = registered_tables(plugins)
    from retrain.config.load import all_keys

    flags = {f"--{key.flag}" for key in all_keys(tables)} | set(PARAM_FLAGS) | {"--set", "--resume"}
    for block in re.findall(r"```(?:bash|sh|console)\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in block.splitlines():
            words = line.lstrip("$ ").split("#")[0].split()
            if words[:1] != ["retrain"]:
                continue
            first = words[1] if len(words) > 1 else ""
            if first and not first.startswith("-") and not first.endswith(".toml"):
                assert first in commands, f"{page}: {line}"
                continue
            unknown = (
                {word.partition("=")[0] for word in words if word.startswith("--")} - flags - {"--help", "--version"}
            )
            assert not unknown, f"{page}: {line}"
