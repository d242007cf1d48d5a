"""Records in the ledger that a run began, and how it ended, with the hashes of its final records.

A ledger that cannot be written stops nothing: the run continues, and says so when it begins.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from retrain.kernel.errors import StopRequested
from retrain.records.run import Run
from retrain.verdicts.ledger.chain import append
from retrain.verdicts.ledger.place import learned_by, ledger_folder, manifest_hashes, name_in, record_hashes

if TYPE_CHECKING:
    from retrain.kernel.contracts.views import RunView

LOG = logging.getLogger("retrain")


def begin(run: RunView) -> None:
    is_resumed, learns = "resumed_at_step" in run.manifest, learned_by(Run(run.folder).record)
    if reason := _append(run, "run_started", {}, first_step=run.first_step, resumed=is_resumed, learns=learns):
        LOG.warning("Not in the ledger: %s. The run goes on; `retrain compare` will say what is unknown", reason)


def end(run: RunView, error: BaseException | None) -> None:
    state = "done" if error is None else "stopped" if isinstance(error, StopRequested) else "failed"
    _append(run, "run_ended", record_hashes(run.folder), state=state, steps=Run(run.folder).num_steps)


def _append(run: RunView, kind: str, hashes: dict[str, str], **fields: Any) -> str:
    folder = ledger_folder(run.folder)
    return append(
        folder,
        kind,
        run=name_in(folder, run.folder),
        started=str(run.manifest.get("started", "")),
        condition=run.condition,
        seed=run.seed,
        **fields,
        hashes=hashes | manifest_hashes(Run(run.folder).record),
    )
