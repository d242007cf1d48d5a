"""The account of a run as a section of a report: tokens by cause over steps, the forecast, credit by uncertainty."""

from __future__ import annotations

import numpy as np

from retrain.inspect.signal.account import Account, try_account
from retrain.inspect.signal.command import describe
from retrain.inspect.signal.drawn import CAUSES
from retrain.inspect.signal.prompts import Checked
from retrain.inspect.signal.summary import pooled, share
from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.contracts.views import RunView
from retrain.records.record_names import GENERATIONS
from retrain.records.runs.source import find_runs
from retrain.text.amounts import percent

MOST_BYTES = 1 << 30  # about half a minute of reading; larger runs have the command
POINTS = 200  # of a line over steps


def report_section(run: RunView) -> ReportSection | None:
    file = run.folder / GENERATIONS
    if not file.is_file():
        return None
    if file.stat().st_size > MOST_BYTES:
        return ReportSection(
            name="signal", text=f"{file.stat().st_size / 1e9:.1f} GB of completions: `retrain signal`."
        )
    account = try_account(find_runs([run.folder]).candidates[0])
    if isinstance(account, str):
        return ReportSection(name="signal", text=account)
    if not account.drawn_tokens:
        return None
    pool = pooled(account.condition, [account])
    plots = [_causes(account), *_forecast(pool.checked), *_credit(account)]
    text = ". ".join([*describe(pool), *(f"Not counted: {note}" for note in account.notes)]) + "."
    return ReportSection(name="signal", text=text, plots=plots, files=(file,))


def _causes(account: Account) -> ReportPlot:
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
        rows=[(cause.value, f"{t.tokens:,}", percent(account.share(cause))) for cause, t in account.tallies.items()],
    )


def _forecast(found: Checked | None) -> list[ReportPlot]:
    if found is None:
        return []
    forecast, happened, _ = zip(*found.calibration.bins, strict=True)
    return [
        ReportPlot(
            title="Chance that a group teaches",
            note="forecast from earlier steps alone, in bins of equal counts",
            x=forecast,
            lines={"happened": happened, "as forecast": forecast},
            x_title="forecast",
            is_share=True,
            heads=("forecast", "happened", "groups"),
            rows=[(percent(f), percent(h), f"{count:,}") for f, h, count in found.calibration.bins],
        )
    ]


def _credit(account: Account) -> list[ReportPlot]:
    credit = account.credit
    if not credit.total.credit:
        return []
    shares = [share(tenth, credit.total) for tenth in credit.surprisal]
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
