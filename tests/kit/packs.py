"""The manifest of a pack of one run, as `retrain pack` writes it; a test changes some of it."""

import sys
from typing import Any

from retrain.tools.pack.archive import FORMAT

RUN = {
    "name": "", "place": "run", "condition": "c", "seed": 1, "steps": 1, "identity": "run/run.json", "weights": {},
}  # fmt: skip
MEMBERS = {"config.toml": b"", "run/metrics.jsonl": b"", "run/run.json": b"{}"}


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "format": FORMAT, "kind": "run", "name": "n", "python": sys.version.split()[0], "hardware": {}, "placed": [],
        "left_out": [], "wheels": {}, "packages": {}, "runs": [RUN], "moved": {}, "equivalence": None, "verdict": None,
        **changes,
    }  # fmt: skip
