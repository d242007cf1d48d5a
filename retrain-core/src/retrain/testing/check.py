"""One check of one part, the error that a broken promise raises, and the expectations that several suites share."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

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

    `name` is also the text of the check, `purpose` the promise in one line, `subject` the name of the part. A check
    of something optional passes when the part does not offer it. `config` is merged over the toy configuration.
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
        """Resolve, configure and build the part as a run would, and test it."""
        # pytest then shows the message, not this frame.
        __tracebackhide__ = True
        where, why = f"{self.kind} {self.subject!r}, check {self.name}", self.purpose
        try:
            with _current_folder_on_path(), ExitStack() as exits:
                self.run(Bench(kind=self.kind, name=self.subject, given=self.config, exits=exits))
        except ConformanceError as error:
            # The error without its place would only repeat the message in the traceback; its cause, if any, stays.
            raise ConformanceError(replace(error.problem, where=where)) from error.__cause__
        except RetrainError as error:
            what = "; ".join(str(replace(problem, fix="")).replace("\n    ", " ") for problem in error.problems)
            fixes = "; ".join(problem.fix for problem in error.problems if problem.fix)
            fix = fixes if fixes else "give `conformance()` a `config` that the part accepts"
            raise ConformanceError(
                Problem(code="conformance.refused", where=where, what=f"refused: {what}", why=why, fix=fix)
            ) from error
        # SystemExit is no Exception: a part that calls sys.exit would end the caller of the check.
        except (Exception, SystemExit) as error:
            what = f"{type(error).__name__}: {error} (raised in {_place(error)})"
            fix = "make this call succeed, or raise a RetrainError"
            raise ConformanceError(
                Problem(code="conformance.raised", where=where, what=what, why=why, fix=fix)
            ) from error


def fail(what: str, *, why: str, fix: str) -> NoReturn:
    """Raise ConformanceError: the fault of the part, why it breaks a run, and the smallest change that repairs it."""
    what, fix = f"broken promise: {what}", f"change the part: {fix}"
    raise ConformanceError(Problem(code="conformance.broken-promise", what=what, why=why, fix=fix))


def expect(is_kept: object, what: str, *, why: str, fix: str) -> None:
    if not is_kept:
        fail(what, why=why, fix=fix)


def expect_unchanged(is_unchanged: object, what: str, *, why: str) -> None:
    """Expect a call to leave its arguments unmodified; `what` names those that must not change."""
    expect(is_unchanged, f"the call has changed {what}", why=why, fix="copy it, and change the copy")


def expect_json(value: Any, what: str, *, why: str, fix: str) -> str:
    """Return the value as JSON text; NaN and infinity are refused."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        fail(f"{what} is not JSON: {error}", why=why, fix=fix)


def expect_plain_state(part: Any) -> dict[str, Any]:
    """Return the state of the part after the JSON round trip that a checkpoint makes."""
    why = "it is written into trainer_state.json"
    state = part.state()
    expect(
        isinstance(state, Mapping),
        f"state() returned {type(state).__name__}",
        why=why,
        fix="return a dictionary, {} when there is nothing to keep",
    )
    fix = "keep plain numbers, text, lists and tables; no arrays, no NaN"
    text = expect_json(dict(state), "state()", why=why, fix=fix)
    expect(
        expect_json(dict(part.state()), "state()", why=why, fix=fix) == text,
        "a second call of state() returns something else",
        why="it is called at every checkpoint, and must change nothing",
        fix="compute nothing in state()",
    )
    plain: dict[str, Any] = json.loads(text)
    return plain


def resumed(bench: Bench, part: Any, given: Sequence[Any] = ()) -> Any:
    """Build the part of the bench again, and restore it from the state of `part`."""
    again = bench.build(given)
    again.restore(expect_plain_state(part))
    return again


def expect_same(went_on: Any, after: Any, *, what: str) -> None:
    why = "a resumed run must equal the run that was never interrupted"
    fix = "put all that the part remembers into state(), and take it back in restore()"
    expect(went_on == after, f"{what}: {went_on!r:.300} without a resume, {after!r:.300} after one", why=why, fix=fix)


def expect_plain_metrics(metrics: Any, *, allows_text: bool) -> None:
    """Expect valid fields for a line of `metrics.jsonl`."""
    expect(
        isinstance(metrics, Mapping),
        f"metrics() returned {type(metrics).__name__}",
        why="its fields are added to the step's line",
        fix="return a dictionary, {} when there is nothing to report",
    )
    why = "a line of metrics.jsonl holds finite numbers, so that every reader can plot it"
    fix = "omit a field that has no value yet; convert numpy numbers with float()"
    plain = (int, float, bool, str) if allows_text else (int, float, bool)
    for name, value in metrics.items():
        what = f"{name!r} = {value!r} of metrics()"
        expect(isinstance(name, str) and isinstance(value, plain), f"{what} is not a number", why=why, fix=fix)
        expect_json(value, what, why=why, fix=fix)


def _place(error: BaseException) -> str:
    """File and line that raised: the innermost one outside this package, if any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    # Frames of this package come first in every traceback and say nothing about the part.
    foreign = [frame for frame in frames if not frame.filename.startswith(own)]
    last = (foreign or list(frames))[-1]
    return f"{last.filename}:{last.lineno}"


@contextmanager
def _current_folder_on_path() -> Iterator[None]:
    """Resolve dotted paths in the current folder too, as the `retrain` script does."""
    folder = str(Path.cwd())
    # An interpreter started with -c or as a REPL has "" there: the current folder.
    if "" in sys.path or folder in sys.path:
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The part may have changed sys.path itself.
        if folder in sys.path:
            sys.path.remove(folder)
