"""The `math` reward: the boxed answer is finished, and mathematically equal to the reference by math-verify."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import ClassVar

from retrain.api import Example, PluginContext, Score
from retrain_rewards.answers.answer import Wanted, are_cased, numbers_of, objection, parsed, wanted
from retrain_rewards.answers.notation import verdict_without_mathematics
from retrain_rewards.answers.rewrites import pair_as_column
from retrain_rewards.answers.size import MAX_LENGTH, refusal
from retrain_rewards.answers.statements import both_as_sets, decimals, rounds_to, spellings, without_names
from retrain_rewards.answers.text import plain
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.tables import RewardTable, time_limit_of
from retrain_rewards.verifiers.match import collapsed, reference_of

_AROUND_COMMAS = re.compile(r"\s*,\s*")
# A library may swallow the first interruption in a bare `except`.
AGAIN_S = 0.5
# Share of the scoring time limit, so that a slow comparison ends here with a reason, not by a kill.
OWN_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    r"""1.0 when the last box of a completion is an answer and math-verify finds it equal to the reference, or 0.0.

    Both are parsed in a box (LaTeX first, then plain expressions), so `math_verify.verify(parse("\\boxed{reference}"),
    parse("\\boxed{answer}"))` decides on equality; `objection` in `answer` defines an answer. With `strict` off
    equality is enough; with `accepts_unfinished` an expression that still has to be computed is an answer. Equal text,
    white space collapsed, is equal before anything is parsed. Without a box, with an empty one, or with one that holds
    no mathematics: 0.0.

    No verdict, where math-verify would say False: the reference cannot be parsed, or evaluates to no number (1/0), and
    the texts differ; the answer or reference is too large to evaluate (`answers.size`); the comparison takes longer
    than `time_limit_s` seconds or runs out of memory. RewardError on an empty reference.
    """

    needs_reference: ClassVar[bool] = True
    answer_in = staticmethod(last_boxed)
    time_limit_s: float
    strict: bool = True
    accepts_unfinished: bool = False

    def prepare(self) -> None:
        # math-verify would warn that its own time limit is off; `time_limit` covers parsing and comparing together
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        self.score(Example(id="warm", prompt="", reference=r"\frac{1}{2}"), boxed(r"\sqrt{0.25}"))

    def score(self, example: Example, text: str) -> Score:
        reference, answer = reference_of(example), last_boxed(text)
        if not answer:
            return Score.of(0.0)
        if collapsed(answer) == reference:
            return Score.of(1.0)
        for name, formula in (("answer", answer), ("reference", reference)):
            if len(formula) > MAX_LENGTH:
                return Score.no_verdict(f"the {name} is longer than {MAX_LENGTH} characters")
        has_angles = "\\langle" in reference + answer or "⟨" in reference + answer
        reference, answer = plain(reference) or reference, plain(answer)
        if has_angles:
            reference, answer = pair_as_column(reference), pair_as_column(answer)
        if not answer:
            return Score.of(0.0)
        for name, formula in (("answer", answer), ("reference", reference)):
            if reason := refusal(formula):
                return Score.no_verdict(f"the {name} {reason}")
        sides = verdict_without_mathematics(reference, answer)
        if isinstance(sides, bool):
            return Score.of(float(sides))
        reference, answer = both_as_sets(*without_names(*sides))
        if _AROUND_COMMAS.sub(",", answer) == _AROUND_COMMAS.sub(",", reference):
            return Score.of(1.0)
        is_cased = are_cased(reference, answer)
        try:
            with time_limit(self.time_limit_s):
                return self._of_spellings(wanted(reference, is_cased), answer, _words(example.prompt))
        except TimeUp:
            return Score.no_verdict(f"comparing took longer than {self.time_limit_s:g} s")
        except (MemoryError, RecursionError) as error:
            return Score.no_verdict(f"comparing ended in {type(error).__name__}")

    def _of_spellings(self, reference: Wanted, answer: str, prompt: str) -> Score:
        r"""Score an answer that may hold its value twice: `\frac{1}{2} \text{ or } 0.5`, `\sqrt{3} \approx 1.73`."""
        if found := decimals(answer):
            exact, rounded, digits = found
            if not any(rounds_to(value, digits) for value in numbers_of(next(iter(parsed(exact)), ()))):
                return Score.of(0.0)
            score = self._judged(reference, exact, prompt)
            return score if score.value else self._judged(reference, rounded, prompt)
        score = self._judged(reference, answer, prompt)
        if score.value == 0.0 and (parts := spellings(answer)):
            return Score.of(float(all(self._judged(reference, part, prompt).value == 1.0 for part in parts)))
        return score

    def _judged(self, reference: Wanted, answer: str, prompt: str) -> Score:
        from math_verify import verify

        golds, targets = reference.golds, parsed(answer, reference.is_cased)
        reasons = []
        if all(isinstance(gold, str) for gold in golds):
            what = "has no value" if reference.form is not None else "is not mathematics"
            reasons.append(f"the reference {reference.text[:80]!r} {what}")
        for gold in golds:
            for target in targets:
                try:
                    if verify(gold, target, timeout_seconds=None, raise_on_error=True):
                        if not self.strict:
                            return Score.of(1.0)
                        is_open = self.accepts_unfinished
                        reason = objection(reference, answer, target, prompt, accept_unfinished=is_open)
                        return Score.of(float(not reason))
                except (MemoryError, RecursionError):
                    raise
                except Exception as error:  # what math-verify or sympy itself cannot compare
                    reasons.append(f"not comparable: {error}")
        return Score.no_verdict(f"{reasons[0]}, and its text differs") if reasons else Score.of(0.0)

    def gold(self, example: Example) -> str:
        return boxed(example.reference)


def make_math(context: PluginContext) -> MathReward:
    table = context.config.table("reward", RewardTable)
    return MathReward(
        time_limit_s=OWN_SHARE * time_limit_of(context.config, "math"),
        strict=table.strict,
        accepts_unfinished=table.unfinished == "accept",
    )


def _words(prompt: object) -> str:
    if isinstance(prompt, str):
        return prompt
    turns = prompt if isinstance(prompt, Sequence) else ()
    return "\n".join(str(turn.get("content", "")) for turn in turns if isinstance(turn, Mapping))


class TimeUp(BaseException):
    """The time limit has passed; no `except Exception` on the way can swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeUp in the block after `seconds`, and again every half second until the block ends.

    It works by SIGALRM, in the main thread; in another thread the block has no limit. A single call into C code, such
    as the power of two long integers, is interrupted only when it returns, so the caller must be able to kill the
    process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, _raise)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
        yield
    finally:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        # The alarm may have come one step before.
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, earlier)


def _raise(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return  # Python would print it and continue; the next alarm finds other code
        frame = frame.f_back
    raise TimeUp
