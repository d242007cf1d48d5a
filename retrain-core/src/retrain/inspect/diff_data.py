"""Compares the batches of two runs: which examples each saw, and the first step whose batch differs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from retrain.inspect.diff_metrics import side_by_side
from retrain.records.reading import Record
from retrain.records.run import Run

MOST_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Digests of one step in sampling order: its examples; its examples with their completions."""

    examples: bytes
    completions: bytes


@dataclass(slots=True)
class Reader:
    """Streams the batches of a run's complete steps; `seen` collects the ids of their examples."""

    run: Run
    last_step: int
    seen: set[str] = field(default_factory=set)

    def batches(self) -> Iterator[tuple[int, Batch]]:
        """Step and batch. What a killed run wrote after its last metrics line is not a complete step."""
        for step, lines in groupby(self.run.completions(required=True), key=lambda line: line[0]):
            if step > self.last_step:
                return
            yield step, self._batch(record for _, record in lines)

    def tokens(self, step: int) -> bytes | None:
        """Digest of the step's token ids, completion by completion; None if the run has no tokens of that step."""
        arrays = self.run.token_arrays(step, ("lengths", "tokens"))
        if arrays is None:
            return None
        digest = hashlib.blake2b()
        for name in ("lengths", "tokens"):
            digest.update(arrays[name].tobytes())
        return digest.digest()

    def _batch(self, records: Iterator[Record]) -> Batch:
        examples, completions = hashlib.blake2b(), hashlib.blake2b()
        for record in records:
            example = str(record.get("example_id"))
            self.seen.add(example)
            examples.update(_framed(example))
            for part in (example, str(record.get("completion")), str(record.get("num_tokens"))):
                completions.update(_framed(part))
        return Batch(examples=examples.digest(), completions=completions.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDiff:
    """How many examples each run saw, the first few that only one saw, and the first differing batch.

    `differing_part` is `examples` (other prompts), `completions` (the same prompts, other texts), `tokens` (the same
    texts from other tokens) or `missing` (one run has no completions of the step).
    """

    num_a: int
    num_b: int
    num_both: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    differing_step: int | None
    differing_part: str

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "examples_a": self.num_a,
            "examples_b": self.num_b,
            "examples_both": self.num_both,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "first_differing_batch": self.differing_step,
            "differing_part": self.differing_part or None,
        }


def compare_data(a: Reader, b: Reader) -> DataDiff:
    """The batches of all steps that both runs finished, in lockstep; memory grows with the examples, not the steps."""
    differing_step, differing_part = None, ""
    last_common = min(a.last_step, b.last_step)
    for step, batch_a, batch_b in side_by_side(a.batches(), b.batches()):
        if differing_step is None and step <= last_common:
            differing_part = _differing_part(step, (a, batch_a), (b, batch_b))
            differing_step = step if differing_part else None
    return DataDiff(
        num_a=len(a.seen),
        num_b=len(b.seen),
        num_both=len(a.seen & b.seen),
        only_a=tuple(sorted(a.seen - b.seen)[:MOST_NAMED]),
        only_b=tuple(sorted(b.seen - a.seen)[:MOST_NAMED]),
        differing_step=differing_step,
        differing_part=differing_part,
    )


def _differing_part(step: int, a: tuple[Reader, Batch | None], b: tuple[Reader, Batch | None]) -> str:
    (reader_a, batch_a), (reader_b, batch_b) = a, b
    if batch_a is None or batch_b is None:
        return "missing"
    if batch_a.examples != batch_b.examples:
        return "examples"
    if batch_a.completions != batch_b.completions:
        return "completions"
    tokens_a, tokens_b = reader_a.tokens(step), reader_b.tokens(step)
    return "tokens" if tokens_a and tokens_b and tokens_a != tokens_b else ""


def _framed(part: str) -> bytes:
    content = part.encode("utf-8", "surrogatepass")
    return len(content).to_bytes(8, "big") + content  # unambiguous where one part ends
