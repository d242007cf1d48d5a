"""The first section of the page: failures, runs, hardware and versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime

from retrain.report.gather import Material, ReportRun
from retrain.report.inputs import accepted_alert
from retrain.report.markup import Links, facts, note, section, table
from retrain.report.settings import common, versions
from retrain.report.text import amount, joined, plural, text
from retrain.text.terminal_text import duration

MOST_FAILED = 50
MOST_LISTED = 12


def summary_section(material: Material, links: Links, lede: str, findings_html: str = "") -> str:
    """What was found in plain words, failed runs, then the facts."""
    alerts = (_failed(material, links), accepted_alert(material))
    return section(
        "summary", "Summary", f'<p class="lede">{text(lede, 1000)}</p>', findings_html, *alerts, _facts(material)
    )


def title_of(material: Material) -> str:
    """The campaign's name, the run's, or how many runs."""
    if material.source.campaign:
        return material.source.campaign.resolve().name
    names = [run.candidate.name for run in material.runs]
    folder = material.runs[0].candidate.folder
    return (folder.resolve().name if folder else names[0]) if len(names) == 1 else plural(len(names), "run")


def lede_of(material: Material) -> str:
    """The scope of the report in a sentence."""
    conditions, seeds = len(material.source.conditions), len({run.candidate.seed for run in material.runs})
    states = Counter(run.candidate.state for run in material.runs)
    ended = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    shape = f"{plural(conditions, 'condition')} × {plural(seeds, 'seed')}, " if len(material.runs) > 1 else ""
    return f"{shape}{plural(len(material.runs), 'run')}: {ended}."


def _failed(material: Material, links: Links) -> str:
    runs = material.unfinished
    if not runs:
        return ""
    rows = [
        (
            _named(run, links),
            text(run.candidate.condition),
            text(run.candidate.state),
            text(run.error or "nothing was recorded", 600),
            f"{run.num_steps:,}",
        )
        for run in runs[:MOST_FAILED]
    ]
    head = f"{plural(len(runs), 'run')} of {len(material.runs):,} did not finish"
    more = note(f"and {len(runs) - MOST_FAILED:,} more: see Files") if len(runs) > MOST_FAILED else ""
    body = table(
        "Unfinished runs",
        ("run", "condition", "state", "last error", "steps"),
        rows,
        num_names=4,
        is_caption_shown=False,
    )
    warning = (
        "The remaining runs of a condition that lost some may be the luckier ones." if len(material.runs) > 1 else ""
    )
    return f'<div class="alert"><h3>{head}</h3>{note(warning) if warning else ""}{body}{more}</div>'


def _named(run: ReportRun, links: Links) -> str:
    folder = run.candidate.folder
    return links.to(folder, run.candidate.name) if folder else text(run.candidate.name)


def _facts(material: Material) -> str:
    records = [run.record for run in material.runs if run.record]
    pairs = [(name, joined(_few(common(records, path)))) for name, path in _PATHS]
    pairs += [
        ("Steps", text(_steps(material))),
        ("Sampled tokens", text(_tokens(material))),
        ("Time", text(_times(material))),
        ("Hardware", _hardware(material)),
        ("Seeds", joined(_few([str(seed) for seed in _seeds(material)]))),
        ("Code", _code(material)),
        ("Versions", joined(f"{name} {' / '.join(each)}" for name, each in versions(records).items())),
    ]
    return facts(((name, value) for name, value in pairs if value), wide=frozenset({"Code", "Versions"}))


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


def _few(values: list[str]) -> Iterable[str]:
    more = [f"and {len(values) - MOST_LISTED} more"] if len(values) > MOST_LISTED else []
    return [*values[:MOST_LISTED], *more]


def _seeds(material: Material) -> list[int]:
    return list(dict.fromkeys(run.candidate.seed for run in material.runs if run.candidate.seed is not None))


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
    ends = [end for run in material.runs if (end := _time(run.record.get("ended")))]
    if len(spent) == 1 or not starts or not ends:
        return duration(sum(spent))
    return f"{duration(sum(spent))} of runs, {duration((max(ends) - min(starts)).total_seconds())} from first to last"


def _time(value: object) -> datetime | None:
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        return None
    return found if found and found.tzinfo else None


def _code(material: Material) -> str:
    found: dict[str, None] = {}
    for run in material.runs:
        git = run.record.get("git")
        if isinstance(git, dict) and git.get("commit"):
            found[f"{str(git['commit'])[:12]}{', uncommitted changes' if git.get('dirty') else ''}"] = None
    return joined(_few(list(found)), "; ")


def _hardware(material: Material) -> str:
    found: dict[str, None] = {}
    for run in material.runs:
        hardware = run.record.get("hardware")
        if isinstance(hardware, dict):
            cores = f", {hardware['cores']} cores" if hardware.get("cores") else ""
            found[f"{hardware.get('system', '')} {hardware.get('machine', '')}{cores}".strip()] = None
    return joined(_few(list(found)), "; ")
