"""The page about a pack that a paper can link to: one file without a script; nothing is loaded from the network.

Everything in it is untrusted text, escaped; curves are drawn as SVG.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from retrain.records.reading import Record, number
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.report.parts import Facts, Paragraph, Part, Pre, Section, Table, Tiles
from retrain.report.shell import sections_page
from retrain.text.amounts import percent, rate_interval
from retrain.tools.pack.comparison import parsed, verdict_lines

CURVES = (
    ("eval_correct_rate", "Held-out examples, share correct"),
    ("correct_rate", "Training, share correct"),
    ("mean_reward", "Training, mean reward"),
    ("loss", "Loss"),
)
MOST_CURVES, MOST_POINTS = 24, 300
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 220, 52, 12, 10, 28
Runs = Sequence[tuple[Mapping[str, Any], list[Record]]]


def page_of(manifest: Mapping[str, Any], members: Mapping[str, bytes], file_name: str) -> str:
    runs = [(run, list(parsed(members[f"{run['place']}/{METRICS}"]))) for run in manifest["runs"]]
    packages = [(name, each["version"], each["digest"]) for name, each in manifest["packages"].items()]
    config = members[CONFIG_FILE].decode("utf-8", "replace")
    sections = [
        Section("ran", "What ran", [_facts(manifest, members)]),
        Section("results", "What came out", _results(manifest, runs)),
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


def _results(manifest: Mapping[str, Any], runs: Runs) -> list[Part]:
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
    return parts


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

    placed = [Curve(each.label, [(x_of(x), y_of(y)) for x, y in _thinned(each.points)]) for each in curves]
    marks = [(y_of(y), f"{y:g}") for y in ticks]
    return Curves(title, placed, marks, first=f"{x_low:g}", last=f"{x_high:g}")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = math.ceil(len(points) / MOST_POINTS)
    return [*points[::stride], *([points[-1]] if (len(points) - 1) % stride else [])]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers that span the values."""
    span = max(high - low, 1e-6 * max(abs(low), abs(high)), 1e-9)
    size = 10.0 ** math.floor(math.log10(span / 3))
    step = next(size * each for each in (1, 2, 2.5, 5, 10) if span / (size * each) <= 4.0)
    first, last = math.floor(low / step), max(math.ceil(high / step), math.floor(low / step) + 1)
    return [float(f"{step * number:.9g}") for number in range(first, last + 1)]


def _again(manifest: Mapping[str, Any], file_name: str) -> list[Part]:
    margin = manifest["equivalence"]
    rule = "Bit-identical on the same machine and versions"
    if margin is not None:
        rule += f"; else equivalent if the final held-out rate is shown to be within {100 * margin:g} points"
    rule += ". The first difference is named with its cause."
    lines = f"pip install retrain-core=={manifest['retrain']} retrain-local\nretrain rerun {file_name}"
    return [Pre(lines), Paragraph([f"{rule} It lists what it would run and install, and asks."])]


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
