"""`retrain pack RUN -o FILE`: one file for others to rerun, and a page about it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.reading import Record, number
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.report.parts import Facts, Paragraph, Part, Pre, Section, Table, Tiles
from retrain.report.shell import sections_page
from retrain.text.amounts import percent, rate_interval
from retrain.text.command_options import html_option, json_option
from retrain.text.terminal_text import printable, program
from retrain.tools.pack.archive import write_pack
from retrain.tools.pack.comparison import parsed, verdict_lines
from retrain.tools.pack.gather import gather

CURVES = (
    ("eval_correct_rate", "Held-out examples, share correct"),
    ("correct_rate", "Training, share correct"),
    ("mean_reward", "Training, mean reward"),
    ("loss", "Loss"),
)
MOST_CURVES, MOST_POINTS = 24, 300
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 220, 52, 12, 10, 28
Runs = Sequence[tuple[Mapping[str, Any], list[Record]]]
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
    small data, plugins as wheels, versions, and the records of each step. It holds no secret."""
    file = out or Path(f"{folder.resolve().name}{SUFFIX}")
    for each in filter(None, (file, html)):
        if each.exists():
            what, fix = "exists already", "give another name, or remove it"
            raise ConfigError(Problem(code="pack.file-exists", where=printable(str(each)), what=what, fix=fix))
    found = gather(folder, most_bytes=int(limit_mb * 2**20), margin=equivalence, hide_secrets=hide_secrets)
    try:
        write_pack(file, found.manifest, found.members)
        if html:
            html.write_text(page_of(found.manifest, found.members, file.name), encoding="utf-8")
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror or error}", "free space, or give another folder with -o"
        where = printable(str(error.filename or file))
        raise ConfigError(Problem(code="pack.unwritable", where=where, what=what, fix=fix)) from error
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
        click.echo(f"  left out, only its hash is packed: {what}; where the rerun does not find it, it needs --data")
    for name in manifest["hidden"]:
        click.echo(f"  packed without its secrets: {printable(name)}; a rerun says that it differs")
    for note in found.notes:
        click.echo(f"  note: {note}")
    if html:
        click.echo(f"  page: {printable(str(html))}")
    click.echo(f"Next: {program()} rerun {shlex.quote(printable(str(file)))}")


# The page about a pack that a paper can link to: one file without a script, drawn as SVG; nothing is loaded from the
# network. Everything in it is untrusted text, escaped.


def page_of(manifest: Mapping[str, Any], members: Mapping[str, bytes], file_name: str) -> str:
    runs = [(run, list(parsed(members[f"{run['place']}/{METRICS}"]))) for run in manifest["runs"]]
    packages = [(name, each["version"], each["digest"]) for name, each in manifest["packages"].items()]
    config = members[CONFIG_FILE].decode("utf-8", "replace")
    rows = []
    for run, lines in runs:
        held_out = [line for line in lines if number(line.get("eval_correct_rate")) is not None]
        first, last = (_rate(held_out[0]), _rate(held_out[-1])) if held_out else ("not evaluated", "")
        name = run["name"] or manifest["name"]
        rows.append((name, run["condition"], str(run["seed"]), str(run["steps"]), first, last, run["digest"][:16]))
    heads = ("run", "condition", "seed", "steps", "held out, first", "held out, last", "digest of its lines")
    parts: list[Part] = [_table("Results", heads, rows)]
    if told := verdict_lines(manifest["verdict"] or {}):
        standing = f"The verdict is {manifest['verdict'].get('standing', 'none')}."
        parts += [Paragraph([line]) for line in (standing, *told)]
    sections = [
        Section("ran", "What ran", [_facts(manifest, members)]),
        Section("results", "What came out", parts),
        Section("curves", "Curves", _curves(runs)),
        Section("again", "Run it again", _again(manifest, file_name)),
        Section("inputs", "What it was made of", [_hashes(manifest)]),
        Section("packages", "Packages", [_table("Packages", ("package", "version", "files"), packages)]),
        Section("configuration", "Configuration", [Pre(config, 200_000)]),
    ]
    return sections_page("retrain pack", manifest["name"], sections)


def _facts(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> Facts:
    record: Record = json.loads(members[f"{manifest['runs'][0]['place']}/{RUN_FILE}"])
    hardware, config = manifest["hardware"], record.get("config") or {}
    data, training = config.get("data") or {}, config.get("training") or {}
    threads = ", ".join(f"{name} {value}" for name, value in (hardware.get("threads") or {}).items())
    git = record.get("git") or {}
    dirty = ", with uncommitted changes" if git.get("dirty") else ""
    seeds = ", ".join(dict.fromkeys(str(run["seed"]) for run in manifest["runs"]))
    rows = {
        "conditions": ", ".join(dict.fromkeys(run["condition"] for run in manifest["runs"])),
        "seeds": seeds,
        "model": f"{manifest['model']['name']} ({manifest['model']['num_files']} files, {manifest['model']['digest']})",
        "data": " ".join(str(data.get(name) or "") for name in ("source", "path")),
        "size of a step": f"{training.get('batch_size')} prompts x {training.get('group_size')} completions",
        "began": str(record.get("started", "")),
        "Python": manifest["python"],
        "machine": f"{hardware.get('system')} {hardware.get('machine')}, {hardware.get('cpu')}, "
        f"{hardware.get('cores')} cores{', ' if threads else ''}{threads}",
        "devices": str((record.get("devices") or {}).get("used", "")),
        "commit of the folder": f"{git.get('commit', '')}{dirty}" if git else "no repository",
    }
    return Facts([(name, str(value)) for name, value in rows.items()])


def _rate(line: Record) -> str:
    interval = rate_interval(number(line.get("eval_ci_low")), number(line.get("eval_ci_high")))
    return f"{percent(line['eval_correct_rate'])} {interval}".rstrip()


def _curves(runs: Runs) -> list[Part]:
    figures = []
    for name, title in CURVES:
        curves = []
        for run, lines in runs[:MOST_CURVES]:
            points = [(line["step"] + 1, value) for line in lines if (value := number(line.get(name))) is not None]
            curves += [Curve(f"{run['condition']}, seed {run['seed']}", points)] if points else []
        if any(len(curve.points) > 1 for curve in curves):
            figures.append(drawn_curves(title, curves))
    if not figures:
        return [Paragraph(["Too few steps to draw."])]
    more = f"The first {MOST_CURVES} of {len(runs)} runs are drawn."
    return [Tiles("plots", figures), *([Paragraph([more])] if len(runs) > MOST_CURVES else [])]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: its name, and points (step, value)."""

    label: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Curves(Part):
    """Curves in the coordinates of the drawing; `ticks` have their height and label."""

    template: ClassVar[str] = "tools/pack/curves.html.jinja"
    width: ClassVar[int] = WIDTH
    height: ClassVar[int] = HEIGHT
    left: ClassVar[int] = LEFT
    right: ClassVar[int] = WIDTH - RIGHT

    title: str
    curves: Sequence[Curve]
    ticks: Sequence[tuple[float, str]]
    first: str
    last: str


def drawn_curves(title: str, curves: Sequence[Curve]) -> Curves:
    """Return the curves as a figure; at least one has a point."""
    xs = [x for curve in curves for x, _ in curve.points]
    ys = [y for curve in curves for _, y in curve.points]
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1)
    ticks = _ticks(min(ys), max(ys))
    low, high = min(*ys, ticks[0]), max(*ys, ticks[-1])

    def x_of(x: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / (x_high - x_low), 1)

    def y_of(y: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low), 1)

    placed = []
    for each in curves:
        stride = math.ceil(len(each.points) / MOST_POINTS)
        kept = [*each.points[:-1:stride], each.points[-1]]
        placed.append(Curve(each.label, [(x_of(x), y_of(y)) for x, y in kept]))
    marks = [(y_of(y), f"{y:g}") for y in ticks]
    return Curves(title, placed, marks, first=f"{x_low:g}", last=f"{x_high:g}")


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers that span the values."""
    # A flat curve has no span, and one of far less than its height would have ticks that print alike.
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-9)
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * each for each in (1, 2, 2.5, 5, 10) if span / (size * each) <= 4.0)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [float(f"{step * number:.9g}") for number in range(first, last + 1)]


def _again(manifest: Mapping[str, Any], file_name: str) -> list[Part]:
    margin = manifest["equivalence"]
    rule = "Bit-identical on the same machine and versions"
    if margin is not None:
        rule += f"; otherwise equivalent if the final held-out rate is shown to be within {100 * margin:g} points"
    rule += ". The first difference is named with its cause."
    lines = f"pip install retrain-core=={manifest['retrain']} retrain-local\nretrain rerun {file_name}"
    return [Pre(lines), Paragraph([f"{rule} It lists its actions, and waits for your consent."])]


def _hashes(manifest: Mapping[str, Any]) -> Table:
    rows = [
        (each["kind"], each["name"], f"{each['size']} bytes", each["hash"], how)
        for listed, how in (("placed", "packed"), ("left_out", "by hash"))
        for each in manifest[listed]
    ]
    wheels = manifest["wheels"].items()
    rows += [("plugin", name, each["version"], each["sha256"], "packed") for name, each in wheels]
    return _table("Inputs", ("kind", "name", "size or version", "hash (BLAKE2b; wheels SHA-256)", ""), rows)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return Table(caption, heads, rows, num_names=len(heads), is_caption_shown=False)
