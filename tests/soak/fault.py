"""What a fault is: what it does, to which configurations it can be done, and what is promised then."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from tests.soak.configurations import Configuration
from tests.soak.ground import Ground

Process = subprocess.Popen[str]


def nothing(ground: Ground) -> None:
    """Nothing to mend."""


def no_patch(ground: Ground) -> str:
    """The program is left as it is."""
    return ""


def of_runs(configuration: Configuration) -> bool:
    """A single run."""
    return not configuration.is_campaign


def of_campaigns(configuration: Configuration) -> bool:
    """A campaign."""
    return configuration.is_campaign


def anywhere(configuration: Configuration) -> bool:
    """Runs and campaigns."""
    return True


def of_shapes(*names: str) -> Callable[[Configuration], bool]:
    """Configurations of these shapes."""
    return lambda configuration: configuration.shape in names


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """`strike` is called while the process runs, and returns the one that holds the run then.

    With `codes` it ends the process, with one of them and `says` in what it wrote to stderr; else the run goes on as
    if nothing had been. `patch` alters the program before it starts, and `mend` undoes what would keep the run from
    going on.
    """

    name: str
    strike: Callable[[Ground, Process], Process]
    suits: Callable[[Configuration], bool] = of_runs
    codes: tuple[int, ...] = ()
    says: str = ""
    loses: tuple[str, ...] = ()  # where files lie that the fault itself deletes, and that a run does not hold in memory
    is_at_once: bool = False  # strikes as soon as the process has been started
    patch: Callable[[Ground], str] = no_patch
    mend: Callable[[Ground], None] = nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Done to files that nobody has open. `strike` checks what follows, and returns what a refusal said, else nothing.

    It leaves the run so that it can go on.
    """

    name: str
    strike: Callable[[Ground], str]
    suits: Callable[[Configuration], bool] = of_runs
