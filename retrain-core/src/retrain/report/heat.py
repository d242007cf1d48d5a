"""Credit as colours: the data of each completion, the colour scale, the terminal view, and the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from retrain.kernel.types import Floats, Mask, Turns
from retrain.report.shell import page
from retrain.text.terminal_text import printable

# Below 1, so that completions with little credit stay visible next to others with much.
GAMMA = 0.6
# The weakest token of a completion keeps some colour: no colour means no credit.
FLOOR = 0.25
# Percent: a few extreme tokens must not wash out the others.
OUTLIERS_AT = (2, 98)
# Shares closer than this differ only by rounding, and get one colour.
EVEN = 1e-6
LARGEST = 10  # tokens that the page links to
Place = tuple[int, int, int, int]  # group, index, flow, token
Places = Mapping[Place, int]  # the rank of those to jump to, from 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadedCompletion:
    """One completion under several flows: `credits[f]` is its token credit under flow f."""

    group: int
    index: int
    example_id: str
    prompt: str
    reference: str
    reward: float
    trained: bool
    token_texts: Sequence[str]
    logprobs_T: Floats
    planning_T: Mask
    entropies_T: Floats | None
    credits: Sequence[Floats]
    is_right: bool = False  # its reward is above `[scoring] correct_above`
    turns: Turns = field(default_factory=lambda: Turns(lengths=()))

    def turn_titles(self) -> Mapping[int, str]:
        """Return a title for the first token of each turn; {} for a single turn."""
        starts, rewards_K = np.cumsum([0, *self.turns.lengths[:-1]]).tolist(), self.turns.rewards_of(self.reward)
        pairs = enumerate(zip(starts, rewards_K, strict=True), 1) if len(starts) > 1 else ()
        return {at: f"turn {k}, reward {reward:g}" for k, (at, reward) in pairs}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadedStep:
    """A step's completions under several flows, with one label per flow."""

    run: str
    step: int
    sepa_lambda: float
    labels: Sequence[str]
    completions: Sequence[ShadedCompletion]

    def groups(self) -> list[list[ShadedCompletion]]:
        """Return the completions of each prompt; groups that were trained on come first."""
        by_group: dict[int, list[ShadedCompletion]] = {}
        for completion in self.completions:
            by_group.setdefault(completion.group, []).append(completion)
        return sorted(by_group.values(), key=lambda group: not any(each.trained for each in group))

    def scale(self) -> Scale:
        credited = [c for row in self.completions for c in row.credits if c.size and abs(c).max() > 0.0]
        sizes = [float(abs(c).mean()) for c in credited]
        shares = np.concatenate([abs(c) / abs(c).mean() for c in credited]) if credited else np.ones(1)
        low, high = np.percentile(shares, OUTLIERS_AT)
        return Scale(largest=max(sizes, default=1.0), low=float(low), high=float(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Maps credit to colour depth.

    depth = sign * (m / largest)^0.6 * (0.25 + 0.75 r): m is the completion's mean absolute credit, where r
    is 0 if the token's share of it, |credit| / m, is at the 2nd percentile of all shares shown, 1 at the 98th. The
    colours thus show both how much a completion counts and which of its tokens count most.
    """

    largest: float
    low: float
    high: float

    def depths(self, credit_T: Floats) -> Floats:
        """Return the depth in [-1, 1] of each token of one completion."""
        mean = float(np.abs(credit_T).mean()) if credit_T.size else 0.0
        if mean == 0.0:
            return np.zeros(credit_T.shape)
        spread = self.high - self.low
        shares_T = np.abs(credit_T) / mean
        rank_T = np.clip((shares_T - self.low) / spread, 0.0, 1.0) if spread > EVEN else np.full(shares_T.shape, 0.5)
        depths_T: Floats = np.sign(credit_T) * (mean / self.largest) ** GAMMA * (FLOOR + (1.0 - FLOOR) * rank_T)
        return depths_T


def show(step: ShadedStep, console: Console, *, most: int) -> None:
    """Print up to `most` completions, trained groups first, each under its prompt.

    The background is green (credit) or red (blame), and planning tokens are underlined.
    """
    scale = step.scale()
    console.print(Text(f"{step.run} step {step.step}, lambda = {step.sepa_lambda:g}", style="bold"))
    shown = [completion for group in step.groups() for completion in group][:most]
    for number, completion in enumerate(shown):
        if number == 0 or completion.group != shown[number - 1].group:
            console.print(Text(f"\n{group_title(completion)} | answer {printable(completion.reference)}", style="bold"))
            console.print(Text(printable(completion.prompt), style="dim"))
        console.print(Text(f"\ncompletion {completion.index} | reward {completion.reward:g}", style="bold"))
        for label, credit_T in zip(step.labels, completion.credits, strict=True):
            total = (
                f"sum {credit_T.sum():+.3f}, from {credit_T.min():+.3f} to {credit_T.max():+.3f}"
                if credit_T.size
                else ""
            )
            console.print(Text(f"{label}  ({total})", style="magenta"))
            console.print(Text.assemble(*_styled(completion, credit_T, scale)))
    hidden = len(step.completions) - most
    if hidden > 0:
        console.print(Text(f"\n{hidden} more completions: --most N shows more, --html FILE all of them", style="dim"))


def group_title(completion: ShadedCompletion) -> str:
    return f"group {completion.group}" + ("" if completion.trained else " | not trained")


def _styled(completion: ShadedCompletion, credit_T: Floats, scale: Scale) -> Iterator[tuple[str, str]]:
    depths_T, titles = scale.depths(credit_T).tolist(), completion.turn_titles()
    tokens = zip(completion.token_texts, depths_T, completion.planning_T, strict=True)
    for at, (text, depth, is_planning) in enumerate(tokens):
        if at in titles:
            yield f"{chr(10) if at else ''}[{titles[at]}] ", "dim"
        # Black text stays readable on the deepest shade, 90 of 255.
        level = round(255 - 165 * abs(depth))
        background = f"rgb({level},255,{level})" if depth > 0 else f"rgb(255,{level},{level})"
        colour = f"black on {background}" if depth else "default"
        yield printable(text.replace("\n", "⏎")), colour + (" underline" if is_planning else "")


def render(step: ShadedStep) -> str:
    """Return the page, without a script. Completions, prompts and references are untrusted and escaped."""
    scale, places = step.scale(), largest_credits(step)
    found = page(
        "report/heat.html.jinja",
        # Each token has its own colour in a style attribute, and hashes of a policy do not cover attributes.
        styles="'unsafe-inline'",
        kicker="retrain credit",
        title=f"Credit of {step.run}, step {step.step}",
        step=step,
        places=places,
        num_right=sum(completion.is_right for completion in step.completions),
        num_planning=sum(bool(completion.planning_T.any()) for completion in step.completions),
        group_title=group_title,
        tokens=partial(_tokens, scale, places),
    )
    return found.html


def largest_credits(step: ShadedStep) -> Places:
    """Return the rank, from 1, of the token with the most credit or blame of each completion under any flow."""
    found: list[tuple[float, Place]] = []
    for completion in step.completions:
        most = [
            (float(np.abs(credit_T).max()), flow) for flow, credit_T in enumerate(completion.credits) if credit_T.size
        ]
        size, flow = max(most, default=(0.0, 0), key=lambda pair: pair[0])
        if size > 0.0:
            position = int(np.abs(completion.credits[flow]).argmax())
            found.append((-size, (completion.group, completion.index, flow, position)))
    return {place: rank for rank, (_, place) in enumerate(sorted(found)[:LARGEST], start=1)}


def _tokens(scale: Scale, places: Places, completion: ShadedCompletion, flow: int) -> Iterator[Mapping[str, Any]]:
    credit_T = completion.credits[flow]
    depths_T, titles = scale.depths(credit_T).tolist(), completion.turn_titles()
    for position, (text, credit, depth) in enumerate(zip(completion.token_texts, credit_T, depths_T, strict=True)):
        facts = [f"token {position}", f"credit {credit:+.6f}", f"log p {completion.logprobs_T[position]:.4f}"]
        if completion.entropies_T is not None:
            facts.append(f"entropy {completion.entropies_T[position]:.4f}")
        if completion.planning_T[position]:
            facts.append("planning")
        yield {
            "text": text,
            "colour": f"rgba(var(--{'credit' if depth > 0 else 'blame'}),{abs(depth):.3f})" if depth else "transparent",
            "title": " | ".join(facts),
            "is_planning": bool(completion.planning_T[position]),
            "turn": titles.get(position, ""),
            "rank": places.get((completion.group, completion.index, flow, position)),
        }
