"""The page about a pack that a paper can link to: one file, no script, nothing loaded from elsewhere.

Everything in it is untrusted text, escaped; curves are drawn as SVG.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from retrain.kernel.version import __version__
from retrain.records.reading import Record, number
from retrain.text.terminal_text import printable
from retrain.tools.pack.curves import Curve, figure
from retrain.tools.pack.equivalence import parsed
from retrain.tools.pack.verdict import verdict_lines

CURVES = (
    ("eval_correct_rate", "Held-out examples, share correct"),
    ("correct_rate", "Training, share correct"),
    ("mean_reward", "Training, mean reward"),
    ("loss", "Loss"),
)
MOST_CURVES, MOST_CHARS = 24, 400


def page_of(manifest: Mapping[str, Any], members: Mapping[str, bytes], file_name: str) -> str:
    """The page about a pack in a file of this name, from what was written into it."""
    runs = [(run, list(parsed(members[f"{run['place']}/metrics.jsonl"]))) for run in manifest["runs"]]
    style = files("retrain.tools.pack").joinpath("page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src {_hash(style)}"
    sections = [
        _section("What ran", _facts(manifest, members)),
        _section("What came out", _results(manifest, runs)),
        _section("Curves", _curves(runs)),
        _section("Run it again", _again(manifest, file_name)),
        _section("What it was made of", _hashes(manifest)),
        _section("Packages", _table(("package", "version", "files"), _packages(manifest))),
        _section("Configuration", f"<pre>{_text(members['config.toml'].decode('utf-8', 'replace'), 200_000)}</pre>"),
    ]
    title = _text(manifest["name"])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="retrain {__version__}">
<title>{title} · retrain pack</title>
<style>{style}</style>
</head>
<body>
<header><p class="kicker">retrain pack</p><h1>{title}</h1></header>
<main>
{chr(10).join(sections)}
</main>
</body>
</html>
"""


def _facts(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    record: Record = json.loads(members[f"{manifest['runs'][0]['place']}/run.json"])
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
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in rows.items())
    return f"<dl>{cells}</dl>"


def _results(manifest: Mapping[str, Any], runs: Sequence[tuple[Mapping[str, Any], list[Record]]]) -> str:
    rows = []
    for run, lines in runs:
        held_out = [line for line in lines if number(line.get("eval_correct_rate")) is not None]
        first, last = (_rate(held_out[0]), _rate(held_out[-1])) if held_out else ("not evaluated", "")
        name = run["name"] or manifest["name"]
        rows.append((name, run["condition"], str(run["seed"]), str(run["steps"]), first, last, run["digest"][:16]))
    heads = ("run", "condition", "seed", "steps", "held out, first", "held out, last", "digest of its lines")
    verdict = "".join(f"<p>{_text(line)}</p>" for line in verdict_lines(manifest["verdict"] or {}))
    standing = f"<p>The verdict is {_text(manifest['verdict'].get('standing', 'none'))}.</p>" if verdict else ""
    return _table(heads, rows) + standing + verdict


def _rate(line: Record) -> str:
    low, high = number(line.get("eval_ci_low")), number(line.get("eval_ci_high"))
    interval = f" [{100 * low:.1f}, {100 * high:.1f}]" if low is not None and high is not None else ""
    return f"{100 * line['eval_correct_rate']:.1f} %{interval}"


def _curves(runs: Sequence[tuple[Mapping[str, Any], list[Record]]]) -> str:
    figures = []
    for name, title in CURVES:
        curves = []
        for run, lines in runs[:MOST_CURVES]:
            points = [(line["step"] + 1, value) for line in lines if (value := number(line.get(name))) is not None]
            label = f"{run['condition']}, seed {run['seed']}"
            curves += [Curve(label=printable(label), points=points)] if points else []
        if any(len(curve.points) > 1 for curve in curves):
            figures.append(figure(title, curves))
    more = f"<p>The first {MOST_CURVES} of {len(runs)} runs are drawn.</p>" if len(runs) > MOST_CURVES else ""
    return f'<div class="figures">{"".join(figures)}</div>{more}' if figures else "<p>Too few steps to draw.</p>"


def _again(manifest: Mapping[str, Any], file_name: str) -> str:
    margin = manifest["equivalence"]
    rule = "Bit-identical on the same machine and versions"
    if margin is not None:
        rule += f"; else equivalent if the final held-out rate is shown to be within {100 * margin:g} points"
    rule += ". The first difference is named with its cause."
    lines = f"pip install retrain-core=={manifest['retrain']} retrain-local\nretrain rerun {file_name}"
    return f"<pre>{_text(lines)}</pre><p>{_text(rule)} It lists what it would run and install, and asks.</p>"


def _hashes(manifest: Mapping[str, Any]) -> str:
    rows = [
        (each["kind"], each["name"], f"{each['size']} bytes", each["hash"], how)
        for listed, how in (("placed", "packed"), ("left_out", "by hash"))
        for each in manifest[listed]
    ]
    wheels = manifest["wheels"].items()
    rows += [("plugin", name, each["version"], each["sha256"], "packed") for name, each in wheels]
    return _table(("kind", "name", "size or version", "hash (BLAKE2b; wheels SHA-256)", ""), rows)


def _packages(manifest: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    return ((name, each["version"], each["digest"]) for name, each in manifest["packages"].items())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in heads)
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _section(title: str, body_html: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body_html}</section>"


def _text(value: object, most_chars: int = MOST_CHARS) -> str:
    """Untrusted text: of bounded length, control characters replaced, escaped."""
    shown = str(value)[:most_chars]
    return escape("\n".join(map(printable, shown.split("\n"))), quote=True)


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
