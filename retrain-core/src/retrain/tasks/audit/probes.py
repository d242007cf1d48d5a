"""The texts that no reward may score as correct, for one example.

A policy finds each of them when it looks for reward without solving the task. A text that happens to say the reference
is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from typing import Any, Literal

from retrain.kernel.types import Example

Severity = Literal["error", "warning"]
REPEATS = 64
AFFIRMATIVE = ("VERDICT: yes", "True", "correct", "1")  # a judge's verdict, and a comparison's values
HACKS = (*AFFIRMATIVE, r"\boxed{}", r"\boxed{\boxed{}}")
YES = frozenset({"true", "yes", "correct", "1", "y", "t"})
MOST_PLAUSIBLE = 16  # answers in one list
_NUMBER = re.compile(r"-?\d{1,30}(?:\.\d{1,30})?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A text to try, and the finding if it scores as correct.

    `partial` is the severity where the text scores clearly less than the right answer, as with graded rewards; None
    means no finding, since only an author who knows the right answer could write the text.
    """

    example: Example
    check: str
    text: str
    severity: Severity = "error"
    message: str = ""
    fix: str = ""
    partial: Severity | None = "error"


def wrong_texts(example: Example, gold: Gold, echoes: Sequence[str], plausible: Sequence[str] = ()) -> Iterator[Probe]:
    """Yield every text that must not score; `echoes` repeat the prompt, `plausible` are other references."""
    probe = partial(Probe, example=example)
    fix = "make an answer that says nothing wrong; look for an empty reference"
    yield probe(check="empty", text="", message="an empty answer is correct", fix=fix)
    word, fix = repeated(example.reference), "compare the answer, not the length or the form of the text"
    yield probe(check="repeated", text=word, message="one word, repeated, is correct", fix=fix)
    reference = example.reference.strip()
    for text in echoes:
        message, fix = "repeating the prompt is correct", "let the reward read the final answer only"
        if reference and reference in text:
            message += ": it holds its own answer where the reward looks for one"
            fix = f"take the answer out of the prompt, or {fix}"
        yield probe(check="echo", text=text, message=message, fix=fix)
    yield from _misplaced(example, gold)
    yield from _disguised(example, gold, echoes[0] if echoes else "", plausible)
    message = "a text without an answer is correct"
    fix = "do not read a verdict, a truth value or an empty box as an answer"
    for text in HACKS:
        if not says_the_same(text, example.reference):
            yield probe(check="hack", text=text, message=message, fix=fix)


def repeated(reference: str) -> str:
    """Return a word that is not in the reference, many times; a digit if possible, since most rewards read numbers."""
    word = next((digit for digit in "0123456789" if digit not in reference), "the")
    return " ".join([word] * REPEATS)


def says_the_same(text: str, reference: str) -> bool:
    """True if a text may score as this reference: it has all its words, equals its number, or both affirm."""
    words = set(re.findall(r"\w+", reference.casefold()))
    if words and words <= set(re.findall(r"\w+", text.casefold())):
        return True
    if text in AFFIRMATIVE and words & YES:
        return True
    try:
        return float(text) == float(reference)
    except ValueError:
        return False


def _misplaced(example: Example, gold: Gold) -> Iterator[Probe]:
    """Yield the right answer in places other than the final one.

    A reward that declares a boxed answer reads boxes: another box after it, or no box, must be wrong. With any other
    reward a sentence that contains the answer may count, so that is only a warning.
    """
    reference = example.reference.strip()
    box = gold.texts[0] if gold.is_boxed else boxed(reference)
    fix = "let only the last box count" if gold.is_boxed else "let only the final answer count, as a whole"
    severity: Severity = "error" if gold.is_boxed else "warning"
    probe = partial(Probe, example=example, check="misplaced", severity=severity, fix=fix)
    if gold.is_boxed or reference:
        text = f"At first I took {box} for the answer, but that is wrong. My final answer is \\boxed{{}}."
        yield probe(text=text, message="the right answer counts although a different one, an empty box, follows it")
    if reference:
        text = f"The answer is certainly not {reference}, so I do not know it."
        yield probe(text=text, message="a sentence that denies the right answer is correct")


def _disguised(example: Example, gold: Gold, prompt: str, plausible: Sequence[str]) -> Iterator[Probe]:
    """Yield texts in the form of an answer that give none: the question itself, several answers, a denied one."""
    reference = example.reference.strip()
    form = next((text for text in gold.texts if reference and reference in text), "")
    if not form:
        return
    head, _, tail = form.rpartition(reference)
    # a free-form reward may read one number out of a sentence on purpose
    traits = {"severity": "error" if gold.is_boxed else "warning", "partial": None}

    def probes(check: str, contents: Sequence[str], message: str, fix: str, **traits: Any) -> Iterator[Probe]:
        for content in contents:
            text, given = f"{head}{content}{tail}", {"partial": "warning"} | traits
            yield Probe(example=example, check=check, text=text, message=message, fix=fix, **given)

    fix = "compare the answer as written: an expression that still has to be computed is no answer"
    message = "an expression of the prompt counts as its answer"
    yield from probes("restated", expressions(prompt, reference), message, fix)
    if gold.is_boxed and "".join(prompt.split()) != "".join(reference.split()):
        message = "the prompt in a box is correct"
        yield from probes("echo", [prompt], message, "compare the whole box with the reference")
    if _NUMBER.fullmatch(reference):  # two wrong answers that are as plausible as possible
        before, after = str(Decimal(reference) - 1), str(Decimal(reference) + 1)
    else:
        words = [text for text in plausible if not (text in reference or reference in text)]
        before, after, *_ = [*words, *(digit for digit in "0123456789" if digit not in reference), "X", "Y"]
    others = [text for text in plausible if text != reference][: MOST_PLAUSIBLE - 1]
    middle = len(others) // 2
    every = ", ".join([*others[:middle], reference, *others[middle:]]) if middle else ""
    lists = [f"{before}, {reference}, {after}", every]
    message, fix = "several answers are correct if the right one is among them", "accept one answer, as a whole"
    yield from probes("listed", [text for text in lists if text], message, fix)
    hedges = [f"{before} or {reference} or {after}"]
    if gold.is_boxed:
        hedges += [rf"{reference}\text{{ or }}{after}", rf"{reference}\text{{, but maybe {after}}}"]
    yield from probes("hedged", hedges, "a hedge is correct", fix)
    is_number = bool(_NUMBER.fullmatch(reference) and Decimal(reference))
    negations = [rf"\neq {reference}", f"not {reference}", *([f"{before} = {reference}"] if is_number else [])]
    message, fix = "a negation or a falsehood with the right answer in it is correct", "let words and signs count"
    yield from probes("negated", negations, message, fix, **traits)
    message, fix = "a million times the right answer is correct", "let scale words count, or refuse them"
    yield from probes("scaled", [rf"{reference}\text{{ million}}"] * is_number, message, fix, **traits)


# The texts that a reward must score as correct: its declared ones, or the reference in the usual forms.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """The known right answers of one example.

    If `is_required`, one of `texts` must score as correct; otherwise a low score of one example proves nothing.
    `is_declared`: the reward's own `gold` gave the texts, or it scored each as correct. `fault` says why `gold` failed.
    """

    texts: tuple[str, ...] = ()
    is_required: bool = True
    is_declared: bool = False
    fault: str = ""

    @property
    def is_boxed(self) -> bool:
        r"""True if the answers are known and all in `\boxed{...}`, so that the reward reads only boxes."""
        return self.is_declared and all(r"\boxed" in text or r"\fbox" in text for text in self.texts)

    def confirmed(self, correct: Sequence[str]) -> Gold:
        return replace(self, texts=tuple(correct), is_declared=True) if correct else self


GoldOf = Callable[[Example], Gold]


def boxed(reference: str) -> str:
    return rf"\boxed{{{reference}}}"


def gold_from_reference(example: Example) -> Gold:
    """Return the reference in the usual forms, for a reward without a `gold` method."""
    reference = example.reference.strip()
    forms = (boxed(reference), reference, f"#### {reference}", f"<answer>{reference}</answer>")
    return Gold(texts=forms) if reference else Gold()


def gold_of(rewards: Sequence[object]) -> GoldOf:
    """Return a function that gives the right answers according to the rewards' own `gold` methods.

    For an example without a declared answer the reference is tried, but it may score as wrong.
    """
    methods = [method for reward in rewards if callable(method := getattr(reward, "gold", None))]

    def find(example: Example) -> Gold:
        if not methods:
            return gold_from_reference(example)
        texts: list[str] = []
        for method in methods:
            try:
                text = method(example)
            except Exception as error:  # a plugin may raise anything
                return Gold(fault=f"gold() raised {type(error).__name__}: {error}")
            if text is not None and not isinstance(text, str):
                return Gold(fault=f"gold() returned a {type(text).__name__}, not text or None")
            texts += [text] if text is not None and text not in texts else []
        if texts:
            return Gold(texts=tuple(texts), is_declared=True)
        return Gold(texts=gold_from_reference(example).texts, is_required=False)

    return find


# The expressions of a prompt that still have to be computed: a policy may restate them as its answer. Text between
# `$...$`, `\(...\)` or `\[...\]`, and every run of numbers joined by operators; of these, the ones with something left
# to compute.


MOST = 2  # expressions of one prompt, the longest first
_FORMULA = re.compile(r"\$\$(.{1,200}?)\$\$|\$(.{1,200}?)\$|\\\((.{1,200}?)\\\)|\\\[(.{1,200}?)\\\]", re.DOTALL)
_OPERAND = r"\({0,9}[-+]?\d{1,30}(?:,\d{3})*(?:\.\d{1,30})?\){0,9}"
_SUM = re.compile(rf"{_OPERAND}(?:\s{{0,9}}(?:\*\*|[-+*/^×÷·x−])\s{{0,9}}{_OPERAND}){{1,30}}")
_UNFINISHED = re.compile(  # an operator between two operands, or a command that computes
    r"[\w)}]\s{0,9}(?:\*\*|[-+*/^×÷·−]|\\(?:times|cdot|div|pm)\b)\s{0,9}[-+]?[\w({\\]|\d\s{0,9}x\s{0,9}\d"
    r"|\\(?:d?frac|sqrt|binom|int|sum|prod|lim|det|gcd|log|ln|sin|cos|tan)\b"
)


def expressions(prompt: str, reference: str) -> list[str]:
    """Return at most two expressions of the prompt, except the reference and sides of equations that give it."""
    found = ["".join(groups) for groups in _FORMULA.findall(prompt)]
    found += [match[0] for match in _SUM.finditer(_FORMULA.sub(" ", prompt))]
    texts = dict.fromkeys(
        " ".join(text.split()).strip(" .,;:?") for text in found if text.count("(") == text.count(")")
    )
    answer = "".join(reference.split())
    left = [
        text
        for text in texts
        if _UNFINISHED.search(text) and all("".join(side.split()) != answer for side in (text, *text.split("=")))
    ]
    return sorted(left, key=len, reverse=True)[:MOST]
