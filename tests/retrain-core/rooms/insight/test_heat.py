"""Credit as pictures: the colour scale, the terminal view, and the page in a real browser."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

from retrain.rooms.insight.heat import Scale, ShadedCompletion, ShadedStep, show
from retrain.rooms.insight.heat_page import render
from tests.browser import dom_of, needs_chromium

HOSTILE = "<script>document.title='owned'</script>"


def completion(
    *, token_texts: list[str], credit: list[float], reward: float = 1.0, prompt: str = "p"
) -> ShadedCompletion:
    size = len(token_texts)
    return ShadedCompletion(
        group=0,
        index=0,
        example_id="e",
        prompt=prompt,
        reference="42",
        reward=reward,
        trained=True,
        token_texts=token_texts,
        logprobs_T=-np.arange(1.0, size + 1),
        planning_T=np.array([i == 1 for i in range(size)], np.bool_),
        entropies_T=np.full(size, 0.5),
        credits=[np.array(credit), np.array(credit) * 2.0],
    )


def step(*completions: ShadedCompletion) -> ShadedStep:
    return ShadedStep(run="run", step=3, sepa_lambda=0.5, labels=["a+none", "a+gtpo"], completions=completions)


def test_depth_follows_sign_size_and_share() -> None:
    scale = Scale(largest=2.0, low=0.5, high=1.5)
    strong, weak = scale.depths(np.array([1.0, 3.0])), scale.depths(np.array([0.1, 0.3]))
    assert strong[1] == pytest.approx(1.0)
    assert strong[0] < strong[1]
    assert np.all(weak < strong)
    np.testing.assert_allclose(scale.depths(np.array([-1.0, -3.0])), -strong)


def test_no_credit_is_no_colour_and_even_credit_is_one_colour() -> None:
    scale = step(completion(token_texts=["a", "b"], credit=[1.0, 1.0])).scale()
    assert not scale.depths(np.zeros(3)).any()
    assert np.ptp(scale.depths(np.ones(4))) == 0.0
    nothing = step(completion(token_texts=["a"], credit=[0.0])).scale()
    assert nothing.depths(np.zeros(1)).tolist() == [0.0]


def test_terminal_view_neutralises_control_characters() -> None:
    stream = io.StringIO()
    shown = step(completion(token_texts=["a\x1b[2J", "b\n", "[red]x"], credit=[1.0, -1.0, 0.5], prompt="p\x07"))
    show(shown, Console(file=stream, force_terminal=False, width=100), most=4)
    text = stream.getvalue()
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x" in text
    assert "a+gtpo" in text


def test_page_holds_every_token_with_its_numbers_and_no_script() -> None:
    page = render(step(completion(token_texts=["Wait", ",", HOSTILE], credit=[0.5, -0.25, 0.0], prompt=HOSTILE)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert 'title="token 1 | credit -0.250000 | log p -2.0000 | entropy 0.5000 | planning"' in page
    assert not re.search(r"(src|href)=", page)


@needs_chromium
def test_page_in_a_browser_shows_hostile_text_as_text() -> None:
    dom = dom_of(
        render(step(completion(token_texts=["Wait", ",", HOSTILE, "\x00\x1b"], credit=[0.5, -0.25, 0.1, 0.2])))
    )
    assert "<title>Credit of run, step 3</title>" in dom
    assert dom.count('<span class="t') == 8
    assert dom.count('<span class="t p"') == 2
    assert "a+none" in dom
    assert "a+gtpo" in dom
