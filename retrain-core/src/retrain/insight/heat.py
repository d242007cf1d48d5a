"""Credit as pictures: what is shown of each completion, its colours, and the terminal view."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from retrain.loop.lines import printable
from retrain.types import Floats, Mask

GAMMA = 0.6  # small credit must still be seen beside large


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadedCompletion:
    """One completion under several flows: `credits[f]` is its token credit under flow f; `pieces` its text by token."""

    group: int
    index: int
    example_id: str
    prompt: str
    reference: str
    reward: float
    trained: bool
    pieces: Sequence[str]
    logprobs_T: Floats
    planning_T: Mask
    entropies_T: Floats | None
    credits: Sequence[Floats]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShadedStep:
    """A step's completions under several flows, one label each."""

    run: str
    step: int
    sepa_lambda: float
    labels: Sequence[str]
    completions: Sequence[ShadedCompletion]

    def largest(self) -> float:
        """Largest absolute credit, the end of the colour scale; 1 when there is no credit at all."""
        sizes = [float(abs(c).max()) for completion in self.completions for c in completion.credits if c.size]
        return max(sizes, default=0.0) or 1.0


def strength(credit: float, largest: float) -> float:
    """Depth of colour in [-1, 1]: sign of the credit, and its size on a scale that keeps small ones visible."""
    size = min(abs(credit) / largest, 1.0)
    return float(size**GAMMA) * (1.0 if credit >= 0 else -1.0)


def show(step: ShadedStep, console: Console, *, most: int) -> None:
    """Print up to `most` completions: text on green (credit) or red (blame), planning tokens underlined."""
    largest = step.largest()
    console.print(Text(f"{step.run} step {step.step}, lambda = {step.sepa_lambda:g}", style="bold"))
    for completion in step.completions[:most]:
        head = f"\ngroup {completion.group} completion {completion.index} | reward {completion.reward:g}"
        state = "" if completion.trained else " | not trained"
        console.print(Text(f"{head} | answer {printable(completion.reference)}{state}", style="bold"))
        console.print(Text(printable(completion.prompt), style="dim"))
        for label, credit_T in zip(step.labels, completion.credits, strict=True):
            total = (
                f"sum {credit_T.sum():+.3f}, from {credit_T.min():+.3f} to {credit_T.max():+.3f}"
                if credit_T.size
                else ""
            )
            console.print(Text(f"{label}  ({total})", style="magenta"))
            line = Text()
            for piece, style in _styled(completion, credit_T, largest):
                line.append(piece, style=style)
            console.print(line)
    hidden = len(step.completions) - most
    if hidden > 0:
        console.print(Text(f"\n{hidden} more completions: --most N shows more, --html FILE all of them", style="dim"))


def _styled(completion: ShadedCompletion, credit_T: Floats, largest: float) -> Iterator[tuple[str, str]]:
    for piece, credit, is_planning in zip(completion.pieces, credit_T, completion.planning_T, strict=True):
        depth = strength(float(credit), largest)
        level = round(255 - 165 * abs(depth))
        background = f"rgb({level},255,{level})" if depth > 0 else f"rgb(255,{level},{level})"
        colour = f"black on {background}" if depth else "default"
        yield (
            piece.replace("\n", "⏎") if not piece.isprintable() else piece,
            colour + (" underline" if is_planning else ""),
        )
