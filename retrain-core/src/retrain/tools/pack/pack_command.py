"""`retrain pack RUN -o FILE`: one file for others to rerun, and a page about it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.command_options import html_option, json_option
from retrain.text.terminal_text import printable, program
from retrain.tools.pack.archive import write_pack
from retrain.tools.pack.gather import gather

SUFFIX = ".rtpack"
EPILOG = """\b
Examples:
  retrain pack logs/train -o train.rtpack
  retrain pack logs/train -o train.rtpack --equivalence 0.02
  retrain pack logs/campaign_20260301_120000 -o campaign.rtpack --html campaign.html

\b
Exit codes: 0 done; 2 usage error, a run that cannot be repeated, or a secret in what would be packed.
"""


@click.command("pack", epilog=EPILOG)
@click.argument("folder", metavar="RUN|CAMPAIGN", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="The file; by default the folder's name.rtpack.")
@html_option("Also write one offline page about it.")
@click.option(
    "--equivalence",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    metavar="MARGIN",
    help="A rerun that is not identical is equivalent if its final held-out rate is within this margin.",
)
@click.option("--limit-mb", type=click.FloatRange(0.0), default=16.0, help="Largest data file packed; by default 16.")
@click.option("--hide-secrets", is_flag=True, help="Pack code and data that hold a secret, without it.")
@json_option()
def command(
    folder: Path,
    out: Path | None,
    html: Path | None,
    equivalence: float | None,
    limit_mb: float,
    hide_secrets: bool,
    as_json: bool,
) -> None:
    """Write one file with all that a finished RUN or CAMPAIGN was made of, for `retrain rerun`: configuration, code,
    small data, plugins as wheels, versions, and what each step recorded. It holds no secret."""
    file = out or Path(f"{folder.resolve().name}{SUFFIX}")
    for each in filter(None, (file, html)):
        if each.exists():
            fix = "give another name, or remove it"
            raise ConfigError(Problem(where=printable(str(each)), what="is there already", fix=fix))
    found = gather(folder, most_bytes=int(limit_mb * 2**20), margin=equivalence, hide_secrets=hide_secrets)
    try:
        write_pack(file, found.manifest, found.members)
        if html:
            from retrain.tools.pack.page import page_of

            html.write_text(page_of(found.manifest, found.members, file.name), encoding="utf-8")
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror or error}", "free space, or give another folder with -o"
        raise ConfigError(Problem(where=printable(str(error.filename or file)), what=what, fix=fix)) from error
    manifest = found.manifest
    if as_json:
        told = {"file": str(file), "bytes": file.stat().st_size, "page": str(html) if html else None}
        kept = {name: manifest[name] for name in ("kind", "runs", "left_out", "hidden", "equivalence")}
        click.echo(json.dumps({**told, **kept, "notes": found.notes}, indent=2))
        return
    steps, count = sum(run["steps"] for run in manifest["runs"]), len(manifest["runs"])
    what = f"{count} runs, {steps} steps" if manifest["kind"] == "campaign" else f"{steps} steps"
    click.echo(f"Packed {what} into {printable(str(file))} ({file.stat().st_size / 2**20:.1f} MiB)")
    click.echo(f"  inputs: {len(manifest['placed'])} files; plugins: {len(manifest['wheels'])} wheels")
    for each in manifest["left_out"]:
        what = f"{printable(each['name'])} ({each['size']} bytes)"
        click.echo(f"  left out, by hash alone: {what}; where the rerun does not find it, it needs --data")
    for name in manifest["hidden"]:
        click.echo(f"  packed without its secrets: {printable(name)}; a rerun says that it differs")
    for note in found.notes:
        click.echo(f"  note: {note}")
    if html:
        click.echo(f"  page: {printable(str(html))}")
    click.echo(f"Next: {program()} rerun {shlex.quote(printable(str(file)))}")
