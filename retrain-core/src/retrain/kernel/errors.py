"""The errors a user can meet: each says where, what, why and the smallest fix, and carries its exit code."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# EX_TEMPFAIL of sysexits.h: stopped by a signal after a checkpoint was saved, so a scheduler may requeue the run.
EXIT_RESUMABLE = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with the input.

    `where` is a place the user can open (`retrain.toml:12 [training] lr`), `what` the fault, `why` the rule it
    breaks, `fix` the smallest change that repairs it; the text omits empty parts. `code` names the kind of fault
    (`data.column-missing`): it stays when sentences change, tests assert it, and `retrain help CODE` explains it.
    """

    what: str
    code: str = ""
    where: str = ""
    why: str = ""
    fix: str = ""

    def __str__(self) -> str:
        tail = [f"    {part}" for part in (self.why, f"fix: {self.fix}" if self.fix else "") if part]
        return "\n".join([self.head, *tail])

    @property
    def head(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} [{self.code}]" if self.code else head


def _together(problems: list[Problem]) -> str:
    """Problems that one fix repairs: every place and fault, then what their reasons share, and the fix once."""
    if len(problems) == 1:
        return str(problems[0])
    reasons = [[line.strip() for line in problem.why.splitlines()] for problem in problems]
    given = [lines for lines in reasons if lines]
    shared = [line for line in given[0] if all(line in lines for lines in given)] if given else []
    rows = [f"{len(problems)} problems with one fix:"]
    for problem, lines in zip(problems, reasons, strict=True):
        rows += [f"    {problem.head}", *(f"        {line}" for line in lines if line not in shared)]
    return "\n".join([*rows, *(f"    {line}" for line in shared), f"    fix: {problems[0].fix}"])


class RetrainError(Exception):
    """Base of every error meant for a user; `problems` holds every fault found, so that one run reports them all."""

    exit_code = EXIT_FAILED
    label = "error"

    def __init__(self, *problems: Problem | str) -> None:
        self.problems = tuple(p if isinstance(p, Problem) else Problem(what=p) for p in problems)
        super().__init__(*self.problems)

    @property
    def codes(self) -> list[str]:
        return [problem.code for problem in self.problems]

    def __str__(self) -> str:
        by_fix: dict[str | Problem, list[Problem]] = {}
        for problem in dict.fromkeys(self.problems):
            # Problems without a fix share nothing, so each of them is a group.
            by_fix.setdefault(problem.fix or problem, []).append(problem)
        texts = [_together(problems) for problems in by_fix.values()]
        return texts[0] if len(texts) == 1 else "\n".join(f"{n}. {text}" for n, text in enumerate(texts, start=1))


class ConfigError(RetrainError, ValueError):
    """The configuration, command line or input files cannot be used; nothing has started."""

    exit_code = EXIT_USAGE
    label = "config error"


class PluginError(RetrainError, LookupError):
    """A plugin is missing, failed to load, or broke its contract."""

    exit_code = EXIT_USAGE
    label = "plugin error"


class HookError(PluginError):
    """A plugin's life-cycle hook raised during a run."""

    exit_code = EXIT_FAILED


class CreditError(RetrainError, ValueError):
    """Credit could not be assigned: a non-finite number or a wrong shape, named by completion and token."""

    label = "credit error"


class RewardError(RetrainError, RuntimeError):
    """Scoring failed more often than the run tolerates."""

    label = "reward error"


class BackendError(RetrainError, RuntimeError):
    """A backend or engine could not sample, train, save or load."""

    label = "backend error"


class OutOfMemoryError(BackendError):
    """The work did not fit in memory; weights and optimizer are unchanged, so a smaller batch can be tried."""


class NonFiniteError(BackendError):
    """A loss, gradient or log-probability was not finite; weights and optimizer are unchanged."""


class CheckpointError(RetrainError, RuntimeError):
    """A checkpoint could not be written, or is damaged."""

    label = "checkpoint error"


class RecordError(RetrainError, RuntimeError):
    """A record of the run could not be written; earlier records are intact."""

    label = "record error"


class ResumeError(RetrainError, RuntimeError):
    """A run cannot be continued as requested."""

    exit_code = EXIT_USAGE
    label = "resume error"


class StopRequested(BaseException):
    """Raised in the run's thread to stop it; not an `Exception`, so that no plugin swallows it.

    `failure` is the error that caused the stop, if any; `folder` is the run's or campaign's, once it exists.
    """

    def __init__(self, reason: str, failure: RetrainError | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.failure = failure
        self.folder: Path | None = None


LIBRARY_FOLDERS = {"site-packages", "dist-packages"}


def raised_at(error: BaseException) -> str:
    """Return ` (my_transforms.py:4)`: the innermost line of a plugin that raised, or that called what raised, if any.

    A file that is installed as part of no library comes first, so that an error from within NumPy is shown where the
    user's own file called it.
    """
    package = Path(__file__).parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if package not in Path(f.filename).parents]
    library = Path(traceback.__file__).parent
    files = [Path(frame.filename) for frame in frames]
    own = [LIBRARY_FOLDERS.isdisjoint(file.parts) and library not in file.parents for file in files]
    # Without a file of the user the plugin is installed, and its outermost frame is the function that was called.
    foreign = [frame for frame, is_own in zip(frames, own, strict=True) if is_own] or frames[:1]
    if not foreign:
        return ""
    file = Path(foreign[-1].filename)
    # OSError: the current folder is gone. ValueError: the file is outside it.
    with suppress(OSError, ValueError):
        file = file.relative_to(Path.cwd())
    return f" ({file}:{foreign[-1].lineno})"
