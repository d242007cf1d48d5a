"""Campaigns of the toy policy: the text of their conditions, and a launcher whose runs end at once."""

import json
from typing import Any

from retrain.api import Job


def conditions(*labels: str) -> str:
    """Return the tables of conditions with these labels, `advantage+transform`."""
    parts = (label.partition("+") for label in labels)
    return "".join(
        f'\n[[campaign.conditions]]\nadvantage_mode = "{advantage}"\ntransform_mode = "{transform}"\n'
        for advantage, _, transform in parts
    )


def record(job: Job, status: str, **more: Any) -> None:
    """Write the `run.json` of a run with this status."""
    content = {"status": status, "seed": 1, "started": "now", "config": {}} | more
    (job.folder / "run.json").write_text(json.dumps(content))


class Finishes:
    """A launcher whose runs end at once, with exit code 1 if they are among `failing`."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.started = failing, list[str]()

    def start(self, job: Job) -> Any:
        self.started.append(job.name)
        fails = job.name in self.failing
        record(job, "failed" if fails else "done")
        (job.folder / "adapter/final").mkdir(parents=True)
        return type("Ended", (), {"pid": None, "poll": lambda self: int(fails)})()

    def close(self) -> None: ...
