"""Statistics, studies of many runs, forecasts, and the ledger of looks: can a difference be believed?

Begin with `study/study.py` (runs become conditions) and `study/judge.py` (decides "better"); `wording/` says it in
words. Imports the kernel, `text` and `records`, so that `retrain compare` loads nothing of tasks, credit or a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Compare conditions over their seeds, with tests and intervals; verify the ledger of runs and looks."
    factory = "retrain.verdicts.wording.command:command"
    register(PluginSpec(name="compare", summary=summary, factory=factory, traits="compare"))


@hookimpl
def retrain_run_start(run: RunView) -> None:
    from retrain.verdicts.ledger.chain import begin  # only a run needs it

    begin(run)


@hookimpl
def retrain_run_end(run: RunView, error: BaseException | None) -> None:
    from retrain.verdicts.ledger.chain import end  # only a run needs it

    end(run, error)
