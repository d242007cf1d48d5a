"""The completions on the page: the best, the worst and random ones of a few steps, with long texts shortened.

The lines of a step are streamed; only shortened texts are kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError
from retrain.kernel.seeding import Seeds
from retrain.records.reading import last_record, number, parse_record, table_of
from retrain.records.record_names import GENERATIONS
from retrain.report.gather import Material, ReportRun, evaluated_steps
from retrain.report.parts import Fold, Heading, Link, Links, Part, Section, Tiles, note
from retrain.report.text import Excerpt
from retrain.text.amounts import counted

OF_EACH_ALONE, OF_EACH = 2, 1  # best, worst and random ones per step: for a single condition, and for each of several
REASONS = {"eos": "ended", "length": "cut off at max_tokens", "turns": "out of turns"}
SELECTION = (
    "Of the first, middle and last evaluated step the completions with the highest and the lowest reward, and "
    "random ones; equal rewards in random order. They are model output: text, shown as such."
)
HEAD_CHARS, TAIL_CHARS = 2400, 1200  # answers are at the end
TOKENS_SHOWN = 6
PARTS_SHOWN = 12
STEP_BYTES = 64 << 20  # most that is read of a step
_STREAMS = Seeds(0)  # fixed, so that the same files give the same page


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
    file = run.candidate.folder / GENERATIONS
    steps = shown_steps(file, evaluated_steps(run))
    found = (read_samples(file, step, of_each=of_each, key=run.candidate.condition) for step in steps)
    return [each for each in found if each is not None]


def _step(run: ReportRun, picked: StepSamples, links: Links) -> tuple[Heading, Tiles]:
    passed_over = f", {counted(picked.num_passed_over, 'line')} could not be read" if picked.num_passed_over else ""
    cut = ", only the first 64 MB of the step were read" if picked.is_cut else ""
    source = f"from {counted(picked.num_completions, 'completion')}{passed_over}{cut}"
    folder = run.candidate.folder
    file = links.to(folder / GENERATIONS, "generations.jsonl") if folder else None
    cards = [replace(each, file=file) for each in picked.samples]
    return Heading(f"Step {picked.step:,}", 4, source), Tiles("cards", cards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card(Part):
    """A completion, with a link to its file and its offset in there; `kind` is best, worst or random.

    Missing numbers are None.
    """

    kind: str
    offset: int
    group: str
    index: str
    example_id: str
    prompt: Excerpt
    completion: Excerpt
    reference: Excerpt
    detail: Excerpt
    outcome: str
    stop_reason: str
    reward: float | None
    num_tokens: int | None
    trained: bool
    rewards: Mapping[str, float]
    surprisals: tuple[tuple[str, float], ...]
    file: Link | None = None

    @property
    def verdict(self) -> str:
        """The reward, or the reason why there is none."""
        if self.reward is not None:
            return f"reward {self.reward:g}"
        return "no verdict" if self.outcome in ("", "no_verdict", "scored") else self.outcome

    @property
    def remarks(self) -> str:
        """Why it ended, its length, and whether it was left out of training."""
        tokens = "" if self.num_tokens is None else counted(self.num_tokens, "token")
        reason = REASONS.get(self.stop_reason, self.stop_reason)
        return ", ".join(filter(None, (reason, tokens, "" if self.trained else "not trained")))


def card_of(record: Mapping[str, Any], *, kind: str, offset: int) -> Card:
    """The shown parts of a line of `generations.jsonl`, with tolerance for any content."""
    tokens = number(record.get("num_tokens"))
    names = ("group", "index", "example_id", "outcome", "stop_reason")
    texts: dict[str, Any] = {name: str(record.get(name, "")) for name in names}
    given = table_of(record, "reward_parts").items()
    rewards = [(str(name), part) for name, each in given if (part := number(each)) is not None]
    tokens_shown = record.get("top_surprisal_tokens")
    tokens_shown = tokens_shown[:TOKENS_SHOWN] if isinstance(tokens_shown, list) else []
    surprisals = [(str(e.get("token", "")), number(e.get("surprisal"))) for e in tokens_shown if isinstance(e, dict)]
    texts |= {name: excerpt(record.get(name)) for name in ("prompt", "completion", "reference", "detail")}
    return Card(
        kind=kind,
        offset=offset,
        **texts,
        reward=number(record.get("reward")),
        num_tokens=None if tokens is None else int(tokens),
        trained=record.get("trained") is True,
        rewards=dict(rewards[:PARTS_SHOWN]),
        surprisals=tuple((token, value) for token, value in surprisals if value is not None),
    )


def excerpt(value: object) -> Excerpt:
    """Excerpt of a text, of messages with their roles, or of the JSON of anything else."""
    whole = _as_text(value)
    left_out = len(whole) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return Excerpt(whole)
    return Excerpt(whole[:HEAD_CHARS], whole[-TAIL_CHARS:], left_out)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n\n".join(f"{each.get('role', '')}: {each['content']}" for each in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The selection from a step, and its number of completions.

    `num_passed_over` lines could not be read; `is_cut`: the step is larger than what is read.
    """

    step: int
    samples: tuple[Card, ...]
    num_completions: int
    num_passed_over: int
    is_cut: bool


def shown_steps(file: Path, evaluated: Sequence[int], most: int = 3) -> list[int]:
    """First, middle and last evaluated step that the file has, with before training as 0; else of all steps."""
    if (last := last_step(file)) is None:
        return []
    candidates = sorted({max(0, step) for step in evaluated if step <= last}) if len(evaluated) > 1 else []
    candidates = candidates if len(candidates) > 1 else list(range(last + 1))
    indices = {round(index * (len(candidates) - 1) / max(1, most - 1)) for index in range(most)}
    return [candidates[index] for index in sorted(indices)]


def read_samples(file: Path, step: int, *, of_each: int, key: str) -> StepSamples | None:
    """`of_each` best, worst and random completions of a step; None if the file has none.

    Ties are broken at random, reproducibly for the same `key` and step.
    """
    picks = _Picks(of_each, key, step)
    num_passed_over = size = 0
    try:
        with open_regular(file) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                record = record_of(line)
                if record is None:
                    num_passed_over += 1
                else:
                    picks.add(offset, record)
    except OSError:
        return None
    if not picks.num_completions and not num_passed_over:
        return None
    return StepSamples(
        step=step,
        samples=picks.chosen(),
        num_completions=picks.num_completions,
        num_passed_over=num_passed_over,
        is_cut=size > STEP_BYTES,
    )


class _Picks:
    """Keeps the selection while all completions are streamed."""

    def __init__(self, of_each: int, key: str, step: int) -> None:
        self._of_each = of_each
        self._rng = _STREAMS.stream("report", key, step)
        self._ranked: dict[str, list[tuple[tuple[float, float], Card]]] = {"best": [], "worst": [], "random": []}
        self.num_completions = 0

    def add(self, offset: int, record: Mapping[str, Any]) -> None:
        """Consider one completion."""
        self.num_completions += 1
        reward, tiebreak = number(record.get("reward")), float(self._rng.random())
        if reward is not None:
            self._rank("best", (-reward, tiebreak), offset, record)
            self._rank("worst", (reward, tiebreak), offset, record)
        self._rank("random", (tiebreak, 0.0), offset, record)

    def chosen(self) -> tuple[Card, ...]:
        """Best, worst and random ones, none of them twice."""
        found: list[Card] = []
        for ranked in self._ranked.values():
            seen = {sample.offset for sample in found}
            found += [sample for _, sample in ranked if sample.offset not in seen][: self._of_each]
        return tuple(found)

    def _rank(self, kind: str, key: tuple[float, float], offset: int, record: Mapping[str, Any]) -> None:
        ranked = self._ranked[kind]
        most = 3 * self._of_each  # the best may also be among the random ones
        if len(ranked) < most or key < ranked[-1][0]:
            ranked.append((key, card_of(record, kind=kind, offset=offset)))
            ranked.sort(key=lambda each: each[0])
            del ranked[most:]


def record_of(line: bytes) -> Mapping[str, Any] | None:
    """The completion on a line of `generations.jsonl`; None where the line is damaged."""
    with suppress(ValueError, RecursionError):
        return parse_record(line, allow_nan=True, allow_overflow=True)
    return None


# A step in the file, found by bisection. Lines are ordered by step, and each begins with its own: `{"step": 12, ...`.


HEAD = re.compile(rb'\{"step": (-?\d{1,18}),')
LINE_BYTES = 16 << 20  # longer lines are skipped


def last_step(file: Path) -> int | None:
    """The step of the last line; None without a line that can be read."""
    with suppress(ConfigError):
        step = (last_record(file, skip_damaged=True) or {}).get("step")
        return step if type(step) is int else None
    return None


def first_offset(stream: BinaryIO, step: int) -> int:
    """Offset of the first line of `step` or a later one; the end of the file if there is none."""
    low, high = 0, stream.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        start, found = _next_line(stream, middle)
        if found is None or found >= step:
            high = middle
        else:
            low = start + 1
    return _next_line(stream, low)[0]


def lines_of(stream: BinaryIO, step: int, *, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each whole line of a step, at most `most_bytes` of them; lines beyond 16 MB are empty."""
    offset = end = first_offset(stream, step)
    stream.seek(offset)
    while offset - end <= most_bytes:
        line = stream.readline(LINE_BYTES)
        head = HEAD.match(line)
        if not head or int(head[1]) != step:
            return
        size, is_whole = len(line), line.endswith(b"\n")
        while line and not line.endswith(b"\n"):
            line = stream.readline(LINE_BYTES)
            size += len(line)
        if not line:  # cut short by a kill
            return
        yield offset, (b"" if not is_whole else line)
        offset += size


def _next_line(stream: BinaryIO, position: int) -> tuple[int, int | None]:
    """Offset and step of the first line with a step that begins at `position` or later; the file's end without one."""
    stream.seek(max(0, position - 1))
    if position:
        stream.readline()  # to the line break before the first candidate
    start = stream.tell()
    while line := stream.readline():
        if head := HEAD.match(line):
            return start, int(head[1])
        start += len(line)
    return start, None
