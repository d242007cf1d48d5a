"""Runs as the ledger sees them."""

import json
from pathlib import Path
from typing import Any, cast

from retrain.kernel.contracts.views import RunView
from retrain.verdicts.ledger.chain import begin, end


def recorded(run: Path, error: BaseException | None = None, **fields: Any) -> Path:
    """A run whose `run.json` gets these fields, begun and ended as the hooks see it."""
    manifest = json.loads((run / "run.json").read_text()) | fields
    (run / "run.json").write_text(json.dumps(manifest))
    named = {name: manifest[name] for name in ("condition", "seed")}
    unused = dict.fromkeys(("config", "capabilities"), cast(Any, None))
    view = RunView(folder=run, first_step=0, manifest=manifest, **named, **unused)
    begin(view)
    end(view, error)
    return run
