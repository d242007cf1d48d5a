"""Held-out examples that training has seen: equal or nearly equal texts, found by runs of n words.

A text is read as its words: normalised, without case and punctuation, with its numbers and the signs of arithmetic.
Held-out examples are indexed, training examples stream past, so memory is bounded by the held-out side.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from retrain.kernel.types import Example

WORDS = 8  # words of a run; 8 to 13 are in use (13: GPT-3, arXiv:2005.14165)
NEAR = (
    0.5  # share of a held-out example's runs in one training example: two changed words of forty leave more than half
)
LEAST_COMMON = 8  # runs that a near match needs unless it has them all: a short text may differ in the word that counts
TEMPLATE_SHARE = 0.1  # a run in more of the held-out examples belongs to their template, and tells nothing
LEAST_TEMPLATE = 3
_WORD = re.compile(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[-+*/=<>^%()×÷]")


class Match(StrEnum):
    """How a held-out example is in the training data."""

    EXACT = "exact"  # the same words in the same order
    NEAR = "near"  # half of its runs of n words, at least 8 of them or all, and all of its numbers in one example


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A held-out example that is in the training data, by the id of the training example nearest to it.

    `share` is the share of its runs that the training example has.
    """

    example_id: str
    training_id: str
    match: Match
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contamination:
    """One set of held-out examples against the training data.

    `overlaps` are in order of the set, one per contaminated example. `touched` have at least one run in common with
    some training example, `templates` share the words of one but not its numbers: neither is contamination.
    """

    name: str
    held_out: int
    training: int
    words: int
    overlaps: tuple[Overlap, ...]
    touched: int
    templates: int

    @property
    def rate(self) -> float:
        """Share of the held-out examples that training has seen."""
        return len(self.overlaps) / self.held_out if self.held_out else 0.0

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        plain = {name: getattr(self, name) for name in Contamination.__slots__ if name != "overlaps"}
        overlaps = [{name: getattr(each, name) for name in Overlap.__slots__} for each in self.overlaps]
        return {**plain, "rate": self.rate, "overlaps": overlaps}


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text: compatibility forms unified (NFKC), case folded, punctuation and white space dropped."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def task_text(example: Example) -> str:
    """What an example asks: its prompt, or the user's turns of a chat; what every chat says first is no part of it."""
    if isinstance(example.prompt, str):
        return example.prompt
    asked = [str(message["content"]) for message in example.prompt if message["role"] == "user"]
    return "\n".join(asked or (str(message["content"]) for message in example.prompt))


@dataclass(slots=True, kw_only=True, eq=False)
class _HeldOut:
    example_id: str
    words: tuple[str, ...]
    runs: frozenset[int]
    best: Overlap | None = None
    is_touched: bool = False
    is_template: bool = False

    @property
    def numbers(self) -> Counter[str]:
        return _numbers(self.words)


@dataclass(slots=True, kw_only=True, eq=False)
class HeldOutIndex:
    """The held-out examples of one set by their texts and their runs of `words` words.

    Runs that more than a tenth of the examples have, at least three, are left out: they are those of a template.
    """

    name: str
    words: int = WORDS
    _examples: list[_HeldOut] = field(default_factory=list)
    _by_text: dict[tuple[str, ...], list[_HeldOut]] = field(default_factory=dict)
    _by_run: dict[int, list[_HeldOut]] = field(default_factory=dict)
    _training: int = 0

    @classmethod
    def of(cls, name: str, examples: Sequence[Example], *, words: int = WORDS) -> HeldOutIndex:
        """The index of these examples."""
        index = cls(name=name, words=words)
        read = [(example.id, words_of(task_text(example))) for example in examples]
        counts = Counter(run for _, found in read for run in _runs(found, words))
        most = max(LEAST_TEMPLATE - 1, TEMPLATE_SHARE * len(read))
        for example_id, found in read:
            runs = frozenset(run for run in _runs(found, words) if counts[run] <= most)
            each = _HeldOut(example_id=example_id, words=found, runs=runs)
            index._examples.append(each)
            index._by_text.setdefault(found, []).append(each)
            for run in runs:
                index._by_run.setdefault(run, []).append(each)
        return index

    def see(self, example: Example) -> None:
        """Hold one training example against all held-out ones; nothing of it is kept but its id where it is found."""
        self._training += 1
        words = words_of(task_text(example))
        for each in self._by_text.get(words, ()):
            each.best = Overlap(example_id=each.example_id, training_id=example.id, match=Match.EXACT, share=1.0)
        common: dict[int, tuple[_HeldOut, int]] = {}
        for run in _runs(words, self.words):
            for each in self._by_run.get(run, ()):
                common[id(each)] = each, common.get(id(each), (each, 0))[1] + 1
        numbers = _numbers(words) if common else Counter[str]()
        for each, count in common.values():
            self._weigh(each, example, numbers, count)

    def _weigh(self, each: _HeldOut, example: Example, numbers: Counter[str], count: int) -> None:
        each.is_touched, share = True, count / len(each.runs)
        is_near = share >= NEAR and (count >= LEAST_COMMON or share == 1.0)
        if not is_near or (each.best and each.best.share >= share):
            return
        if each.numbers <= numbers:  # each of its numbers, as often
            each.best = Overlap(example_id=each.example_id, training_id=example.id, match=Match.NEAR, share=share)
        else:
            each.is_template = True

    def found(self) -> Contamination:
        """What all training examples seen so far say."""
        return Contamination(
            name=self.name,
            held_out=len(self._examples),
            training=self._training,
            words=self.words,
            overlaps=tuple(each.best for each in self._examples if each.best),
            touched=sum(each.is_touched for each in self._examples),
            templates=sum(each.is_template and each.best is None for each in self._examples),
        )


def contamination(sets: Iterable[HeldOutIndex], training: Iterable[Example]) -> tuple[Contamination, ...]:
    """Every set against the training examples, which are gone through once and not kept."""
    indices = list(sets)
    for example in training:
        for index in indices:
            index.see(example)
    return tuple(index.found() for index in indices)


def _runs(words: Sequence[str], size: int) -> set[int]:
    """Hashes of all runs of `size` words; none in a shorter text, which can only be found whole."""
    return {hash(tuple(words[start : start + size])) for start in range(len(words) - size + 1)}


def _numbers(words: Sequence[str]) -> Counter[str]:
    return Counter(word for word in words if word[0].isdigit())
