"""The questions of `retrain init --interactive`, one for each of its flags."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.items import Table

from retrain.cli.start.own_data import FILES, HUB, TABULAR, DataChoice, Wishes, choose_data, folder_of
from retrain.cli.start.templates import refuse_existing, template_text
from retrain.cli.start.written import BUILTIN, advised, put_aside, templates_for
from retrain.kernel.declared import Kind
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.run.configure import claim_of, load_checked
from retrain.text.terminal_text import harmless_lines

GREETING = "Enter keeps the value in brackets; Ctrl-C quits without writing anything.\n"
SEED = 42
UNNAMED = "default"  # the verifier that the data brings, or the default reward


def ask_wishes(plugins: Plugins, wishes: Wishes) -> tuple[Wishes, DataChoice]:
    """Ask on the terminal for everything that the flags left open, and again for data that cannot be read."""
    click.echo(GREETING)
    if not wishes.model:
        builtin = next((str(each.unwrap()["model"]["model"]) for each in templates_for(BUILTIN, plugins)), None)
        wishes = replace(wishes, model=_prompt("Model (hub id or folder)", builtin))
    choice = None if not wishes.data else choose_data(wishes, plugins)
    if choice is None:
        names = ", ".join(e.spec.name for e in plugins.registered(Kind.DATA_SOURCE) if e.spec.name not in (FILES, HUB))
        click.echo(f"Data: a file, a folder, the id of a hub data set (openai/gsm8k), or one of: {names}")
        wishes, choice = _data(plugins, wishes)
    if not wishes.reward:
        names = ", ".join(entry.spec.name for entry in plugins.registered(Kind.REWARD))

        def read(answer: Any) -> str:
            name = str(answer).strip()
            if name != UNNAMED and "." not in name and not plugins.find(Kind.REWARD, name.partition(":")[0]):
                raise click.UsageError(f"{name!r} is not the name of a reward")
            return name

        asked = _prompt(f"Reward ({names}, or my_reward.py)", choice.reward or UNNAMED, read)
        wishes = replace(wishes, reward="" if asked == UNNAMED else asked)
    if not wishes.steps:
        usual = int(advised(wishes.model, plugins)["training"]["max_steps"].value)
        steps = click.prompt("Training steps", type=click.IntRange(1), default=usual)
        # 0 leaves the number to `fit`: only steps that the user wanted otherwise are kept on a slow machine.
        wishes = replace(wishes, steps=0 if steps == usual else steps)
    if not wishes.log_dir:
        wishes = replace(wishes, log_dir=_prompt("Folder of the run", folder_of(wishes)))
    click.echo()
    return wishes, choice


def _data(plugins: Plugins, wishes: Wishes) -> tuple[Wishes, DataChoice]:
    """Suggest the only data file of this folder, otherwise the data of the template for the model."""
    files = [entry.name for entry in Path().iterdir() if entry.suffix.lower() in TABULAR and entry.is_file()]
    suggested = [name for name in files if not name.endswith(".schema.json")]
    if len(suggested) != 1:
        templates = [template.unwrap() for template in templates_for(wishes.model, plugins)]
        suggested = [str(each["data"]["source"]) for each in templates if "source" in each.get("data", {})]
    while True:
        wished = replace(wishes, data=wishes.data or _prompt("Data", next(iter(suggested), None)))
        try:
            return wished, choose_data(wished, plugins)
        except RetrainError as error:
            click.echo(harmless_lines(str(error)))
            if "data.prompt-column-unclear" in error.codes:
                wishes = replace(wished, prompt_key=_prompt("Column of the prompt", None))
            elif "data.answer-column-unclear" in error.codes:
                wishes = replace(wished, answer_key=_prompt("Column of the answer", None))
            else:
                wishes = replace(wished, data="")


def _prompt(question: str, default: str | None, read: Callable[[Any], str] | None = None) -> str:
    answer: str = click.prompt(question, default=default, value_proc=read or _text)
    return answer


def ask(plugins: Plugins, template: str, output: Path | None) -> tuple[str, Path, str]:
    """Ask on the terminal; returns template, file and the checked text.

    ConfigError when the file exists already, raised before any question, and when the answers make no valid
    configuration.
    """
    file, text = template_text(plugins, template, output)
    refuse_existing(file)
    click.echo(GREETING)
    document = tomlkit.parse(text)
    _ask_values(document)
    text = tomlkit.dumps(document)
    with put_aside(text, file.name) as written:
        if claim := claim_of([str(written)], plugins):
            claim.load_explain()([str(written)], plugins)
        else:
            load_checked([str(written)], plugins)
    return template, file, text


def _ask_values(document: tomlkit.TOMLDocument) -> None:
    """Apply the answers to the document, keeping comments and layout."""
    plain = document.unwrap()

    def ask_for(table: str, key: str, question: str, default: Any, read: Callable[[Any], Any] = _text) -> None:
        given = plain.get(table, {}).get(key)
        shown = default if given is None else ", ".join(map(str, given)) if isinstance(given, list) else given
        answer = click.prompt(question, default=shown, value_proc=read, show_default=shown != "")
        if answer == given or (given is None and answer == ""):
            return
        if table not in document:
            document.add(tomlkit.nl())
            document.add(table, tomlkit.table())
        holder = document[table]
        if isinstance(holder, Table):
            holder[key] = answer

    # A template for a built-in model has sizes and a learning rate for that one.
    if not str(plain.get("model", {}).get("model", "")).startswith(BUILTIN):
        ask_for("model", "model", "Model (hub id or folder)", "")
    if "campaign" in plain:
        ask_for("campaign", "max_steps", "Training steps", 100, click.IntRange(1))
        ask_for("campaign", "seeds", "Seeds (one run of each condition per seed)", str(SEED), _seeds)
        folder = ("Folder of the campaign (empty: logs/campaign_DATE_TIME)", "")
    else:
        ask_for("training", "max_steps", "Training steps", 100, click.IntRange(1))
        ask_for("training", "seed", "Seed (-1 draws one)", SEED, click.IntRange(-1))
        folder = ("Folder of the run", "logs/train")
    ask_for("logging", "wandb_project", "wandb project (empty: no wandb)", "")
    ask_for("logging", "log_dir", *folder)


def _text(answer: Any) -> str:
    return str(answer).strip()


def _seeds(answer: Any) -> list[int]:
    words = [word for word in re.split(r"[,\s]+", str(answer).strip(" []")) if word]
    if not words or not all(word.isdecimal() for word in words):
        raise click.UsageError("write non-negative whole numbers, as in 42, 101, 202")
    seeds = [int(word) for word in words]
    if len(set(seeds)) < len(seeds):
        raise click.UsageError("a seed is given twice")
    return seeds
