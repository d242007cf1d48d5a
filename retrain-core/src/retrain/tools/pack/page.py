"""The page about a pack that a paper can link to: one file, nothing loaded from elsewhere, all of it untrusted text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.kernel.contracts.report import ReportPlot
from retrain.records.reading import Record, number
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.report.parts import Facts, Paragraph, Part, Pre, Section, Table, Tiles, drawn
from retrain.report.shell import sections_page
from retrain.text.amounts import percent, rate_interval
from retrain.tools.pack.verdict import parsed, verdict_lines

CURVES = (
    ("eval_correct_rate", "Held-out examples, share correct"),
    ("correct_rate", "Training, share correct"),
    ("mean_reward", "Training, mean reward"),
    ("loss", "Loss"),
)
MOST_CURVES = 24
Runs = Sequence[tuple[Mapping[str, Any], list[Record]]]


def page_of(manifest: Mapping[str, Any], members: Mapping[str, bytes], file_name: str) -> str:
    """The page about a pack in a file of this name, from what was written into it."""
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
    """The results of the first runs over steps, where one of them has more than one."""
    plots = []
    for name, title in CURVES:
        curves = {
            f"{run['condition']}, seed {run['seed']}": {line["step"] + 1: number(line.get(name)) for line in lines}
            for run, lines in runs[:MOST_CURVES]
        }
        known = {label: ys for label, ys in curves.items() if any(y is not None for y in ys.values())}
        steps = sorted({step for ys in known.values() for step, y in ys.items() if y is not None})
        if len(steps) > 1:
            lines = {label: [ys.get(step) for step in steps] for label, ys in known.items()}
            plots.append(drawn(ReportPlot(title=title, x=steps, lines=lines, x_title="steps")))
    if not plots:
        return [Paragraph(["Too few steps to draw."])]
    more = f"The first {MOST_CURVES} of {len(runs)} runs are drawn."
    return [Tiles("plots", plots), *([Paragraph([more])] if len(runs) > MOST_CURVES else [])]


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
