"""The questions of `retrain init --interactive --template NAME`: the values that users change most."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.items import Table

from retrain.cli.start.templates import refuse_existing, template_text
from retrain.kernel.registry import Plugins
from retrain.run.configure import claim_of, load_checked

BUILTIN_MODEL = "builtin:"
SEED = 42


def ask(plugins: Plugins, template: str, output: Path | None) -> tuple[str, Path, str]:
    """Ask on the terminal; returns template, file and text, which has been checked.

    ConfigError when the file exists already, raised before any question, and when the answers make no valid
    configuration.
    """
    file, text = template_text(plugins, template, output)
    refuse_existing(file)
    click.echo("Enter keeps the value in brackets; Ctrl-C quits without writing anything.\n")
    document = tomlkit.parse(text)
    _ask_values(document)
    text = tomlkit.dumps(document)
    _check(plugins, file.name, text)
    return template, file, text


def _ask_values(document: tomlkit.TOMLDocument) -> None:
    """Apply the answers to the document, keeping comments and layout."""
    model = _value(document, "model", "model", "")
    if not str(model).startswith(BUILTIN_MODEL):  # templates for a built-in model are tuned to it
        _ask(document, "model", "model", "Model (hub id or folder)", model, _text)
    is_campaign = "campaign" in document
    runs = "campaign" if is_campaign else "training"
    _ask(document, runs, "max_steps", "Training steps", _value(document, runs, "max_steps", 100), _at_least(1))
    if is_campaign:
        seeds = ", ".join(map(str, _value(document, "campaign", "seeds", [SEED])))
        _ask(document, "campaign", "seeds", "Seeds (one run of each condition per seed)", seeds, _seeds)
    else:
        seed = _value(document, "training", "seed", SEED)
        _ask(document, "training", "seed", "Seed (-1 draws one)", seed, _at_least(-1))
    project = _value(document, "logging", "wandb_project", "")
    _ask(document, "logging", "wandb_project", "wandb project (empty: no wandb)", project, _text)
    folder = _value(document, "logging", "log_dir", "" if is_campaign else "logs/train")
    what = "Folder of the campaign (empty: logs/campaign_DATE_TIME)" if is_campaign else "Folder of the run"
    _ask(document, "logging", "log_dir", what, folder, _text)


def _value(document: tomlkit.TOMLDocument, table: str, key: str, default: Any) -> Any:
    found: Any = document.unwrap().get(table, {}).get(key, default)
    return found


def _ask(
    document: tomlkit.TOMLDocument, table: str, key: str, question: str, default: Any, read: Callable[[Any], Any]
) -> None:
    """One question; `read` converts the answer, or the default, or raises UsageError."""
    answer = click.prompt(question, default=default, value_proc=read, show_default=default != "")
    if answer == _value(document, table, key, "" if default == "" else None):
        return
    if table not in document:
        document.add(tomlkit.nl())
        document.add(table, tomlkit.table())
    holder = document[table]
    if isinstance(holder, Table):
        holder[key] = answer


def _text(answer: Any) -> str:
    return str(answer).strip()


def _at_least(minimum: int) -> Callable[[Any], int]:
    def read(answer: Any) -> int:
        try:
            number = int(answer)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise click.UsageError(f"{answer!r} is not a whole number of at least {minimum}")
        return number

    return read


def _seeds(answer: Any) -> list[int]:
    words = [word for word in re.split(r"[,\s]+", str(answer).strip(" []")) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise click.UsageError("write non-negative whole numbers, as in 42, 101, 202")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise click.UsageError("a seed is given twice")
    return seeds


def _check(plugins: Plugins, name: str, text: str) -> None:
    """ConfigError with every problem of the file to be written."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        arguments = [str(file)]
        claim = claim_of(arguments, plugins)
        if claim:
            claim.load_explain()(arguments, plugins)
        else:
            load_checked(arguments, plugins)
