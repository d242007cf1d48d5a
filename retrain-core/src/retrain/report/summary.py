"""The sections about the runs themselves: summary, tokens and time spent, health findings, files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.records.reading import time_of
from retrain.records.record_names import CAMPAIGN_FILE, GENERATIONS, METRICS, RUN_FILE
from retrain.records.run import accepted_changes, task_names
from retrain.report import parts as html
from retrain.report.chart_specs import GROUPS, TIMES, Unit, value_text
from retrain.report.gather import Material, ReportRun
from retrain.report.settings import common, versions
from retrain.text.amounts import ABSENT, amount, counted, duration, first_few

MOST_FAILED = 50
MOST_LISTED = 12
MOST_ACCEPTED = 50
MOST_EPISODES = 200
MOST_RUNS = 2000
PATHS = (
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
GROUP_NAMES = ("useful", "all right", "all wrong", "all same", "no verdict", "surplus")
TIME_NAMES = ("sampling", "scoring", "training", "other")
SHARES = (  # of a step, averaged over runs
    ("cut off at max_tokens", "max_token_hit_rate"),
    ("clipped", "clip_fraction"),
    ("masked by surprisal", "entropy_mask_fraction"),
)
BUDGET = (
    "Only completions of groups whose rewards differ carry gradient. Groups that are all right are solved, groups that "
    "are all wrong are too hard or never rewarded; both were sampled and paid for."
)


def summary_section(material: Material, links: html.Links, findings: html.Part | None) -> html.Section:
    """Return the scope in a sentence, the findings in plain words, failed runs, and the facts."""
    conditions, seeds = len(material.source.conditions), len({run.candidate.seed for run in material.runs})
    states = Counter(run.candidate.state for run in material.runs)
    ended = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    shape = f"{counted(conditions, 'condition')} × {counted(seeds, 'seed')}, " if len(material.runs) > 1 else ""
    scope = html.lede(f"{shape}{counted(len(material.runs), 'run')}: {ended}.")
    parts = (scope, findings, _failed(material, links), _accepted(material), _facts(material))
    return html.Section("summary", "Summary", parts)


def title_of(material: Material) -> str:
    if material.source.campaign:
        return material.source.campaign.resolve().name
    names = [run.candidate.name for run in material.runs]
    folder = material.runs[0].candidate.folder
    return (folder.resolve().name if folder else names[0]) if len(names) == 1 else counted(len(names), "run")


def _failed(material: Material, links: html.Links) -> html.Box | None:
    runs = material.unfinished
    if not runs:
        return None
    rows = [
        (
            _named(run, links),
            run.candidate.condition,
            run.candidate.state,
            run.error or "nothing was recorded",
            f"{run.lines.num_steps:,}",
        )
        for run in runs[:MOST_FAILED]
    ]
    heads = ("run", "condition", "state", "last error", "steps")
    warning = "The remaining runs of a condition that lost some may be the luckier ones."
    parts = (
        html.note(warning) if len(material.runs) > 1 else None,
        html.Table("Unfinished runs", heads, rows, num_names=4, is_caption_shown=False),
        html.and_more(len(runs), MOST_FAILED, ": see Files"),
    )
    return html.Box("alert", f"{counted(len(runs), 'run')} of {len(material.runs):,} did not finish", parts)


def _accepted(material: Material) -> html.Box | None:
    """Return a warning about runs that `--resume-anyway` continued: they are not one experiment from end to end."""
    found = [(run, change) for run in material.runs for change in accepted_changes(run.record)]
    if not found:
        return None
    rows = [(run.candidate.name, change) for run, change in found[:MOST_ACCEPTED]]
    runs = len({id(run) for run, _ in found})
    head = f"{counted(runs, 'run')} continued with --resume-anyway although something had changed"
    table = html.Table("Accepted changes", ("run", "change"), rows, num_names=2, is_caption_shown=False)
    return html.Box("alert", head, (table, html.and_more(len(found), MOST_ACCEPTED, ": see run.json")))


def _named(run: ReportRun, links: html.Links) -> html.Piece:
    folder = run.candidate.folder
    return links.to(folder, run.candidate.name) if folder else run.candidate.name


def _facts(material: Material) -> html.Facts:
    records = [run.record for run in material.runs if run.record]
    seeds = dict.fromkeys(str(run.candidate.seed) for run in material.runs if run.candidate.seed is not None)
    pairs = {name: first_few(common(records, path), MOST_LISTED) for name, path in PATHS} | {
        "Steps": _steps(material),
        "Sampled tokens": _tokens(material),
        "Time": _times(material),
        "Hardware": _distinct(material, "hardware", _hardware),
        "Seeds": first_few(list(seeds), MOST_LISTED),
        "Code": _distinct(material, "git", _commit),
        "Versions": ", ".join(f"{name} {' / '.join(each)}" for name, each in versions(records).items()),
    }
    pairs["Data"] = next((", ".join(names) for names in map(task_names, records) if names), pairs["Data"])
    return html.Facts([(name, value) for name, value in pairs.items() if value], wide=frozenset({"Code", "Versions"}))


def _steps(material: Material) -> str:
    steps = [run.lines.num_steps for run in material.runs if run.lines.num_steps]
    if not steps:
        return ""
    least = "" if min(steps) == max(steps) else f"{min(steps):,} to "
    return f"{least}{max(steps):,} per run, {sum(steps):,} in all" if len(steps) > 1 else f"{steps[0]:,}"


def _tokens(material: Material) -> str:
    means = [(run.lines.mean("sampled_tokens"), run.lines.num_steps) for run in material.runs]
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
    return "; ".join(list(dict.fromkeys(filter(None, found)))[:MOST_LISTED])


def _commit(git: Mapping[str, Any]) -> str:
    commit = str(git.get("commit") or "")[:12]
    return f"{commit}, uncommitted changes" if commit and git.get("dirty") else commit


def _hardware(hardware: Mapping[str, Any]) -> str:
    cores = f", {hardware['cores']} cores" if hardware.get("cores") else ""
    return f"{hardware.get('system', '')} {hardware.get('machine', '')}{cores}".strip()


def budget_section(material: Material) -> html.Section | None:
    """Return the share of groups that carried gradient, and the reasons why the rest did not."""
    groups = _by_condition(material, _group_counts)
    if not groups:
        return None
    title = "Groups by training signal"
    figure = _bars(groups, GROUP_NAMES, "share of groups", material)
    rows = [(label, *(value_text(share, Unit.SHARE) for share in shares)) for label, shares in groups.items()]
    numbers = html.Table(title, ("condition", *GROUP_NAMES), rows, is_caption_shown=False)
    plot = html.Plot(title, "all steps that were read", figure, numbers, kind="bars")
    return html.Section("budget", "Signal budget", [html.note(BUDGET), plot, _rates(material)])


def time_section(material: Material) -> html.Section | None:
    times = _by_condition(material, _phases)
    if not times:
        return None
    rows = []
    for label, values in times.items():
        total = sum(values)
        cells = [f"{value:.3g} s ({100 * value / total:.0f}%)" if total else ABSENT for value in values]
        evaluated = _mean(material.drawn(label), "eval_time_s")
        rows.append((label, *cells, f"{total:.3g} s", value_text(evaluated, Unit.SECONDS)))
    heads = ("condition", *TIME_NAMES, "step", "an evaluation")
    numbers = html.Table("Seconds per step", heads, rows, is_caption_shown=False)
    figure = _bars(times, TIME_NAMES, "seconds per step", material)
    remark = "mean over runs; evaluations come on top"
    return html.Section("time", "Time", [html.Plot("Seconds per step", remark, figure, numbers, kind="bars")])


def _by_condition(material: Material, counts: Callable[[ReportRun], list[float] | None]) -> dict[str, list[float]]:
    """Return the mean of `counts` over the runs of each condition."""
    found = {}
    for label in material.drawable:
        values = [each for run in material.drawn(label) if (each := counts(run)) is not None]
        if values:
            found[label] = [float(value) for value in np.mean(values, axis=0)]
    return found


def _group_counts(run: ReportRun) -> list[float] | None:
    if "useful_groups" not in run.lines.values:
        return None
    counts = [run.lines.mean(field) or 0.0 for field in GROUPS]
    return [count / sum(counts) for count in counts] if sum(counts) else None


def _phases(run: ReportRun) -> list[float] | None:
    total = run.lines.mean("step_time_s")
    if total is None:
        return None
    phases = [run.lines.mean(field) or 0.0 for field in TIMES]
    return [*phases, max(0.0, total - sum(phases))]


def _rates(material: Material) -> html.Table:
    known = [(name, field) for name, field in SHARES if any(field in run.lines.values for run in material.runs)]
    rows = []
    for label in material.drawable:
        runs = material.drawn(label)
        sampled, trained = (_mean(runs, field) for field in ("sampled_tokens", "trained_tokens"))
        share = trained / sampled if sampled and trained is not None else None
        cells = [ABSENT if sampled is None else f"{sampled:,.0f}", value_text(share, Unit.SHARE)]
        cells += [value_text(_mean(runs, field), Unit.SHARE) for _, field in known]
        rows.append((label, *cells))
    heads = ("condition", "tokens per step", "trained", *(name for name, _ in known))
    return html.Table("Of the sampled tokens, mean over steps and runs", heads, rows)


def _mean(runs: Sequence[ReportRun], field: str) -> float | None:
    means = [mean for run in runs if (mean := run.lines.mean(field)) is not None]
    return sum(means) / len(means) if means else None


def _bars(values: Mapping[str, Sequence[float]], names: Sequence[str], unit: str, material: Material) -> dict[str, Any]:
    """Return stacked bars of the conditions that are shown at first; shares of their sum unless in seconds."""
    shown = [label for label in values if label in material.shown]
    totals = {label: sum(values[label]) if unit.startswith("share") else 1.0 for label in shown}
    parts = {
        name: [values[label][index] / totals[label] if totals[label] else 0.0 for label in shown]
        for index, name in enumerate(names)
    }
    labels = [html.plain(label, 80) for label in shown]
    return {"kind": "bars", "unit": unit, "labels": labels, "parts": [{"name": n, "x": x} for n, x in parts.items()]}


def health_section(material: Material) -> html.Section:
    found = [(run, each) for run in material.runs for each in run.lines.episodes]
    if not found:
        return html.Section("health", "Health", [html.note("No health finding in any run.")])
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
    meaning = "docs/pages/reliability.md explains each state and the keys to change."
    heads = ("state", "run", "steps", "how many")
    parts = (
        html.note(f"{counted(len(found), 'episode')} in {counted(runs, 'run')}; {meaning}"),
        html.Table("Health findings", heads, rows, num_names=2, is_caption_shown=False),
        html.note(f"The longest {MOST_EPISODES} are listed.") if len(found) > MOST_EPISODES else None,
    )
    return html.Section("health", "Health", parts)


def files_section(material: Material, links: html.Links, made: str) -> html.Section:
    rows = [_files_row(run, links) for run in material.runs[:MOST_RUNS]]
    heads = ("run", "condition", "seed", "state", "files", "steps", "correct", "time")
    listed = html.Table("Runs", heads, rows, num_names=5, is_caption_shown=False)
    campaign = material.source.campaign
    parts = (
        html.note(made),
        html.Paragraph(("Campaign: ", links.to(campaign / CAMPAIGN_FILE, CAMPAIGN_FILE))) if campaign else None,
        html.Fold(counted(len(rows), "run"), [listed]),
        html.and_more(len(material.runs), MOST_RUNS, ": `retrain status` lists them all"),
    )
    return html.Section("files", "Files", parts)


def _files_row(run: ReportRun, links: html.Links) -> tuple[html.Piece, ...]:
    folder = run.candidate.folder or Path()
    rate = next((float(v) for v in run.lines.column("correct_rate")[::-1] if not np.isnan(v)), None)
    names = (RUN_FILE, METRICS, GENERATIONS) if run.candidate.folder else ()
    files = html.Words([links.to(folder / name, name.rpartition("/")[2]) for name in names])
    seed = "—" if run.candidate.seed is None else str(run.candidate.seed)
    numbers = (f"{run.lines.num_steps:,}", value_text(rate, Unit.SHARE), duration(run.wall_time_s))
    return (_named(run, links), run.candidate.condition, seed, run.candidate.state, files, *numbers)
