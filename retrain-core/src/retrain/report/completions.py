"""Completions on the page: the best, the worst and random ones of a few steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.records.record_names import GENERATIONS
from retrain.report.chart_specs import value_text
from retrain.report.gather import Material, ReportRun, evaluated_steps
from retrain.report.parts import Fold, Grid, Heading, Link, Links, Part, Section, note
from retrain.report.samples import Sample, StepSamples, read_samples, shown_steps
from retrain.report.text import plural

OF_EACH_ALONE, OF_EACH = 2, 1  # best, worst and random ones per step: for a single condition, and for each of several
REASONS = {"eos": "ended", "length": "cut off at max_tokens", "turns": "out of turns"}
SELECTION = (
    "Of the first, middle and last evaluated step the completions with the highest and the lowest reward, and "
    "random ones; equal rewards in random order. They are model output: text, shown as such."
)


def completions_section(material: Material, links: Links) -> Section | None:
    """A foldable part for each shown condition, from its first run with completions; the first one open."""
    folds: list[Fold] = []
    for label in material.shown:
        for run in material.drawn(label):
            if picked := _picked(run, OF_EACH_ALONE if len(material.shown) == 1 else OF_EACH):
                seed = "" if run.candidate.seed is None else f"seed {run.candidate.seed}"
                parts = [part for each in picked for part in _step(run, each, links)]
                folds.append(Fold(label, parts, kind="condition", level=3, remark=seed, is_open=not folds))
                break
    return Section("completions", "Completions", [note(SELECTION), *folds]) if folds else None


def _picked(run: ReportRun, of_each: int) -> list[StepSamples]:
    if run.candidate.folder is None:
        return []
    file = _file(run.candidate.folder)
    steps = shown_steps(file, evaluated_steps(run))
    found = (read_samples(file, step, of_each=of_each, key=run.candidate.condition) for step in steps)
    return [each for each in found if each is not None]


def _step(run: ReportRun, picked: StepSamples, links: Links) -> tuple[Heading, Grid]:
    passed_over = f", {plural(picked.num_passed_over, 'line')} could not be read" if picked.num_passed_over else ""
    cut = ", only the first 64 MB of the step were read" if picked.is_cut else ""
    source = f"from {plural(picked.num_completions, 'completion')}{passed_over}{cut}"
    folder = run.candidate.folder
    file = links.to(_file(folder), "generations.jsonl") if folder else None
    return Heading(f"Step {picked.step:,}", 4, source), Grid("cards", [Card(each, file) for each in picked.samples])


@dataclass(frozen=True, slots=True)
class Card(Part):
    """A completion with its prompt, reward and place in the file."""

    sample: Sample
    file: Link | None

    @property
    def name(self) -> str:
        """Its kind and place."""
        return f"{self.sample.kind} completion, group {self.sample.group}, number {self.sample.index}"

    @property
    def reward(self) -> str:
        """The reward, or the reason why there is none."""
        if self.sample.reward is not None:
            return f"reward {self.sample.reward:g}"
        return "no verdict" if self.sample.outcome in ("", "no_verdict", "scored") else self.sample.outcome

    @property
    def rewards(self) -> Sequence[str]:
        """The parts of the reward."""
        return [f"{name} {value_text(part)}" for name, part in self.sample.parts.items()]

    @property
    def remarks(self) -> str:
        """Why it ended, its length, and whether it was left out of training."""
        tokens = "" if self.sample.num_tokens is None else plural(self.sample.num_tokens, "token")
        reason = REASONS.get(self.sample.stop_reason, self.sample.stop_reason)
        return ", ".join(filter(None, (reason, tokens, "" if self.sample.trained else "not trained")))

    @property
    def where(self) -> str:
        """Its place among the completions of the step."""
        return f"group {self.sample.group}, completion {self.sample.index}, {self.sample.example_id}"


def _file(folder: Path) -> Path:
    return folder / GENERATIONS
