"""The questions of `retrain init --interactive`: what its flags answer, and nothing else."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import tomlkit
from tomlkit.items import Table

from retrain.cli.start.own_data import FILES, HUB, TABULAR, DataChoice, Wishes, choose_data, folder_of
from retrain.cli.start.templates import refuse_existing, template_text
from retrain.cli.start.written import BUILTIN, steps_advised, templates_for
from retrain.kernel.declared import Kind
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.run.configure import claim_of, load_checked
from retrain.text.terminal_text import printable

UNNAMED = "default"  # the verifier that the data brings, else the default reward


def ask_wishes(plugins: Plugins, wishes: Wishes) -> tuple[Wishes, DataChoice]:
    """Ask on the terminal for what the flags left open; data that cannot be read is asked for again."""
    click.echo("Enter keeps the value in brackets; Ctrl-C quits without writing anything.\n")
    if not wishes.model:
        model = _prompt("Model (hub id or folder)", _first_builtin(plugins))
        wishes = replace(wishes, model=model)
    choice = None if not wishes.data else choose_data(wishes, plugins)
    if choice is None:
        names = ", ".join(e.spec.name for e in plugins.registered(Kind.DATA_SOURCE) if e.spec.name not in (FILES, HUB))
        click.echo(f"Data: a file, a folder, the id of a hub data set (openai/gsm8k), or one of: {names}")
        wishes, choice = _data(plugins, wishes)
    if not wishes.reward:
        names = ", ".join(entry.spec.name for entry in plugins.registered(Kind.REWARD))
        asked = _prompt(f"Reward ({names}, or my_reward.py)", choice.reward or UNNAMED, _reward(plugins))
        wishes = replace(wishes, reward="" if asked == UNNAMED else asked)
    if not wishes.steps:
        usual = steps_advised(wishes.model, plugins)
        steps = click.prompt("Training steps", type=click.IntRange(1), default=usual)
        wishes = replace(wishes, steps=0 if steps == usual else steps)  # the usual ones are fitted to the machine
    if not wishes.log_dir:
        wishes = replace(wishes, log_dir=_prompt("Folder of the run", folder_of(wishes)))
    click.echo()
    return wishes, choice


def _data(plugins: Plugins, wishes: Wishes) -> tuple[Wishes, DataChoice]:
    while True:
        wished = replace(wishes, data=wishes.data or _prompt("Data", _nearest_data(plugins, wishes.model)))
        try:
            return wished, choose_data(wished, plugins)
        except RetrainError as error:
            click.echo("\n".join(map(printable, str(error).split("\n"))))
            wishes = _named_columns(wished, str(error))


def _nearest_data(plugins: Plugins, model: str) -> str | None:
    """The only data file of this folder, else what the template for the model trains on."""
    files = sorted(entry.name for entry in Path().iterdir() if entry.suffix.lower() in TABULAR and entry.is_file())
    files = [name for name in files if not name.endswith(".schema.json")]
    if len(files) == 1:
        return files[0]
    templates = [template.unwrap() for template in templates_for(model, plugins)]
    return next((str(each["data"]["source"]) for each in templates if "source" in each.get("data", {})), None)


def _named_columns(wishes: Wishes, told: str) -> Wishes:
    """With the column that the rows did not decide; without the data where something else is wrong with it."""
    if "name it: --prompt-key" in told:
        return replace(wishes, prompt_key=_prompt("Column of the prompt", None))
    if "name it: --answer-key" in told:
        return replace(wishes, answer_key=_prompt("Column of the answer", None))
    return replace(wishes, data="")


def _reward(plugins: Plugins) -> Callable[[Any], str]:
    def read(answer: Any) -> str:
        name = str(answer).strip()
        if name != UNNAMED and "." not in name and not plugins.find(Kind.REWARD, name.partition(":")[0]):
            raise click.UsageError(f"{name!r} is not the name of a reward")
        return name

    return read


def _prompt(question: str, default: str | None, read: Callable[[Any], str] = lambda answer: str(answer).strip()) -> str:
    answer: str = click.prompt(question, default=default, value_proc=read)
    return answer


def _first_builtin(plugins: Plugins) -> str | None:
    """The model that comes with an installed distribution, if one does; nothing has to be downloaded for it."""
    return next((str(each.unwrap()["model"]["model"]) for each in templates_for(BUILTIN, plugins)), None)


# The questions of `retrain init --interactive --template NAME`: the values that users change most.


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
