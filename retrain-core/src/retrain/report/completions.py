"""Completions on the page: the best, the worst and random ones of a few steps, as escaped text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from retrain.records.record_names import GENERATIONS
from retrain.report.chart_specs import value_text
from retrain.report.gather import Material, ReportRun, evaluated_steps
from retrain.report.markup import Links, attribute, details, note, section
from retrain.report.sample import Sample
from retrain.report.samples import StepSamples, read_samples, shown_steps
from retrain.report.text import long_text, plural, text

OF_EACH_ALONE, OF_EACH = 2, 1  # best, worst and random ones per step: for a single condition, and for each of several
REASONS = {"eos": "ended", "length": "cut off at max_tokens", "turns": "out of turns"}


def read_all(material: Material) -> dict[str, tuple[ReportRun, list[StepSamples]]]:
    """For each shown condition its first run with completions, and the selection from it."""
    found = {}
    of_each = OF_EACH_ALONE if len(material.shown) == 1 else OF_EACH
    for label in material.shown:
        for run in material.drawn(label):
            if picked := _picked(run, of_each):
                found[label] = run, picked
                break
    return found


def completions_section(found: Mapping[str, tuple[ReportRun, list[StepSamples]]], links: Links) -> str:
    """A foldable part per condition, the first one open."""
    if not found:
        return ""
    folds = [
        details(
            f"<h3>{text(label)}</h3>"
            + (f' <span class="soft">seed {run.candidate.seed}</span>' if run.candidate.seed is not None else ""),
            "".join(_step(run, each, links) for each in picked),
            is_open=index == 0,
            kind="condition",
        )
        for index, (label, (run, picked)) in enumerate(found.items())
    ]
    how = (
        "Of the first, middle and last evaluated step the completions with the highest and the lowest reward, and "
        "random ones; equal rewards in random order. They are model output: text, shown as such."
    )
    return section("completions", "Completions", note(how), *folds)


def _picked(run: ReportRun, of_each: int) -> list[StepSamples]:
    if run.candidate.folder is None:
        return []
    file = _file(run.candidate.folder)
    steps = shown_steps(file, evaluated_steps(run))
    found = (read_samples(file, step, of_each=of_each, key=run.candidate.condition) for step in steps)
    return [each for each in found if each is not None]


def _step(run: ReportRun, picked: StepSamples, links: Links) -> str:
    passed_over = f", {plural(picked.num_passed_over, 'line')} could not be read" if picked.num_passed_over else ""
    cut = ", only the first 64 MB of the step were read" if picked.is_cut else ""
    source = f"from {plural(picked.num_completions, 'completion')}{passed_over}{cut}"
    folder = run.candidate.folder
    file = links.to(_file(folder), "generations.jsonl") if folder else ""
    cards = "".join(_card(sample, file) for sample in picked.samples)
    return f'<h4>Step {picked.step:,} <span class="soft">{text(source)}</span></h4><div class="cards">{cards}</div>'


def _card(sample: Sample, file_html: str) -> str:
    reward = "no verdict" if sample.reward is None else f"reward {sample.reward:g}"
    if sample.reward is None and sample.outcome not in ("", "no_verdict", "scored"):
        reward = sample.outcome
    notes = [
        REASONS.get(sample.stop_reason, sample.stop_reason),
        _tokens(sample),
        "" if sample.trained else "not trained",
    ]
    parts = "".join(f"<li>{text(name)} {value_text(part)}</li>" for name, part in sample.parts.items())
    surprises = "".join(
        f"<li><code>{text(token.replace('Ġ', ' '), 40)}</code> {surprisal:.2f}</li>"
        for token, surprisal in sample.surprisals
    )
    name = f"{sample.kind} completion, group {sample.group}, number {sample.index}"
    where = f"group {sample.group}, completion {sample.index}, {sample.example_id}"
    head = f'<span class="kind">{text(sample.kind)}</span> <span class="reward">{text(reward)}</span>'
    rest = text(", ".join(filter(None, notes)))
    return "".join(
        (
            f'<article class="card"><header>{head} <span class="soft">{rest}</span></header>',
            f'<div class="prompt" dir="auto">{long_text(sample.prompt)}</div>',
            f'<pre class="completion" dir="auto" tabindex="0" role="region" aria-label="{attribute(name)}">',
            f"{long_text(sample.completion)}</pre>",
            f'<p>Reference: <code dir="auto">{long_text(sample.reference)}</code></p>',
            f"<p>{long_text(sample.detail)}</p>" if sample.detail.head else "",
            f'<ul class="chips" aria-label="Reward parts">{parts}</ul>' if parts else "",
            f'<p class="soft">Most surprising tokens, nats</p><ul class="chips">{surprises}</ul>' if surprises else "",
            f'<p class="soft">{text(where)}; {file_html} from byte {sample.offset:,}</p></article>',
        )
    )


def _tokens(sample: Sample) -> str:
    return "" if sample.num_tokens is None else plural(sample.num_tokens, "token")


def _file(folder: Path) -> Path:
    return folder / GENERATIONS
