"""The account of one run: tokens by cause, prompts, credit, cost of held-out gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from retrain.inspect.signal.causes import CAUSES, Cause, causes_of
from retrain.inspect.signal.credit_share import CreditShares, read_credit
from retrain.inspect.signal.drawn import Drawn, Ints, read_drawn
from retrain.inspect.signal.gain import Gain, gain_of
from retrain.inspect.signal.prompts import Forecasts, PromptAccount, forecast_groups, prompt_accounts
from retrain.inspect.signal.recorded import Recorded, read_recorded
from retrain.kernel.errors import ConfigError
from retrain.records.record_names import GENERATIONS
from retrain.records.run import Run
from retrain.records.runs.source import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Tokens, and the completions that they belong to; None where one completion has tokens of several causes."""

    tokens: int = 0
    completions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Account:
    """What a run drew. `tallies` add up to `drawn_tokens`; `stated_tokens` is what the lines of its steps say.

    `by_step`: the steps [S], and their tokens by CAUSES [S, C], evaluations and what has no record aside.
    """

    name: str
    condition: str
    seed: int | None
    state: str
    num_steps: int
    tallies: Mapping[Cause, Tally]
    by_step: tuple[Ints, Ints]
    stated_tokens: int
    num_groups: int
    teaching_groups: int
    seconds: float
    sft_tokens: int
    prompts: Sequence[PromptAccount]
    forecasts: Forecasts
    credit: CreditShares
    gain: Gain | str
    notes: tuple[str, ...] = field(default=())

    @property
    def drawn_tokens(self) -> int:
        """All tokens of which there is any record."""
        return sum(tally.tokens for tally in self.tallies.values())

    @property
    def step_tokens(self) -> int:
        """Those of its steps: without evaluations."""
        return self.drawn_tokens - self.tallies.get(Cause.EVALUATION, Tally()).tokens

    def share(self, cause: Cause) -> float:
        """The share of a cause in all that was drawn; 0 if nothing was."""
        return self.tallies.get(cause, Tally()).tokens / max(1, self.drawn_tokens)


def read_account(candidate: Candidate) -> Account:
    """The account of a run that has a folder; ConfigError names what of it cannot be read."""
    assert candidate.folder is not None, "the caller checks"
    run = Run(candidate.folder)
    recorded, drawn = read_recorded(run), read_drawn(run)
    cause_N, teaches_G = causes_of(drawn, recorded.facts)
    credit = read_credit(run, drawn)
    is_trained_N = cause_N == CAUSES.index(Cause.TRAINED)
    taught_N = np.where(is_trained_N, drawn.tokens_N - np.where(credit.is_known_N, credit.zero_tokens_N, 0), 0)
    forecasts, book = forecast_groups(drawn, teaches_G, correct_above=recorded.correct_above)
    tallies, steps_note = _tallies(drawn, recorded, credit, cause_N, is_trained_N)
    missing = "" if run.has(GENERATIONS) else "no completion is stored: the run has just begun"
    return Account(
        name=candidate.name,
        condition=candidate.condition,
        seed=candidate.seed,
        state=candidate.state,
        num_steps=len(recorded.facts.steps),
        tallies=tallies,
        by_step=_by_step(drawn, cause_N, taught_N),
        stated_tokens=sum(step.sampled_tokens or 0 for step in recorded.facts.steps.values()),
        num_groups=drawn.starts_G.size,
        teaching_groups=int(teaches_G.sum()),
        seconds=recorded.seconds,
        sft_tokens=recorded.sft_tokens,
        prompts=prompt_accounts(
            drawn,
            taught_N,
            credit.credit_N,
            teaches_G,
            book,
            group_size=recorded.group_size or 1,
            correct_above=recorded.correct_above,
        ),
        forecasts=forecasts,
        credit=credit,
        gain=gain_of(run.folder, recorded.held_out),
        notes=tuple(note for note in (missing, *recorded.notes, steps_note, *credit.notes) if note),
    )


def _tallies(
    drawn: Drawn, recorded: Recorded, credit: CreditShares, cause_N: Ints, is_trained_N: np.ndarray
) -> tuple[dict[Cause, Tally], str]:
    """Tokens and completions by cause; a note on steps whose line and completions disagree."""
    tokens_C = np.bincount(cause_N, weights=drawn.tokens_N, minlength=len(CAUSES)).astype(np.int64)
    count_C = np.bincount(cause_N, minlength=len(CAUSES))
    found = {cause: Tally(tokens=int(tokens_C[i]), completions=int(count_C[i])) for i, cause in enumerate(CAUSES)}
    is_known_N = is_trained_N & credit.is_known_N
    zero, known = int(credit.zero_tokens_N[is_known_N].sum()), int(drawn.tokens_N[is_known_N].sum())
    trained = found[Cause.TRAINED]
    found[Cause.TAUGHT] = Tally(tokens=known - zero, completions=int(is_known_N.sum()))
    found[Cause.ZERO_CREDIT] = Tally(tokens=zero)
    found[Cause.TRAINED] = Tally(
        tokens=trained.tokens - known, completions=(trained.completions or 0) - int(is_known_N.sum())
    )
    unrecorded, note = _unrecorded(drawn, recorded)
    found[Cause.UNRECORDED] = Tally(tokens=unrecorded)
    found[Cause.EVALUATION] = Tally(tokens=recorded.eval_tokens or 0)
    return {cause: tally for cause, tally in found.items() if tally.tokens or tally.completions}, note


def _by_step(drawn: Drawn, cause_N: Ints, taught_N: Ints) -> tuple[Ints, Ints]:
    """The steps, and their tokens by cause; of trained completions those that taught, and the others."""
    steps_S, step_N = np.unique(drawn.step_N, return_inverse=True)
    tokens_SC = np.zeros((steps_S.size, len(CAUSES)), dtype=np.int64)
    is_trained_N = cause_N == CAUSES.index(Cause.TRAINED)
    np.add.at(tokens_SC, (step_N, cause_N), np.where(is_trained_N, 0, drawn.tokens_N))
    np.add.at(tokens_SC[:, CAUSES.index(Cause.TAUGHT)], step_N, taught_N)
    np.add.at(
        tokens_SC[:, CAUSES.index(Cause.ZERO_CREDIT)], step_N, np.where(is_trained_N, drawn.tokens_N - taught_N, 0)
    )
    return steps_S, tokens_SC


def _unrecorded(drawn: Drawn, recorded: Recorded) -> tuple[int, str]:
    """Tokens that steps say they drew beyond those of their completions; a note where they say less."""
    steps, inverse = np.unique(drawn.step_N, return_inverse=True)
    sums = np.bincount(inverse, weights=drawn.tokens_N).astype(int)
    stored = dict(zip(steps.tolist(), sums.tolist(), strict=False))
    lacking, odd = 0, 0
    for step, facts in recorded.facts.steps.items():
        if facts.sampled_tokens is not None:
            lacking += max(0, facts.sampled_tokens - stored.get(step, 0))
            odd += facts.sampled_tokens < stored.get(step, 0)
    return lacking, f"{odd:,} steps have more tokens in their completions than in their line" if odd else ""


def problem_of(candidate: Candidate) -> str:
    """Why a run has no account; empty if it has one."""
    if candidate.folder is None:
        return candidate.state
    return candidate.problem


def try_account(candidate: Candidate) -> Account | str:
    """The account of a run, or why there is none."""
    if problem := problem_of(candidate):
        return problem
    try:
        return read_account(candidate)
    except ConfigError as error:
        return "; ".join(f"{each.where}: {each.what}" for each in error.problems)
