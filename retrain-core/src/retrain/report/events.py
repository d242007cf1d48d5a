"""Sections about health findings and files."""

from __future__ import annotations

from retrain.records.record_names import GENERATIONS, METRICS, RUN_FILE
from retrain.report.chart_specs import Unit, value_text
from retrain.report.gather import Material
from retrain.report.markup import Links, details, note, section, table
from retrain.report.text import plural, text
from retrain.text.terminal_text import duration

MOST_EPISODES = 200
MOST_RUNS = 2000


def health_section(material: Material) -> str:
    """Every episode of every run, the longest first."""
    found = [(run, each) for run in material.runs for each in run.lines.episodes]
    if not found:
        return section("health", "Health", note("No health finding in any run."))
    found.sort(key=lambda pair: pair[1].first_step - pair[1].last_step)
    rows = [
        (
            text(each.state),
            text(run.candidate.name),
            _span(each.first_step, each.last_step),
            f"{each.last_step - each.first_step + 1:,}",
        )
        for run, each in found[:MOST_EPISODES]
    ]
    runs = len({id(run) for run, _ in found})
    meaning = "docs/pages/health.md explains each state and what to change."
    summary = f"{plural(len(found), 'episode')} in {plural(runs, 'run')}; {meaning}"
    cut = note(f"The longest {MOST_EPISODES} are listed.") if len(found) > MOST_EPISODES else ""
    body = table("Health findings", ("state", "run", "steps", "how many"), rows, num_names=2, is_caption_shown=False)
    return section("health", "Health", note(summary), body, cut)


def files_section(material: Material, links: Links, made: str) -> str:
    """Every run with its state and records, by relative path."""
    rows = []
    for run in material.runs[:MOST_RUNS]:
        folder = run.candidate.folder
        rate = next((float(v) for v in run.lines.column("correct_rate")[::-1] if v == v), None)
        files = (
            " ".join(links.to(folder / name, name.rpartition("/")[2]) for name in (RUN_FILE, METRICS, GENERATIONS))
            if folder
            else ""
        )
        name = links.to(folder, run.candidate.name) if folder else text(run.candidate.name)
        seed = "—" if run.candidate.seed is None else str(run.candidate.seed)
        cells = (text(run.candidate.condition), seed, text(run.candidate.state), files, f"{run.num_steps:,}")
        rows.append((name, *cells, value_text(rate, Unit.SHARE), duration(run.wall_time_s)))
    heads = ("run", "condition", "seed", "state", "files", "steps", "correct", "time")
    listed = table("Runs", heads, rows, num_names=5, is_caption_shown=False)
    campaign = material.source.campaign
    manifest = f"<p>Campaign: {links.to(campaign / 'manifest.json', 'manifest.json')}</p>" if campaign else ""
    left_out = len(material.runs) - MOST_RUNS
    more = note(f"and {left_out:,} more: `retrain status` lists them all") if left_out > 0 else ""
    return section("files", "Files", note(made), manifest, details(plural(len(rows), "run"), listed), more)


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
