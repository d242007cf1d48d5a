"""The texts that a reward must score as correct: those it declares, or else the reference in the usual forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from retrain.kernel.types import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Gold:
    """What is known about an example's right answer.

    If `is_required`, one of `texts` must score as correct; otherwise a low score of one example proves nothing.
    `is_declared`: the reward's own `gold` gave the texts, or it scored each as correct. `fault` says why `gold` failed.
    """

    texts: tuple[str, ...] = ()
    is_required: bool = True
    is_declared: bool = False
    fault: str = ""

    @property
    def is_boxed(self) -> bool:
        r"""Whether the answers are known and all in `\boxed{...}`, so that the reward reads boxes and nothing else."""
        return self.is_declared and all(r"\boxed" in text or r"\fbox" in text for text in self.texts)

    def confirmed(self, correct: Sequence[str]) -> Gold:
        """The same with the texts alone that scored as correct, if any did."""
        return replace(self, texts=tuple(correct), is_declared=True) if correct else self


GoldOf = Callable[[Example], Gold]


def boxed(reference: str) -> str:
    r"""`\boxed{reference}`."""
    return rf"\boxed{{{reference}}}"


def gold_from_reference(example: Example) -> Gold:
    """The reference in the usual forms, for a reward without a `gold` method."""
    reference = example.reference.strip()
    forms = (boxed(reference), reference, f"#### {reference}", f"<answer>{reference}</answer>")
    return Gold(texts=forms) if reference else Gold()


def gold_of(rewards: Sequence[object]) -> GoldOf:
    """The right answers according to the rewards' own `gold` methods.

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
