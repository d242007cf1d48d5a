"""The sections about the runs themselves: summary with failures and facts, health findings, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retrain.records.reading import time_of
from retrain.records.record_names import CAMPAIGN_FILE, GENERATIONS, METRICS, RUN_FILE
from retrain.records.run import accepted_changes
from retrain.report.chart_specs import Unit, value_text
from retrain.report.gather import Material, ReportRun
from retrain.report.parts import Box, Facts, Fold, Links, Paragraph, Part, Piece, Section, Table, Words, lede, note
from retrain.report.settings import common, versions
from retrain.text.amounts import amount, counted, duration

MOST_FAILED = 50
MOST_LISTED = 12
MOST_ACCEPTED = 50
MOST_EPISODES = 200
MOST_RUNS = 2000


def summary_section(material: Material, links: Links, findings: Part | None) -> Section:
    """The findings in plain words, failed runs, then the facts."""
    parts = (lede(lede_of(material)), findings, _failed(material, links), _accepted(material), _facts(material))
    return Section("summary", "Summary", parts)


def title_of(material: Material) -> str:
    """The campaign's name, the run's, or how many runs."""
    if material.source.campaign:
        return material.source.campaign.resolve().name
    names = [run.candidate.name for run in material.runs]
    folder = material.runs[0].candidate.folder
    return (folder.resolve().name if folder else names[0]) if len(names) == 1 else counted(len(names), "run")


def lede_of(material: Material) -> str:
    """The scope of the report in a sentence."""
    conditions, seeds = len(material.source.conditions), len({run.candidate.seed for run in material.runs})
    states = Counter(run.candidate.state for run in material.runs)
    ended = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    shape = f"{counted(conditions, 'condition')} × {counted(seeds, 'seed')}, " if len(material.runs) > 1 else ""
    return f"{shape}{counted(len(material.runs), 'run')}: {ended}."


def _failed(material: Material, links: Links) -> Box | None:
    runs = material.unfinished
    if not runs:
        return None
    rows = [
        (
            _named(run, links),
            run.candidate.condition,
            run.candidate.state,
            run.error or "nothing was recorded",
            f"{run.num_steps:,}",
        )
        for run in runs[:MOST_FAILED]
    ]
    heads = ("run", "condition", "state", "last error", "steps")
    warning = "The remaining runs of a condition that lost some may be the luckier ones."
    parts = (
        note(warning) if len(material.runs) > 1 else None,
        Table("Unfinished runs", heads, rows, num_names=4, is_caption_shown=False),
        note(f"and {len(runs) - MOST_FAILED:,} more: see Files") if len(runs) > MOST_FAILED else None,
    )
    return Box("alert", f"{counted(len(runs), 'run')} of {len(material.runs):,} did not finish", parts)


def _accepted(material: Material) -> Box | None:
    """A warning about runs that `--resume-anyway` continued: their numbers are not those of one run."""
    found = [(run, change) for run in material.runs for change in accepted_changes(run.record)]
    if not found:
        return None
    rows = [(run.candidate.name, change) for run, change in found[:MOST_ACCEPTED]]
    runs = len({id(run) for run, _ in found})
    head = f"{counted(runs, 'run')} continued with --resume-anyway although something had changed"
    more = note(f"and {len(found) - MOST_ACCEPTED:,} more: see run.json") if len(found) > MOST_ACCEPTED else None
    table = Table("Accepted changes", ("run", "change"), rows, num_names=2, is_caption_shown=False)
    return Box("alert", head, (table, more))


def _named(run: ReportRun, links: Links) -> Piece:
    folder = run.candidate.folder
    return links.to(folder, run.candidate.name) if folder else run.candidate.name


def _facts(material: Material) -> Facts:
    records = [run.record for run in material.runs if run.record]
    seeds = dict.fromkeys(str(run.candidate.seed) for run in material.runs if run.candidate.seed is not None)
    pairs = {name: _few(common(records, path)) for name, path in _PATHS} | {
        "Steps": _steps(material),
        "Sampled tokens": _tokens(material),
        "Time": _times(material),
        "Hardware": _distinct(material, "hardware", _hardware),
        "Seeds": _few(list(seeds)),
        "Code": _distinct(material, "git", _commit),
        "Versions": ", ".join(f"{name} {' / '.join(each)}" for name, each in versions(records).items()),
    }
    return Facts([(name, value) for name, value in pairs.items() if value], wide=frozenset({"Code", "Versions"}))


_PATHS = (
    ("Model", "config.model.model"),
    ("Data", "config.data.source"),
    ("Reward", "config.reward.type"),
    ("Backend", "config.backend.backend"),
    ("Prompts per step", "config.training.batch_size"),
    ("Completions per prompt", "config.training.group_size"),
    ("Learning rate", "config.training.lr"),
    ("LoRA rank", "config.model.lora_rank"),
    ("Max tokens", "config.training.max_tokens"),
)


def _few(values: list[str], separator: str = ", ") -> str:
    more = [f"and {len(values) - MOST_LISTED} more"] if len(values) > MOST_LISTED else []
    return separator.join([*values[:MOST_LISTED], *more])


def _steps(material: Material) -> str:
    steps = [run.num_steps for run in material.runs if run.num_steps]
    if not steps:
        return ""
    least = "" if min(steps) == max(steps) else f"{min(steps):,} to "
    return f"{least}{max(steps):,} per run, {sum(steps):,} in all" if len(steps) > 1 else f"{steps[0]:,}"


def _tokens(material: Material) -> str:
    means = [(run.lines.mean("sampled_tokens"), run.num_steps) for run in material.runs]
    total = sum(mean * steps for mean, steps in means if mean is not None)
    return f"{'about ' if material.stride > 1 else ''}{amount(total)}" if total else ""


def _times(material: Material) -> str:
    spent = [run.wall_time_s for run in material.runs if run.wall_time_s is not None]
    if not spent:
        return ""
    starts = [run.candidate.started for run in material.runs if run.candidate.started]
    ends = [end for run in material.runs if (end := time_of(run.record.get("ended")))]
    if len(spent) == 1 or not starts or not ends:
        return duration(sum(spent))
    return f"{duration(sum(spent))} of runs, {duration((max(ends) - min(starts)).total_seconds())} from first to last"


def _distinct(material: Material, table: str, shown: Callable[[Mapping[str, Any]], str]) -> str:
    found = (shown(run.record[table]) for run in material.runs if isinstance(run.record.get(table), dict))
    return _few(list(dict.fromkeys(filter(None, found))), "; ")


def _commit(git: Mapping[str, Any]) -> str:
    return (
        f"{str(git['commit'])[:12]}{', uncommitted changes' if git.get('dirty') else ''}" if git.get("commit") else ""
    )


def _hardware(hardware: Mapping[str, Any]) -> str:
    cores = f", {hardware['cores']} cores" if hardware.get("cores") else ""
    return f"{hardware.get('system', '')} {hardware.get('machine', '')}{cores}".strip()


def health_section(material: Material) -> Section:
    """Every episode of every run, the longest first."""
    found = [(run, each) for run in material.runs for each in run.lines.episodes]
    if not found:
        return Section("health", "Health", [note("No health finding in any run.")])
    found.sort(key=lambda pair: pair[1].first_step - pair[1].last_step)
    rows = [
        (
            each.state,
            run.candidate.name,
            f"{each.first_step:,}" + (f" to {each.last_step:,}" if each.last_step != each.first_step else ""),
            f"{each.last_step - each.first_step + 1:,}",
        )
        for run, each in found[:MOST_EPISODES]
    ]
    runs = len({id(run) for run, _ in found})
    meaning = "docs/pages/reliability.md explains each state and what to change."
    heads = ("state", "run", "steps", "how many")
    parts = (
        note(f"{counted(len(found), 'episode')} in {counted(runs, 'run')}; {meaning}"),
        Table("Health findings", heads, rows, num_names=2, is_caption_shown=False),
        note(f"The longest {MOST_EPISODES} are listed.") if len(found) > MOST_EPISODES else None,
    )
    return Section("health", "Health", parts)


def files_section(material: Material, links: Links, made: str) -> Section:
    """Every run with its state and records, by relative path."""
    rows = [_files_row(run, links) for run in material.runs[:MOST_RUNS]]
    heads = ("run", "condition", "seed", "state", "files", "steps", "correct", "time")
    listed = Table("Runs", heads, rows, num_names=5, is_caption_shown=False)
    campaign = material.source.campaign
    left_out = len(material.runs) - MOST_RUNS
    parts = (
        note(made),
        Paragraph(("Campaign: ", links.to(campaign / CAMPAIGN_FILE, CAMPAIGN_FILE))) if campaign else None,
        Fold(counted(len(rows), "run"), [listed]),
        note(f"and {left_out:,} more: `retrain status` lists them all") if left_out > 0 else None,
    )
    return Section("files", "Files", parts)


def _files_row(run: ReportRun, links: Links) -> tuple[Piece, ...]:
    folder = run.candidate.folder or Path()
    rate = next((float(v) for v in run.lines.column("correct_rate")[::-1] if v == v), None)
    names = (RUN_FILE, METRICS, GENERATIONS) if run.candidate.folder else ()
    files = Words([links.to(folder / name, name.rpartition("/")[2]) for name in names])
    seed = "—" if run.candidate.seed is None else str(run.candidate.seed)
    numbers = (f"{run.num_steps:,}", value_text(rate, Unit.SHARE), duration(run.wall_time_s))
    return (_named(run, links), run.candidate.condition, seed, run.candidate.state, files, *numbers)
