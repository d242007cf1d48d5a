r"""The `math` reward: the boxed answer is mathematically equal to the reference, as math-verify sees it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from retrain.api import Example, PluginContext, RewardError, Score
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.deadline import TimeUp, time_limit, time_limit_of
from retrain_rewards.match import collapsed
from retrain_rewards.math_size import refusal

OWN_SHARE = 0.8  # of the scoring time limit, so that a slow comparison ends here with its reason, not by a kill
CACHED_REFERENCES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class MathReward:
    """1.0 when math-verify finds the last box of a completion equal to the reference, else 0.0.

    Both stand in a box when they are parsed (LaTeX first, then plain expressions), so `math_verify.verify(parse(
    "\\boxed{reference}"), parse("\\boxed{answer}"))` is what decides. Equal text, white space collapsed, is equal
    before anything is parsed. Without a box, with an empty one, or with one that holds no mathematics: 0.0.

    No verdict, where math-verify would say False: the reference cannot be parsed, or evaluates to no number (1/0), and
    the texts differ; the answer or reference is too large to evaluate (see `math_size`); the comparison takes longer
    than `time_limit_s` seconds or runs out of memory. RewardError on an empty reference.
    """

    needs_reference: ClassVar[bool] = True
    time_limit_s: float

    def prepare(self) -> None:
        """Load sympy and the parser's tables, which takes seconds."""
        # math-verify would warn that its own time limit is off; ours covers parsing and comparing together
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        _equal(r"\frac{1}{2}", "0.5")

    def score(self, example: Example, text: str) -> Score:
        """Score one completion."""
        reference, answer = collapsed(example.reference), last_boxed(text)
        if not reference:
            raise RewardError(f"example {example.id} has an empty reference: nothing can equal it")
        if not answer:
            return Score.of(0.0)
        if collapsed(answer) == reference:
            return Score.of(1.0)
        for name, formula in (("answer", answer), ("reference", example.reference)):
            if reason := refusal(formula):
                return Score.no_verdict(f"the {name} {reason}")
        try:
            with time_limit(self.time_limit_s):
                return _equal(example.reference, answer)
        except TimeUp:
            return Score.no_verdict(f"comparing took longer than {self.time_limit_s:g} s")
        except (MemoryError, RecursionError) as error:
            return Score.no_verdict(f"comparing ended in {type(error).__name__}")

    def gold(self, example: Example) -> str:
        """The reference in a box: it must score 1."""
        return boxed(example.reference)


def make_math(context: PluginContext) -> MathReward:
    """The `math` reward; its time limit is a share of that for scoring."""
    return MathReward(time_limit_s=OWN_SHARE * time_limit_of(context.config, "math"))


def _equal(reference: str, answer: str) -> Score:
    from math_verify import verify

    golds = _parsed_reference(reference)
    reasons = [] if any(not isinstance(gold, str) for gold in golds) else ["the reference has no value"]
    for gold in golds:
        for target in _parsed(answer):
            try:
                if verify(gold, target, timeout_seconds=None, raise_on_error=True):
                    return Score.of(1.0)
            except (MemoryError, RecursionError):
                raise
            except Exception as error:  # what math-verify itself cannot compare
                reasons.append(f"not comparable: {error}")
    return Score.no_verdict(f"{reasons[0]}, and its text differs") if reasons else Score.of(0.0)


@lru_cache(maxsize=CACHED_REFERENCES)
def _parsed_reference(reference: str) -> tuple[Any, ...]:
    from sympy import nan, zoo

    return tuple(gold for gold in _parsed(reference) if isinstance(gold, str) or gold not in (nan, zoo))


def _parsed(formula: str) -> tuple[Any, ...]:
    """The expression, if there is one, and the normalised text; empty if the formula is not mathematics."""
    from math_verify import parse

    try:
        return tuple(parse(boxed(formula), parsing_timeout=None, raise_on_error=True))
    except (MemoryError, RecursionError):
        raise
    except Exception:  # of its normalisation or its parser: both mean that this is not mathematics
        return ()
