"""`retrain signal CAMPAIGN | RUN...`: the tokens that were sampled, and their use, as tables and in a report."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from retrain.inspect.signal import summary
from retrain.inspect.signal.account import Account, CostPerPoint, Gain, try_account
from retrain.inspect.signal.drawn import CAUSES, DECILES, Cause, CreditShares
from retrain.inspect.signal.prompts import Checked, PromptAccount
from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.records.record_names import GENERATIONS
from retrain.records.runs.source import find_runs
from retrain.text.amounts import ABSENT, percent
from retrain.text.command_options import json_option, runs_argument
from retrain.text.tables import rich_table, table_console
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger.looks import InterimLooks

MOST = 5
# About half a minute of reading: a report must not take longer because of one section.
MOST_BYTES = 1 << 30
# Points of a line; more make no visible difference on a page.
POINTS = 200
EPILOG = """\b
Examples:
  retrain signal logs/tiny
  retrain signal logs/campaign_20260301_120000
  retrain signal logs/tiny --json

\b
Exit codes: 0 done; 1 no run could be read; 2 usage error, or no run there.
"""


@click.command("signal", epilog=EPILOG)
@runs_argument()
@click.option("--most", default=MOST, show_default=True, type=click.IntRange(min=0), help="Prompts of a run to list.")
@json_option("As JSON, with every prompt.")
def command(paths: tuple[Path, ...], most: int, as_json: bool) -> None:
    """Account for every token that was sampled: whether it taught, why not, and the cost of a held-out point.

    For a single run also by prompt and difficulty, with the chance that the next group teaches, and the credit.
    """
    source = find_runs(paths)
    InterimLooks("signal").at(paths)
    found = {candidate.name: try_account(candidate) for candidate in source.candidates}
    accounts = [each for each in found.values() if isinstance(each, Account)]
    absent = [(name, each) for name, each in found.items() if isinstance(each, str)]
    if as_json:
        content = {
            "runs": [summary.as_data(each) for each in accounts],
            "conditions": [summary.pool_data(each) for each in summary.by_condition(accounts)],
            "absent": [{"run": name, "why": why} for name, why in absent],
        }
        click.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        console = table_console()
        is_single = len(accounts) == 1 and not absent
        console.print(run_picture(accounts[0], most) if is_single else overview(summary.by_condition(accounts), absent))
    if not accounts:
        sys.exit(1)


# The account as tables for a terminal; names of runs, examples and difficulties are untrusted.


Row = tuple[str, ...]
REST, TOKENS, SECONDS = "other", "{:,.0f}", "{:,.3g}"
MOST_DIFFICULTIES = 20
# The commonest causes are columns of a campaign; all others are summed up as "other".
OVERVIEW = (
    ("taught", (Cause.TAUGHT, Cause.TRAINED)),
    ("zero credit", (Cause.ZERO_CREDIT,)),
    ("all right", (Cause.ALL_RIGHT,)),
    ("all wrong", (Cause.ALL_WRONG,)),
    ("evaluation", (Cause.EVALUATION,)),
)


def run_picture(account: Account, most: int) -> RenderableType:
    pool = summary.pooled(account.condition, [account])
    seed = "" if account.seed is None else f", seed {account.seed}"
    head = f"{account.name}: {account.condition}{seed}, {account.state}, {account.num_steps:,} steps"
    parts: list[RenderableType] = [Text(printable(head), style="bold"), Text(_drawn(pool)), Text()]
    if account.tallies:
        rows = [
            (
                cause.value,
                f"{tally.tokens:,}",
                percent(pool.share(cause)),
                "" if tally.completions is None else f"{tally.completions:,}",
            )
            for cause, tally in account.tallies.items()
        ]
        rows.append(("all", f"{account.drawn_tokens:,}", percent(1.0), ""))
        warm_up = f"{account.sft_tokens:,} tokens of the warm-up's answers were trained and not drawn"
        note = warm_up if account.sft_tokens else ""
        parts += _section("Tokens by cause", ("cause", "tokens", "share", "completions"), rows, note)
    if account.prompts:
        if account.tasks:
            parts += _pooled("task", summary.by_task(account))
        parts += [*_pooled("difficulty", summary.by_difficulty(account.prompts)), *_dearest(account.prompts, most)]
    if pool.checked:
        bins = [(percent(f), percent(happened), f"{count:,}") for f, happened, count in pool.checked.calibration.bins]
        heads = ("forecast", "happened", "groups")
        parts += _section("Chance that a group teaches", heads, bins, _error(pool.checked))
    parts += _credit(account.credit, account.prompts) if account.credit.total.credit else []
    parts += [Text(_held_out(pool))]
    return Group(*parts, *(Text(f"Not counted: {printable(note)}", style="yellow") for note in account.notes))


def overview(pools: Sequence[summary.Pool], absent: Sequence[tuple[str, str]]) -> RenderableType:
    rows, costs = list[Row](), list[Row]()
    for pool in pools:
        shares = [pool.share(*causes) for _, causes in OVERVIEW]
        rest = max(0.0, 1.0 - sum(shares)) if pool.drawn_tokens else 0.0
        error = percent(pool.checked.calibration.error) if pool.checked else ABSENT
        cells = (*map(percent, shares), percent(rest), percent(pool.teaching_share), error)
        rows.append((printable(pool.condition), str(len(pool.accounts)), f"{pool.drawn_tokens:,}", *cells))
        tokens, seconds = _cost(pool.tokens_per_point, TOKENS), _cost(pool.seconds_per_point, SECONDS)
        costs.append((printable(pool.condition), _gain(pool.gain), tokens, seconds))
    notes = [
        f"{account.name}: not counted: {note}" for pool in pools for account in pool.accounts for note in account.notes
    ]
    names = [name for name, _ in OVERVIEW]
    return Group(
        *_section("Tokens drawn", ("condition", "runs", "tokens", *names, REST, "groups that teach", "ECE"), rows),
        *_section("Held-out gain, and the cost of a point of it", ("condition", "gain", "tokens", "seconds"), costs),
        *(Text(printable(note), style="yellow") for note in notes),
        *(Text(printable(f"{name}: no account: {why}"), style="red") for name, why in absent),
    )


def describe(pool: summary.Pool) -> list[str]:
    """Return tokens, calibration of the forecast, and gain with its cost, a sentence each, without full stops."""
    forecast = [f"Forecast of teaching: {_error(pool.checked)}"] if pool.checked else []
    return [_drawn(pool), *forecast, _held_out(pool)]


def _drawn(pool: summary.Pool) -> str:
    if not pool.drawn_tokens:
        return "Nothing that was drawn is recorded"
    teach = "" if pool.teaching_share is None else f"; {percent(pool.teaching_share)} of the groups could teach"
    return (
        f"{pool.drawn_tokens:,} tokens drawn, {percent(pool.share(Cause.TAUGHT, Cause.TRAINED))} of them taught{teach}"
    )


def _pooled(by: str, found: Sequence[summary.DifficultyAccount]) -> list[RenderableType]:
    rows = [
        (
            printable(each.difficulty or ABSENT),
            f"{each.prompts:,}",
            f"{each.groups:,}",
            percent(None if each.rate is None else each.teaching_groups / max(1, each.groups)),
            percent(each.rate),
            percent(each.chance),
            f"{each.tokens:,}",
            percent(each.taught_tokens / max(1, each.tokens)),
        )
        for each in found[:MOST_DIFFICULTIES]
    ]
    heads = (by, "prompts", "groups", "could teach", "rate", "next teaches", "tokens", "that taught")
    left = len(found) - MOST_DIFFICULTIES
    return _section(f"Prompts by {by}", heads, rows, f"{left:,} more with --json" if left > 0 else "")


def _dearest(prompts: Sequence[PromptAccount], most: int) -> list[RenderableType]:
    dearest = sorted(prompts, key=lambda one: one.taught_tokens - one.tokens)[:most]
    rows = [
        (
            printable(each.example),
            printable(each.difficulty),
            f"{each.groups:,}",
            f"{each.teaching_groups:,}",
            percent(each.rate[0] / sum(each.rate) if each.rate else None),
            percent(each.chance),
            f"{each.tokens:,}",
            f"{each.tokens - each.taught_tokens:,}",
        )
        for each in dearest
        if each.taught_tokens < each.tokens
    ]
    heads = ("prompt", "difficulty", "groups", "could teach", "rate", "next teaches", "tokens", "in vain")
    return _section("Prompts that cost most without teaching", heads, rows) if rows else []


def _credit(credit: CreditShares, prompts: Sequence[PromptAccount]) -> list[RenderableType]:
    names = {0: "highest", 1: "2nd", 2: "3rd", DECILES - 1: "lowest"}
    rows = [
        (f"{names[number]} tenth by {kind}", *map(percent, summary.share(tenth, credit.total)))
        for kind, tenths in (("surprisal", credit.surprisal), ("entropy", credit.entropy))
        for number, tenth in enumerate(tenths)
        if number in names
    ]
    if credit.planning is not None:
        rows.append(("planning tokens", *map(percent, summary.share(credit.planning, credit.total))))
    note = f"the tenth of the prompts with most credit has {percent(summary.share_of_top_prompts(prompts))} of |A|"
    return _section("Credit of trained tokens", ("tokens", "share", "of |A|", "of |A|(1-p)"), rows, note)


def _error(found: Checked) -> str:
    low, high = found.interval
    return f"expected calibration error {percent(found.calibration.error)} [{percent(low)}, {percent(high)}]"


def _held_out(pool: summary.Pool) -> str:
    gain, tokens, seconds = pool.gain, pool.tokens_per_point, pool.seconds_per_point
    said = f"Held out: {_gain(gain)}"
    if not isinstance(gain, Gain) or tokens is None or seconds is None:
        return said
    if tokens.at_least is not None and seconds.at_least is not None:
        least = f"{TOKENS.format(tokens.at_least)} tokens and {SECONDS.format(seconds.at_least)} s"
        return f"{said}: no gain shown, a point costs at least {least}"
    if tokens.value is None:
        return f"{said}: no gain shown"
    return f"{said}, a point for {_cost(tokens, TOKENS)} tokens and {_cost(seconds, SECONDS)} s"


def _gain(gain: Gain | str) -> str:
    if isinstance(gain, str):
        return gain
    limits = "" if gain.interval is None else f" [{gain.interval[0]:+.1f}, {gain.interval[1]:+.1f}]"
    return f"{gain.points:+.1f} pp{limits}"


def _cost(cost: CostPerPoint | None, form: str) -> str:
    if cost is None:
        return ABSENT
    if cost.value is not None and cost.interval:
        low, high = (form.format(limit) for limit in cost.interval)
        return f"{form.format(cost.value)} [{low}, {high}]"
    if cost.at_least is not None:
        return f"no gain shown: at least {form.format(cost.at_least)}"
    return "no gain shown" if cost.value is None else f"{form.format(cost.value)} (no interval)"


def _section(title: str, heads: Sequence[str], rows: Sequence[Row], note: str = "") -> list[RenderableType]:
    return [Text(title, style="bold"), rich_table(heads, rows), *([Text(note)] if note else []), Text()]


# The account as a section of a report.


def report_section(run: RunView) -> ReportSection | None:
    file = run.folder / GENERATIONS
    if not file.is_file():
        return None
    if file.stat().st_size > MOST_BYTES:
        told = f"{file.stat().st_size / 1e9:.1f} GB of completions: `retrain signal`."
        return ReportSection(name="signal", text=told)
    account = try_account(find_runs([run.folder]).candidates[0])
    if isinstance(account, str):
        return ReportSection(name="signal", text=account)
    if not account.drawn_tokens:
        return None
    pool = summary.pooled(account.condition, [account])
    plots = [_causes_plot(account, pool), *_forecast_plot(pool.checked), *_credit_plot(account)]
    text = ". ".join([*describe(pool), *(f"Not counted: {note}" for note in account.notes)]) + "."
    return ReportSection(name="signal", text=text, plots=plots, files=(file,))


def _causes_plot(account: Account, pool: summary.Pool) -> ReportPlot:
    steps_S, tokens_SC = account.by_step
    width = max(1, -(-steps_S.size // POINTS))
    starts = np.arange(0, steps_S.size, width)
    tokens_XC = np.add.reduceat(tokens_SC, starts) if steps_S.size else tokens_SC
    shares_XC = tokens_XC / np.maximum(1, tokens_XC.sum(axis=1, keepdims=True))
    drawn = [(index, cause) for index, cause in enumerate(CAUSES) if tokens_SC[:, index].any()]
    return ReportPlot(
        title="Tokens by cause",
        note="share of the tokens that a step drew" + (f", mean of {width} steps" if width > 1 else ""),
        x=steps_S[starts].tolist(),
        lines={cause.value: shares_XC[:, index].tolist() for index, cause in drawn},
        x_title="step",
        is_share=True,
        heads=("cause", "tokens", "share"),
        rows=[(cause.value, f"{t.tokens:,}", percent(pool.share(cause))) for cause, t in account.tallies.items()],
    )


def _forecast_plot(found: Checked | None) -> list[ReportPlot]:
    if found is None:
        return []
    forecast, happened, _ = zip(*found.calibration.bins, strict=True)
    return [
        ReportPlot(
            title="Chance that a group teaches",
            note="forecast from earlier steps only, in bins of equal counts",
            x=forecast,
            lines={"happened": happened, "as forecast": forecast},
            x_title="forecast",
            is_share=True,
            heads=("forecast", "happened", "groups"),
            rows=[(percent(f), percent(h), f"{count:,}") for f, h, count in found.calibration.bins],
        )
    ]


def _credit_plot(account: Account) -> list[ReportPlot]:
    credit = account.credit
    if not credit.total.credit:
        return []
    shares = [summary.share(tenth, credit.total) for tenth in credit.surprisal]
    tenths = range(1, len(shares) + 1)
    return [
        ReportPlot(
            title="Credit by surprisal",
            note="tenths of the trained tokens of each step, the least likely first",
            x=tenths,
            lines={"of |A|": [each[1] for each in shares], "of |A| (1 - p)": [each[2] for each in shares]},
            x_title="tenth",
            is_share=True,
            heads=("tenth", "of |A|", "of |A| (1 - p)"),
            rows=[(str(n), percent(each[1]), percent(each[2])) for n, each in zip(tenths, shares, strict=True)],
        )
    ]
