"""What a soak counted: as JSON, and as the table of the documentation."""

from __future__ import annotations

import json
import platform
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.soak.scenario import Account, Befallen

OUTCOMES = ("went on", "resumed", "refused", "missed")


@dataclass(slots=True, kw_only=True)
class Report:
    """Of all scenarios so far."""

    seed: int
    can_mount: bool
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    accounts: list[Account] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock, repr=False)

    def add(self, account: Account, folder: Path) -> None:
        """One more; several threads may. What there is so far is in the folder, however the soak ends."""
        with self.lock:
            self.accounts.append(account)
            self.seconds = round(time.monotonic() - self.started, 1)
            self._write(folder)

    @property
    def failures(self) -> list[Account]:
        return [account for account in self.accounts if account.failure]

    def _write(self, folder: Path) -> None:
        content = {
            "seed": self.seed,
            "can_mount": self.can_mount,
            "seconds": self.seconds,
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "scenarios": [account.as_json() for account in self.accounts],
        }
        (folder / "soak.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "soak.md").write_text(self.markdown(), encoding="utf-8")

    @classmethod
    def of(cls, content: dict[str, Any]) -> Report:
        accounts = [
            Account(**{**account, "faults": [Befallen(**each) for each in account["faults"]]})
            for account in content["scenarios"]
        ]
        seed, can_mount = content["seed"], content["can_mount"]
        return cls(seed=seed, can_mount=can_mount, seconds=content["seconds"], accounts=accounts)

    def markdown(self) -> str:
        counts = Counter((each.fault, each.outcome) for account in self.accounts for each in account.faults)
        faults = sorted({fault for fault, _ in counts})
        processes = sum(account.processes for account in self.accounts)
        befallen = sum(count for (_, outcome), count in counts.items() if outcome != "missed")
        said = {each.fault: each.message for account in self.accounts for each in account.faults if each.message}
        lines = [
            f"{len(self.accounts)} scenarios, {processes} processes and {befallen} faults in "
            f"{self.seconds / 60:.0f} minutes (seed {self.seed}): {len(self.failures)} ended otherwise than promised.",
            "",
            f"| fault | {' | '.join(OUTCOMES)} |",
            f"|---|{'---:|' * len(OUTCOMES)}",
        ]
        for fault in faults:
            lines.append(f"| {fault} | {' | '.join(str(counts[fault, outcome] or '') for outcome in OUTCOMES)} |")
        lines += [
            "",
            "What was said, once of each:",
            "",
            *(f"- {fault}: `{_short(said[fault])}`" for fault in sorted(said)),
        ]
        return "\n".join(lines) + "\n"


def _short(message: str) -> str:
    parts = [part for part in message.split(" / ") if not part.startswith("retrain:")]
    return (parts or [message])[0][:160].replace("`", "'")
