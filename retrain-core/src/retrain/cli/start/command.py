"""`retrain init`: writes a starting configuration, never over an existing file."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from retrain.cli.start.templates import DEFAULT_FILE, refuse_existing, template_text
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import json_option
from retrain.text.process import is_interactive
from retrain.text.tables import table_lines
from retrain.text.terminal_text import printable, program

DEFAULT_TEMPLATE = "default"
SCHEMA_FILE = "retrain.schema.json"
EPILOG = """\b
Examples:
  retrain init --model builtin:tiny --data tasks.jsonl --reward match    your own data
  retrain init --model Qwen/Qwen3-0.6B --data gsm8k --reward math        a data set by name
  retrain init --data reasoning_gym:chain_sum                            a source with its own verifier
  retrain init --interactive                                             questions for these instead
  retrain init --list                                                    list the templates
  retrain init --template tiny                                           a run that trains on a CPU in a minute
  retrain init -t experiment -o exp.toml                                 choose another file name

\b
Exit codes: 0 written; 1 the reward failed its audit on this data; 2 usage error, unusable data, or the file exists.
"""


@click.command("init", epilog=EPILOG)
@click.option("--template", "-t", metavar="NAME", help=f"Which template (see --list). Default: {DEFAULT_TEMPLATE}.")
@click.option(
    "--interactive", "-i", "is_dialog", is_flag=True, help="Ask for model, data and reward; needs a terminal."
)
@click.option("--model", default="", metavar="MODEL", help="Model to train: a hub id, a folder, or builtin:tiny.")
@click.option(
    "--data", default="", metavar="DATA", help="A file, a folder, a hub id (openai/gsm8k) or a source's name."
)
@click.option(
    "--reward", default="", metavar="NAME", help="Reward: match, math, ..., or my_reward.py. Default: by data."
)
@click.option("--prompt-key", default="", metavar="COLUMN", help="Column of the prompt, if its name is unusual.")
@click.option("--answer-key", default="", metavar="COLUMN", help="Column of the answer, if its name is unusual.")
@click.option("--subset", default="", metavar="NAME", help="Subset (configuration) of a data set.")
@click.option("--split", default="", metavar="NAME", help="Split of a data set. Default: train.")
@click.option("--revision", default="", metavar="NAME", help="Branch, tag or commit of a hub data set.")
@click.option("--max-steps", "steps", default=0, type=click.IntRange(0), help="Training steps. Default: by model.")
@click.option("--log-dir", default="", metavar="FOLDER", help="Folder of the run. Default: logs/ and the data's name.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write, instead of the template's own.")
@click.option("--list", "-l", "as_list", is_flag=True, help="List the templates and exit.")
@json_option("As JSON: the list, or the result.")
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    template: str | None,
    is_dialog: bool,
    output: Path | None,
    as_list: bool,
    as_json: bool,
    **wished: Any,
) -> None:
    """Write a starting configuration into this folder: from a template, or for a model, data and a reward.

    With --data it looks at the data first: which columns hold prompt and answer, how the model will see three of the
    prompts, the verifier's reading of a perfect answer. Nothing is written if the reward fails on them. A model that
    is on this machine is measured for some seconds, and the sizes of the run are fitted to its speed.
    """
    if as_list:
        templates = plugins.registered(Kind.TEMPLATE)
        rows = [{"name": e.spec.name, "summary": e.spec.summary, "distribution": str(e.owner)} for e in templates]
        lines = table_lines(
            ("", ""), [(row["name"], f"{row['summary']} ({row['distribution']})") for row in rows], num_names=2
        )
        click.echo(json.dumps(rows, indent=2) if as_json else "\n".join(lines[1:]))
        return
    if is_dialog and as_json:
        raise click.UsageError("--interactive and --json exclude each other")
    if template and any(wished.values()):
        raise click.UsageError("--template and the flags about your own data exclude each other")
    if any(wished.values()) and not (wished["data"] or is_dialog):
        raise click.UsageError("name the data too: --data FILE, or --interactive for questions")
    if is_dialog and not is_interactive():
        what = "there is no terminal for the questions"
        fix = "use `retrain init --template NAME`; `retrain init --list` shows the names. Or --model, --data, --reward"
        raise ConfigError(Problem(code="init.no-terminal", where="--interactive", what=what, fix=fix))
    told: dict[str, Any] = {}
    if template is None and (is_dialog or wished["data"]):
        file = output or Path(DEFAULT_FILE)
        text, told = _own(plugins, file, wished, is_dialog=is_dialog, as_json=as_json)
        template = "your data"
    elif is_dialog:
        # Imported here, because it loads tomlkit and the loader.
        from retrain.cli.start.dialog import ask

        template, file, text = ask(plugins, str(template), output)
    else:
        template = template or DEFAULT_TEMPLATE
        file, text = template_text(plugins, template, output)
        refuse_existing(file)
    _write_with_schema(plugins, file, text)
    words = [] if str(file) == DEFAULT_FILE else [shlex.quote(str(file))]
    following = [" ".join([program(), *verb, *words]) for verb in (["explain"], [])]
    if as_json:
        click.echo(json.dumps({"file": str(file), "template": template, "next": following, **told}, indent=2))
        return
    if is_dialog or told:
        click.echo(f"\n{text.rstrip()}\n")
    click.echo("\n  ".join([f"Wrote {file} ({template}). Next:", *following]))


def _own(
    plugins: Plugins, file: Path, wished: Mapping[str, Any], *, is_dialog: bool, as_json: bool
) -> tuple[str, dict[str, Any]]:
    """The text for the user's own data, and its description for `--json`; shows the data unless `as_json`."""
    from retrain.cli.start.first_run import fit_to_machine  # these import the loader, and whatever reads the data
    from retrain.cli.start.own_data import Wishes, choose_data
    from retrain.cli.start.trial import check_text, show_trial, try_out
    from retrain.cli.start.written import configuration_text

    refuse_existing(file)
    wishes = Wishes(**wished)
    if is_dialog:
        from retrain.cli.start.dialog import ask_wishes

        wishes, choice = ask_wishes(plugins, wishes)
    else:
        choice = choose_data(wishes, plugins)
        wishes = replace(wishes, reward=wishes.reward or choice.reward)
    trial = try_out(configuration_text(wishes, choice, plugins), file.name, plugins)
    text = configuration_text(wishes, choice, plugins, examples=trial.examples)
    config = check_text(text, file.name, plugins)
    if not as_json:
        show_trial(choice, trial)
        click.echo("\nMeasuring how fast this machine is ...", err=True)
    fitted = fit_to_machine(text, config, trial.prompts, keep_steps=bool(wishes.steps))
    text = configuration_text(wishes, choice, plugins, examples=trial.examples, sizes=fitted.values, time=fitted.text)
    check_text(text, file.name, plugins)
    if not as_json:
        click.echo(f"Time: {printable(fitted.text)}")
    return text, trial.as_data(choice) | {"time": fitted.as_data()}


def _write_with_schema(plugins: Plugins, file: Path, text: str) -> None:
    """Write the file, and next to it the JSON Schema that its first line names, so that editors complete its keys."""
    # Imported here: completion of `init` must not load pydantic.
    from retrain.cli.manual.json_schema import schema_text

    schema = file.with_name(SCHEMA_FILE)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(f"#:schema ./{SCHEMA_FILE}\n{text}")
        schema.write_text(schema_text(plugins), encoding="utf-8")
    # Another process may have created it since it was looked for.
    except FileExistsError:
        refuse_existing(file)
        raise
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror}", "change folder, or name another file with --output FILE"
        where = str(error.filename or file)
        raise ConfigError(Problem(code="init.unwritable", where=where, what=what, fix=fix)) from None
