"""`retrain rerun FILE`: lists the actions of a pack, gets consent, runs it and compares."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import click

from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.records.identity.copies import FOLDER
from retrain.text.amounts import first_few
from retrain.text.command_options import json_option, quiet_option, set_option
from retrain.text.process import is_interactive
from retrain.text.terminal_text import printable
from retrain.tools.pack.archive import Contents, is_importable, open_pack, read_contents
from retrain.tools.pack.comparison import verdict_lines
from retrain.tools.pack.environment import chosen_files, environ_of, forced, lay_out, make_environment
from retrain.tools.pack.inputs import texts_of
from retrain.tools.pack.rerunning import Outcome, Rerun
from retrain.tools.pack.wheels import CheckedWheel, check_wheels, digests_in
from retrain.verdicts.ledger.history import read_history

RESULT = "rerun.json"
MOST_TEXT = 120
# A value may name a function that a run imports: `my_rewards.score`.
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*[.:][A-Za-z_]\w*")
_URL = re.compile(r"[A-Za-z][\w+.-]*://[^\s\"'<>]+")
EPILOG = """\b
Examples:
  retrain rerun train.rtpack
  retrain rerun train.rtpack --yes --into again
  retrain rerun train.rtpack --here             in this environment: nothing is installed
  retrain rerun train.rtpack --data big.jsonl=/data/big.jsonl

\b
Exit codes: 0 identical, or equivalent by the test that the pack declares; 1 different, or the run failed;
            2 usage error, not agreed, or no pack that can be trusted.
"""


@click.command("rerun", epilog=EPILOG)
@click.argument("file", metavar="PACK", type=click.Path(path_type=Path))
@click.option("--yes", is_flag=True, help="Run and install the listed things without asking.")
@click.option("--trust", multiple=True, metavar="SHA256", help="A wheel of retrain that is listed as UNKNOWN, by hash.")
@click.option("--other-builds", is_flag=True, help="Take packages whose files are not those that the pack lists.")
@click.option("--into", type=click.Path(path_type=Path), help="New folder of the rerun; by default NAME.rerun.")
@click.option("--here", is_flag=True, help="Use this environment instead of making one.")
@click.option(
    "--data", "data", multiple=True, metavar="NAME=PATH", help="Your path to a data file that the pack names."
)
@set_option("Change a value; the comparison names it.")
@click.option(
    "--pass", "passed", multiple=True, metavar="VARIABLE", help="Pass a secret environment variable to the run."
)
@quiet_option("Print only the outcome.")
@json_option("The outcome as JSON.")
def command(
    file: Path,
    yes: bool,
    trust: tuple[str, ...],
    other_builds: bool,
    into: Path | None,
    here: bool,
    data: tuple[str, ...],
    settings: tuple[str, ...],
    passed: tuple[str, ...],
    is_quiet: bool,
    as_json: bool,
) -> None:
    """Run a PACK again in a new environment, and compare line by line: bit-identical on the same machine and versions,
    otherwise by the test that the pack declares. The first difference is named with its cause. A pack contains its
    author's code: everything that it would run and install is listed, and nothing happens until you agree."""
    contents = read_contents(open_pack(file))
    folder = (into or Path(f"{file.stem}.rerun")).absolute()
    if folder.exists():
        what, fix = "exists already", "give another folder with --into, or remove it"
        raise ConfigError(Problem(code="rerun.folder-exists", where=printable(str(folder)), what=what, fix=fix))
    given = dict(map(_given, data))
    wheels = () if here else check_wheels(contents)
    for line in listing(contents, wheels, here=here):
        click.echo(printable(line), err=True)
    _agree(yes, wheels, trust)
    chosen = chosen_files(contents, given)

    def say(line: str) -> None:
        if not is_quiet:
            click.echo(line, err=as_json)

    unpacked, work = folder / "pack", folder / "work"
    contents.opened.unpack(unpacked)
    work.mkdir()
    lay_out(contents, unpacked, work, chosen)
    environ = environ_of(contents, passed, os.environ)
    python: Path | str = sys.executable
    if not here:
        say(f"Making the environment in {printable(str(folder / 'environment'))} ...")
        place, options = folder / "environment", {"other_builds": other_builds}
        python = make_environment(contents, wheels, unpacked, place, environ, say, **options)

    say(f"Running in {printable(str(work))}; its messages are in run.log")
    again = Rerun(
        contents=contents,
        work=work,
        python=python,
        environ=environ,
        inputs=unpacked / FOLDER,
        packages=cache(lambda: digests_in(python, contents.packages)),
        say=say,
    )
    outcome = again.outcome([part for each in settings for part in ("--set", each)])
    result = {"repeated": outcome.is_repeated, "runs": [run.as_data() for run in outcome.runs], "folder": str(folder)}
    if contents.is_campaign:
        result |= {"verdict_in_the_pack": contents.verdict, "verdict": outcome.verdict}
    (folder / RESULT).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _print(contents, outcome, unpacked / "campaign")
    if not outcome.is_repeated:
        raise SystemExit(EXIT_FAILED)


def _given(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or not Path(path).is_file():
        what, fix = f"{text!r} names no file", "give NAME=PATH, with the name that `retrain pack` printed"
        raise ConfigError(Problem(code="rerun.data-not-a-file", where="--data", what=what, fix=fix))
    return name, Path(path).absolute()


def _agree(yes: bool, wheels: Sequence[CheckedWheel], trusted: Sequence[str]) -> None:
    """Raise ConfigError unless the user agrees: to the list, and to each wheel that would replace retrain."""
    unknown = [wheel for wheel in wheels if wheel.changed and wheel.sha256 not in map(str.lower, trusted)]
    can_ask = is_interactive() and not yes
    if unknown and not can_ask:
        fix = "compare it with a source that you trust, then add --trust and its sha256; or use your own with --here"
        problems = []
        for packed in (wheel.packed for wheel in unknown):
            shown = f"{printable(packed.name)} {printable(packed.version)}"
            what = f"{shown} of the pack is not the retrain that you have, and would judge the rerun"
            problems.append(Problem(code="rerun.unknown-retrain", where="pack", what=what, fix=fix))
        raise ConfigError(*problems)
    if yes:
        return
    if not can_ask:
        what, fix = "running this needs your consent", "read the list above, then add --yes"
        raise ConfigError(Problem(code="rerun.consent-needed", where="command line", what=what, fix=fix))
    questions = [f"Install {printable(wheel.packed.name)} (UNKNOWN) in place of yours?" for wheel in unknown]
    for question in (*questions, "Run it?"):
        if not click.confirm(question, default=False, err=True):
            what, fix = "not agreed: nothing was unpacked, installed or run", "answer y once you have read the list"
            raise ConfigError(Problem(code="rerun.not-agreed", where="command line", what=what, fix=fix))


def _print(contents: Contents, outcome: Outcome, campaign: Path) -> None:
    for run in outcome.runs:
        name = f"{printable(run.run.name)}: " if run.run.name else ""
        lines = f"{run.num_same} of {len(contents.lines(run.run))} lines are the same"
        weights = ", and the weights" if run.verdict == "identical" and run.run.weights else ""
        click.echo(f"{name}{run.verdict}: {lines}{weights}")
        if run.tested is not None:
            click.echo(f"  {run.tested}")
    if contents.is_campaign and outcome.verdict is not None and contents.verdict is not None:
        same = "the same" if outcome.verdict == contents.verdict else "another"
        click.echo(f"verdict, computed again: {same}")
        for line in verdict_lines(dict(outcome.verdict)):
            click.echo(f"  {printable(line)}")
        history = read_history(campaign)
        state = f"broken: {history.faults[0]}" if history.faults else "its chain of hashes holds"
        click.echo(f"ledger of the pack: {history.num_lines} lines, {printable(state)}")


# The list of everything that a rerun would run, reach and install; names in it are untrusted.


def listing(contents: Contents, wheels: Sequence[CheckedWheel], *, here: bool) -> list[str]:
    """Return a line each: code by file and hash, programs, hosts, variables, places outside, wheels, packages."""
    runs = f"run of {contents.runs[0].steps} steps"
    runs = f"campaign of {len(contents.runs)} runs" if contents.is_campaign else runs
    rows = [f"{contents.opened.file}: {contents.name}, a {runs}, of Python {contents.python}"]
    rows.append("It would run, with your rights:")
    codes = [file for file in contents.files if file.kind == "code" or is_importable(file.place)]
    rows += [f"  code     {file.place} ({file.size} bytes, hash {file.hash})" for file in codes]
    rows += [*_from_config(contents)] + ([] if codes else ["  code     none, except its plugins"])
    if here:
        return [*rows, "  plugins  of this environment, in place of the pack's wheels; nothing is installed"]
    rows.append("It would install this and nothing else, without requirements of these:")
    rows += map(_of_wheel, wheels)
    shown = ", ".join(f"{name} {each['version']} ({each['digest'][:12]})" for name, each in contents.packages.items())
    return [*rows, f"  packages {len(contents.packages)}, as wheels from the index of your pip, by hash: {shown}"]


def _of_wheel(wheel: CheckedWheel) -> str:
    head = f"{wheel.packed.name} {wheel.packed.version}, from the pack, sha256 {wheel.sha256}"
    if not wheel.is_ours:
        return f"  plugin   {head}"
    if not wheel.changed:
        return f"  retrain  {head}: the same files as yours"
    return f"  retrain  {head}: UNKNOWN, not the files of yours: {first_few(wheel.changed)}"


def _from_config(contents: Contents) -> Iterator[str]:
    """Yield lines about values that run a program, or reach beyond the folder of the rerun."""
    tables = forced(contents.config())
    places = {str(part) for file in contents.files for part in (file.place, *PurePosixPath(file.place).parents)}
    model = str(tables.get("model", {}).get("model", ""))
    if model and not model.startswith("builtin:") and model.rstrip("/") not in places:
        yield f"  download {model[:MOST_TEXT]}, from the hub unless it is a folder (model.model)"
    for key, value in texts_of(tables):
        text, name = value[:MOST_TEXT], key.rpartition(".")[2]
        if name == "trust_remote_code":
            yield f"  code     of the model, from wherever it comes ({key} = true)"
        elif name in ("command", "argv") or name.endswith("_command"):
            yield f"  program  {text} ({key})"
        elif urls := _URL.findall(value):
            yield from (f"  connects {_host(url)} ({key})" for url in urls)
        elif name.endswith("_env"):
            yield f"  sends    the variable {text}, if you --pass it ({key})"
        elif value.startswith(("/", "~", "\\")) or ".." in PurePosixPath(value).parts:
            yield f"  outside  {text} ({key})"
        elif _DOTTED.fullmatch(value) and value not in places and key != "model.model":
            yield f"  imports  {text} ({key})"


def _host(url: str) -> str:
    try:
        return f"{urlsplit(url).scheme}://{urlsplit(url).netloc.rpartition('@')[2]}"[:MOST_TEXT]
    except ValueError:
        return url[:MOST_TEXT]
