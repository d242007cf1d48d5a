"""Generated section `scaffold KIND NAME`: the file that `retrain init-plugin` writes, and the TOML that it prints."""

from __future__ import annotations

import json
import tempfile
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

COMMAND = "init-plugin"


def scaffold(plugins: Plugins, kind: str, name: str) -> str:
    """The file that `retrain init-plugin` writes for a user; ConfigError when that command is not installed."""
    if not plugins.find(Kind.COMMAND, COMMAND):
        raise ConfigError(Problem(what=f"this section needs the command `retrain {COMMAND}`", fix="install its plugin"))
    command: click.Command = resolve(plugins, Kind.COMMAND, COMMAND, where="the page").target
    with (
        tempfile.TemporaryDirectory(prefix="retrain-page-") as folder,
        chdir(folder),
        redirect_stdout(StringIO()) as out,
    ):
        arguments = ["--kind", kind, "--name", name, "--json"]
        command.main(arguments, standalone_mode=False, obj=plugins)
        files = sorted(Path("plugins").glob("*.py"))
        code = next(file for file in files if file.stem != "__init__").read_text(encoding="utf-8").rstrip()
    report = json.loads(out.getvalue())
    toml = f"\n\nand in the configuration:\n\n```toml\n{report['toml'].strip()}\n```" if report.get("toml") else ""
    return f"`plugins/{name}.py`:\n\n```python\n{code}\n```{toml}"
