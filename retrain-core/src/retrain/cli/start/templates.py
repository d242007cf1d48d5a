"""The templates of `retrain init`: the file of each, and those that depend on no particular distribution."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins

DEFAULT_FILE = "retrain.toml"


DEFAULT, QUICKSTART, EXPERIMENT = (
    partial(Path(__file__).with_name(f"{name}.toml").read_text, encoding="utf-8")
    for name in ("default", "quickstart", "experiment")
)


def template_text(plugins: Plugins, name: str, output: Path | None = None) -> tuple[Path, str]:
    """The template's file, or `output`, and its text. PluginError names the nearest template."""
    found = resolve(plugins, Kind.TEMPLATE, name, where="--template")
    text: str = found.target() if callable(found.target) else found.target
    return output or Path(found.traits if isinstance(found.traits, str) else DEFAULT_FILE), text


def refuse_existing(file: Path) -> None:
    """ConfigError when the path exists, even as a dangling link."""
    if file.exists() or file.is_symlink():
        what, fix = "the file exists already; nothing was written", "remove it, or name another with --output FILE"
        raise ConfigError(Problem(code="init.file-exists", where=str(file), what=what, fix=fix))
