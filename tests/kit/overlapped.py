"""What a run of the toys leaves, read back for comparison."""

import json
from pathlib import Path
from typing import Any

GENERATIONS = "emergence/generations.jsonl"
# A plugin that does what `act.json` says, once: on entering a phase of a step for the n-th time.
ACTING = """
import json, os, signal
from pathlib import Path
from retrain.api import Watcher, hookimpl

class Acting(Watcher):
    def phase(self, step, phase):
        file = Path("act.json")
        wanted = json.loads(file.read_text()) if file.exists() else {}
        if wanted and (wanted["phase"], wanted["step"]) == (phase, step):
            wanted["passed"] -= 1
            file.write_text(json.dumps(wanted))
            if wanted["passed"] < 0:
                file.unlink()
                if wanted["action"] == "raise":
                    raise RuntimeError("broken")
                os.kill(os.getpid(), getattr(signal, wanted["action"]))

@hookimpl
def retrain_watch_run(context): return Acting()
"""


def act(folder: Path, phase: str, step: int, *, action: str = "SIGTERM", passed: int = 0) -> None:
    """Write what the plugin `ACTING` is to do."""
    wanted = {"phase": phase, "step": step, "action": action, "passed": passed}
    (folder / "act.json").write_text(json.dumps(wanted))


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    """The lines of the steps, without the evaluation before training."""
    return [line for line in lines(folder) if line["step"] >= 0]


def outcome(folder: Path) -> tuple[Any, ...]:
    """All that a run leaves, time apart."""
    untimed = [{k: v for k, v in line.items() if not k.endswith("time_s")} for line in lines(folder)]
    final = (folder / "adapter/final/logits.json").read_bytes()
    return untimed, lines(folder, GENERATIONS), lines(folder, "emergence/steps.jsonl"), final
