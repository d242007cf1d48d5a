"""Credit as pictures: the colour scale, the terminal view, and the page in a real browser."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from retrain.report.heat import Scale, ShadedCompletion, ShadedStep, render, show
from retrain.report.shell import own
from tests.kit.browser import in_frame, needs_chromium

HOSTILE = "<script>document.title='owned'</script>"


def completion(*, token_texts: list[str], credit: list[float], reward: float = 1.0, **more: Any) -> ShadedCompletion:
    size = len(token_texts)
    given = {"group": 0, "index": 0, "example_id": "e", "prompt": "p", "reference": "42", "trained": True, **more}
    return ShadedCompletion(
        **given,
        reward=reward,
        token_texts=token_texts,
        logprobs_T=-np.arange(1.0, size + 1),
        planning_T=np.array([i == 1 for i in range(size)], np.bool_),
        entropies_T=np.full(size, 0.5),
        credits=[np.array(credit), np.array(credit) * 2.0],
        is_right=reward > 0.5,
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
    even = step(completion(token_texts=["a", "b"], credit=[1.0, 1.0])).scale()
    assert (even.depths(np.zeros(3)).any(), np.ptp(even.depths(np.ones(4)))) == (False, 0.0)
    nothing = step(completion(token_texts=["a"], credit=[0.0])).scale()
    assert nothing.depths(np.zeros(1)).tolist() == [0.0]


def test_terminal_view_neutralises_control_characters() -> None:
    stream = io.StringIO()
    shown = step(completion(token_texts=["a\x1b[2J", "b\n", "[red]x"], credit=[1.0, -1.0, 0.5], prompt="p\x07"))
    show(shown, Console(file=stream, force_terminal=False, width=100), most=4)
    text = stream.getvalue()
    assert not {"\x1b", "\x07"} & set(text)
    assert all(part in text for part in ("[red]x", "a+gtpo"))


def test_page_holds_every_token_with_its_numbers_and_no_script() -> None:
    page = render(step(completion(token_texts=["Wait", ",", HOSTILE], credit=[0.5, -0.25, 0.0], prompt=HOSTILE)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert 'title="token 1 | credit -0.250000 | log p -2.0000 | entropy 0.5000 | planning"' in page
    assert not re.search(r"src=|url\(|@import", page)
    assert re.findall(r'href="([^"]*)"', page) == ["#main", "#credit-1"]


def four() -> ShadedStep:
    """A group that was not trained on, and one that was, of a right and a wrong completion; one of them plans."""
    words, long = ["Wait", " so", " 4"], ["x" * 500, " y", "\n" + "z " * 40]
    return step(
        completion(token_texts=["4"], credit=[0.0], prompt="easy", group=0, trained=False),
        completion(token_texts=["4"], credit=[0.0], prompt="easy", group=0, index=1, trained=False),
        completion(token_texts=words, credit=[0.1, 0.9, 0.2], prompt="hard " * 30, group=1),
        completion(token_texts=long, credit=[-0.5, 0.0, -0.1], prompt="hard " * 30, group=1, index=1, reward=0.0),
    )


def test_trained_groups_come_first_and_each_prompt_stands_once() -> None:
    page = render(four())
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads == ["group 1 | 1 of 2 right", "group 0 | not trained | 2 of 2 right"]
    assert (page.count(("hard " * 30).strip()), page.count(">easy<")) == (1, 1)
    stream = io.StringIO()
    show(four(), Console(file=stream, width=200), most=3)
    shown = re.findall("^(?:group|hard hard|easy|completion) ?[0-9]?", stream.getvalue(), re.MULTILINE)
    hard, easy = ["group 1", "hard hard ", "completion 0", "completion 1"], ["group 0", "easy", "completion 0"]
    assert shown == hard + easy


def luminance(colour: Sequence[float]) -> float:
    """Relative luminance of WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: Sequence[float], other: Sequence[float]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_read_on_every_shade(scheme: int) -> None:
    block = own("style.css").split(":root")[2 + scheme].split("}")[0]
    named = {
        name: [int(part[at : at + 2], 16) for at in (0, 2, 4)] for name, part in re.findall(r"--(\w+): #(\w+)", block)
    }
    shades = {name: [int(c) for c in text.split(",")] for name, text in re.findall(r"--(\w+): ([\d, ]+);", block)}
    assert set(shades) == {"credit", "blame"}
    for name in ("ink", "soft", "accent"):
        assert contrast(named[name], named["paper"]) >= 4.5, name
    for name, deepest in shades.items():
        for depth in np.linspace(0.0, 1.0, 101):
            shade = [depth * deep + (1.0 - depth) * paper for deep, paper in zip(deepest, named["paper"], strict=True)]
            assert contrast(named["ink"], shade) >= 4.5, (name, depth)
    assert contrast(shades["credit"], named["paper"]) > 1.3  # and the shade differs from the page
    assert contrast(shades["blame"], named["paper"]) > 1.3


@needs_chromium
def test_a_phone_shows_it_without_sideways_scrolling_and_its_controls_work() -> None:
    """At 390 pixels: width, what each filter leaves, and a jump to a token that the filter hides."""
    found = in_frame(
        render(four()),
        """const page = view.document, at = id => page.getElementById(id);
        const shown = what => [...page.querySelectorAll(what)].filter(e => e.getClientRects().length).length;
        const count = () => [shown("article"), shown(".group")];
        const root = page.documentElement;
        const out = {width: [root.scrollWidth, root.clientWidth, view.innerWidth], all: count()};
        for (const id of ["right", "wrong"]) { at(id).click(); out[id] = count(); }
        at("all").click(); at("planning").click(); out.planning = count();
        const coloured = e => view.getComputedStyle(e).backgroundColor != "rgba(0, 0, 0, 0)";
        out.coloured = [...page.querySelectorAll("article.right .t")].filter(coloured).map(e => e.textContent);
        at("planning").click(); at("wrong").click();
        const link = page.querySelector("nav a"); link.focus();
        out.focused = page.activeElement.getAttribute("href"); link.click();
        const target = page.querySelector(":target");
        out.largest = [target.textContent, target.title, target.getClientRects().length > 0];
        return out;""",
        width_px=390,
    )
    assert found == {
        "width": [found["width"][0], found["width"][0], 390],
        "all": [4, 2],
        "right": [3, 2],
        "wrong": [1, 1],
        "planning": [2, 1],
        "coloured": [" so", " so"],
        "focused": "#credit-1",
        "largest": [" so", "token 1 | credit +1.800000 | log p -2.0000 | entropy 0.5000 | planning", True],
    }
