"""One check of one part, and the error that says what is wrong with the part, why it matters, and how to fix it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.types import Kind
from retrain.testing.bench import Bench

Run = Callable[[Bench], None]


class ConformanceError(AssertionError):
    """A part breaks the contract of its kind; `problem` holds where, what, why and the fix."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Check:
    """One promise of a kind, bound to one part: `check()` tests it and raises ConformanceError when it is broken.

    `name` is what `str(check)` gives, `purpose` the promise in one line, `subject` the name of the part. A check of
    something optional passes when the part does not offer it. `config` is merged over the toy configuration.
    """

    kind: Kind
    name: str
    purpose: str
    subject: str
    run: Run = field(repr=False)
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Test it now: resolve, configure and build the part as a run would."""
        __tracebackhide__ = True  # pytest then shows the message, not this frame
        where = f"{self.kind} {self.subject!r}, check {self.name}"
        try:
            with _current_folder_on_path(), Bench(kind=self.kind, name=self.subject, given=self.config) as bench:
                self.run(bench)
        except ConformanceError as error:
            raise ConformanceError(replace(error.problem, where=where)) from error.__cause__
        except RetrainError as error:
            fixes = [problem.fix for problem in error.problems if problem.fix]
            what = "; ".join(_without_fix(problem) for problem in error.problems)
            raise ConformanceError(Problem(where=where, what=what, why=self.purpose, fix="; ".join(fixes))) from error
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error} (raised in {_place(error)})"
            raise ConformanceError(
                Problem(where=where, what=what, why=self.purpose, fix="make this call succeed, or raise a RetrainError")
            ) from error


def expect(is_kept: object, what: str, *, why: str, fix: str) -> None:
    """ConformanceError unless `is_kept`: what the part did, why that breaks a run, and the smallest change."""
    if not is_kept:
        raise ConformanceError(Problem(what=what, why=why, fix=fix))


def _without_fix(problem: Problem) -> str:
    return str(replace(problem, fix="")).replace("\n    ", " ")


def _place(error: BaseException) -> str:
    """File and line that raised: the innermost one outside this package, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    foreign = [frame for frame in frames if not frame.filename.startswith(own)]
    last = (foreign or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Resolve dotted paths in the current folder too, as the `retrain` script does."""
    folder = str(Path.cwd())
    if "" in sys.path or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
