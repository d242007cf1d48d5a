"""`retrain.compare`: the verdicts of `retrain compare` as an object that a notebook shows as a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Study, options_of
from retrain.verdicts.wording.show import picture, study_data

WIDTH = 120  # columns, whatever the window of the notebook
PRE = '<pre style="line-height: 1.25; overflow-x: auto">{code}</pre>'


class Comparison:
    """Which condition is better, and whether the data can show it; printed, it is what `retrain compare` prints."""

    def __init__(self, study: Study) -> None:
        self._study = study

    @property
    def data(self) -> dict[str, Any]:
        """All results, as `retrain compare --json` writes them."""
        plain: dict[str, Any] = json.loads(json.dumps(study_data(self._study)))
        return plain

    @property
    def verdicts(self) -> list[Mapping[str, Any]]:
        """One entry per pair: `condition`, `baseline`, `verdict`, `difference`, `interval`, `level`, `p_holm`, `line`.

        The verdict is `better`, `worse`, `practically the same` or `cannot tell`; `line` says it with size, scope and
        whether it was planned, `explanation` why. A limit that is infinite is None.
        """
        return list(self.data["comparisons"])

    def __repr__(self) -> str:
        return self._shown(is_html=False)

    def _repr_html_(self) -> str:
        return self._shown(is_html=True)

    def _shown(self, *, is_html: bool) -> str:
        from rich.console import Console  # not needed for `verdicts`

        console = Console(file=StringIO(), record=True, width=WIDTH, highlight=False, force_jupyter=False)
        console.print(picture(self._study))
        return console.export_html(inline_styles=True, code_format=PRE) if is_html else console.export_text().rstrip()


def compare(
    runs: Iterable[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    metric: str | None = None,
    baseline: str | None = None,
    all_pairs: bool = False,
    align: str = "steps",
    at: float | None = None,
    last: int | None = None,
    alpha: float | None = None,
    lower: bool = False,
    sets: bool = False,
) -> Comparison:
    """Compare the conditions of a campaign's folder, or of several runs, over their seeds, as `retrain compare` does.

    `metric` is a field of the metrics with `:final`, `:best` or `:auc`; `align` and the other options are the
    command's. ConfigError when nothing can be compared.

    >>> retrain.compare(["logs/tiny"], metric="correct_rate:final").verdicts
    []
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    options = options_of(
        metric=metric,
        baseline=baseline,
        all_pairs=all_pairs,
        align=align,
        at=at,
        last=last,
        alpha=alpha,
        lower=lower,
        sets=sets,
        called=lambda name: f"retrain.compare({name}=...)",
    )
    return Comparison(comparison_with_ledger([Path(path) for path in paths], options))
