"""A finding of `retrain doctor` about this machine, and how to fix it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "missing", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One thing that was checked.

    `missing` is absent, `failed` is present and does not work, `warn` works with a drawback. `needed` means that the
    configuration cannot run without it: then `missing` and `failed` make the doctor's exit code 1. `fix` is the
    smallest change that repairs it.
    """

    name: str
    status: Status
    detail: str = ""
    fix: str = ""
    needed: bool = False

    @property
    def is_fatal(self) -> bool:
        return self.needed and self.status in ("missing", "failed")
