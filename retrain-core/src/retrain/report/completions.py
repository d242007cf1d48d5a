"""The completions on the page: the best, the worst and random ones of a few steps, with long texts shortened.

The lines of a step are streamed; only shortened texts are kept.
"""

from __future__ import annotations

import json
import os
import re
from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError
from retrain.kernel.seeding import Seeds
from retrain.records.reading import last_record, number, parse_record, table_of
from retrain.records.record_names import GENERATIONS
from retrain.report.gather import Material, ReportRun, evaluated_steps
from retrain.report.parts import Excerpt, Fold, Heading, Link, Links, Part, Section, Tiles, note
from retrain.text.amounts import counted

# Best, worst and random completions per step. With several conditions one of each keeps the page readable.
OF_EACH_SINGLE, OF_EACH = 2, 1
REASONS = {"eos": "ended", "length": "cut off at max_tokens", "turns": "out of turns"}
SELECTION = (
    "Of the first, middle and last evaluated step the completions with the highest and the lowest reward, and "
    "random ones; equal rewards in random order. They are model output: text, shown as such."
)
# The end is kept too, because answers are there.
HEAD_CHARS, TAIL_CHARS = 2400, 1200
TOKENS_SHOWN = 6
PARTS_SHOWN = 12
# Bounds the time that one step takes; where a step is larger, the page says so.
STEP_BYTES = 64 << 20


def completions_section(material: Material, links: Links) -> Section | None:
    """Return a foldable part for each shown condition, from its first run with completions; the first one open."""
    of_each = OF_EACH_SINGLE if len(material.shown) == 1 else OF_EACH
    folds: list[Fold] = []
    for label in material.shown:
        for run in material.drawn(label):
            if parts := _picked(run, of_each, links):
                seed = "" if run.candidate.seed is None else f"seed {run.candidate.seed}"
                folds.append(Fold(label, parts, kind="condition", level=3, remark=seed, is_open=not folds))
                break
    return Section("completions", "Completions", [note(SELECTION), *folds]) if folds else None


def _picked(run: ReportRun, of_each: int, links: Links) -> list[Part]:
    if run.candidate.folder is None:
        return []
    file, parts = run.candidate.folder / GENERATIONS, []
    for step in shown_steps(file, evaluated_steps(run)):
        if picked := read_samples(file, step, of_each=of_each, key=run.candidate.condition):
            unread = f", {counted(picked.num_passed_over, 'line')} could not be read" if picked.num_passed_over else ""
            cut = ", only the first 64 MB of the step were read" if picked.is_cut else ""
            source = f"from {counted(picked.num_completions, 'completion')}{unread}{cut}"
            link = links.to(file, "generations.jsonl")
            cards = [replace(each, file=link) for each in picked.samples]
            parts += [Heading(f"Step {step:,}", 4, source), Tiles("cards", cards)]
    return parts


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
        """The reward, or the reason why it is missing."""
        if self.reward is not None:
            return f"reward {self.reward:g}"
        return "no verdict" if self.outcome in ("", "no_verdict", "scored") else self.outcome

    @property
    def remarks(self) -> str:
        """The reason of its end, its length, and a mark if it was not trained."""
        tokens = "" if self.num_tokens is None else counted(self.num_tokens, "token")
        reason = REASONS.get(self.stop_reason, self.stop_reason)
        return ", ".join(filter(None, (reason, tokens, "" if self.trained else "not trained")))


def card_of(record: Mapping[str, Any], *, kind: str, offset: int) -> Card:
    """Return the shown parts of a line of `generations.jsonl`, with tolerance for any content."""
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
    """Return an excerpt of a text, of messages with their roles, or of the JSON of another value."""
    if isinstance(value, str):
        whole = value
    elif isinstance(value, list) and all(isinstance(each, dict) and "content" in each for each in value):
        whole = "\n\n".join(f"{each.get('role', '')}: {each['content']}" for each in value)
    else:
        whole = "" if value is None else json.dumps(value, ensure_ascii=False)
    left_out = len(whole) - HEAD_CHARS - TAIL_CHARS
    return Excerpt(whole) if left_out <= 0 else Excerpt(whole[:HEAD_CHARS], whole[-TAIL_CHARS:], left_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The selection from a step, and its number of completions.

    `num_passed_over` lines could not be read; with `is_cut` only the beginning of the step was read.
    """

    samples: tuple[Card, ...]
    num_completions: int
    num_passed_over: int
    is_cut: bool


def shown_steps(file: Path, evaluated: Sequence[int], most: int = 3) -> list[int]:
    """Return the first, middle and last evaluated step in the file, or of all steps; 0 is before training."""
    if (last := last_step(file)) is None:
        return []
    candidates = sorted({max(0, step) for step in evaluated if step <= last}) if len(evaluated) > 1 else []
    candidates = candidates if len(candidates) > 1 else list(range(last + 1))
    indices = {round(index * (len(candidates) - 1) / max(1, most - 1)) for index in range(most)}
    return [candidates[index] for index in sorted(indices)]


def read_samples(file: Path, step: int, *, of_each: int, key: str) -> StepSamples | None:
    """Return `of_each` best, worst and random completions of a step, each once; None if the file has no line of it.

    Ties are broken at random, reproducibly for the same `key` and step.
    """
    # Fixed, so that the same files give the same page.
    rng = Seeds(0).stream("report", key, step)
    ranked: dict[str, list[tuple[tuple[float, float], Card]]] = {"best": [], "worst": [], "random": []}
    # The best may also be among the worst and the random ones, and each is shown once.
    most = 3 * of_each
    num_completions = num_passed_over = size = 0
    try:
        with open_regular(file) as stream:
            for offset, line in lines_of(stream, step, most_bytes=STEP_BYTES):
                size += len(line)
                record = record_of(line)
                if record is None:
                    num_passed_over += 1
                    continue
                num_completions += 1
                reward, tiebreak = number(record.get("reward")), float(rng.random())
                ranks = {"random": (tiebreak, 0.0)}
                if reward is not None:
                    ranks |= {"best": (-reward, tiebreak), "worst": (reward, tiebreak)}
                for kind, rank in ranks.items():
                    found = ranked[kind]
                    if len(found) < most or rank < found[-1][0]:
                        insort(found, (rank, card_of(record, kind=kind, offset=offset)), key=itemgetter(0))
                        del found[most:]
    except OSError:
        return None
    if not num_completions and not num_passed_over:
        return None
    samples: dict[int, Card] = {}
    for found in ranked.values():
        samples |= {card.offset: card for card in [card for _, card in found if card.offset not in samples][:of_each]}
    return StepSamples(
        samples=tuple(samples.values()),
        num_completions=num_completions,
        num_passed_over=num_passed_over,
        is_cut=size > STEP_BYTES,
    )


def record_of(line: bytes) -> Mapping[str, Any] | None:
    """Return the completion on a line of `generations.jsonl`; None where the line is damaged."""
    with suppress(ValueError, RecursionError):
        return parse_record(line, allow_nan=True, allow_overflow=True)
    return None


# A step in the file, found by bisection. Lines are ordered by step, and each begins with its own: `{"step": 12, ...`.

HEAD = re.compile(rb'\{"step": (-?\d{1,18}),')
# A longer line is skipped: a hostile file must not fill the memory.
LINE_BYTES = 16 << 20


def last_step(file: Path) -> int | None:
    with suppress(ConfigError):
        step = (last_record(file, skip_damaged=True) or {}).get("step")
        return step if type(step) is int else None
    return None


def first_offset(stream: BinaryIO, step: int) -> int:
    """Return the offset of the first line of `step` or a later one, or of the end of the file."""
    low, high = 0, stream.seek(0, os.SEEK_END)
    # The offsets of lines are unknown, so the search goes over bytes and moves on to the next line's start.
    while low < high:
        middle = (low + high) // 2
        start, found = _next_line(stream, middle)
        if found is None or found >= step:
            high = middle
        else:
            low = start + 1
    return _next_line(stream, low)[0]


def lines_of(stream: BinaryIO, step: int, *, most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each whole line of a step, up to `most_bytes`; lines beyond 16 MB are empty."""
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
    """Return offset and step of the first line with a step that begins at `position` or later, or the file's end."""
    # One byte earlier, so that a line which begins exactly at the position is not skipped.
    stream.seek(max(0, position - 1))
    if position:
        stream.readline()  # to the line break before the first candidate
    start = stream.tell()
    while line := stream.readline():
        if head := HEAD.match(line):
            return start, int(head[1])
        start += len(line)
    return start, None
