"""The conformance checks for planning detectors, and the sentences that this one marks."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import numpy as np
import pytest
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import QuestionDetector


@pytest.mark.parametrize("check", conformance("planning-detector", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def marked(text: str) -> str:
    """The marked characters, with one token per character."""
    detector = QuestionDetector(chr)
    (mask_T,) = detector.masks([np.array([ord(character) for character in text], dtype=np.int64)])
    return "".join(character for character, is_marked in zip(text, mask_T, strict=True) if is_marked)


@pytest.mark.parametrize(
    ("text", "planning"),
    [
        ("It is 4. Is that so? It is.", " Is that so?"),
        ("Let's add them. 2 + 2 = 4.", "Let's add them."),
        ("WAIT, no. Thenceforth it is 5.", "WAIT, no."),
        ("The answer is 4", ""),
        ("", ""),
    ],
)
def test_questions_and_announcements_are_marked(text: str, planning: str) -> None:
    assert marked(text) == planning
