"""The `code` reward itself: the program of a completion passes the tests of its example, or it does not."""

from __future__ import annotations

import ast
import logging
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

from retrain.api import ConfigError, Example, Outcome, PluginContext, Problem, RewardError, Score
from retrain_rewards.code.layouts import CallTest, CodeTest, StdinTest, Test, read_tests
from retrain_rewards.code.process import Limits, Process, ProcessEnded, ProcessFault, decoded
from retrain_rewards.code.sandbox import FIX, NO_SANDBOX, Sandbox, find_sandbox, interpreter
from retrain_rewards.deadline import time_limit_of
from retrain_rewards.tables import RewardTable

LOG = logging.getLogger("retrain")
OWN_SHARE = 0.8  # of the scoring time limit: a program that is too slow is wrong, and no failed score
FENCE = "```"
LANGUAGES = ("", "python", "python3", "py")
SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReward:
    """1.0 when the program passes every test of its example, else 0.0; with `partial` the share that it passes.

    A program that crashes, runs out of time or memory, or says nothing is wrong. RewardError, a failed score, when the
    tests cannot be read or the sandbox does not start: neither is the program's doing.
    """

    is_loaded: ClassVar[bool] = True
    sandbox: Sandbox
    tests: str = "tests"
    in_reference: bool = False
    program: str = "block"
    partial: bool = False
    test_timeout_s: float = 2.0
    time_limit_s: float = 8.0
    limits: Limits = field(default_factory=Limits)

    def score(self, example: Example, text: str) -> Score:
        """Score one completion."""
        tests = read_tests(example, self.tests, in_reference=self.in_reference)
        source = text if self.program == "text" else last_program(text)
        if not source.strip():
            return _score(0.0, "no program")
        if fault := _syntax_fault(source):
            return _score(0.0, fault)
        with Trial(self, source) as trial:
            passed = 0
            detail = ""
            for number, test in enumerate(tests, start=1):
                fault = trial.fault(test)
                passed += not fault
                detail = detail or (f"test {number} of {len(tests)}: {fault}" if fault else "")
                if fault and not self.partial:
                    break
        return _score(passed / len(tests) if self.partial else float(passed == len(tests)), detail)

    def gold(self, example: Example) -> str | None:
        """The reference as a completion, after the prompt where it only goes on with it; None if it is no program."""
        if self.in_reference or not example.reference.strip():
            return None
        if self.program == "text" or last_program(example.reference):
            return example.reference
        prompt = example.prompt if isinstance(example.prompt, str) else ""
        for source in (example.reference, f"{prompt.rstrip()}\n{example.reference}"):
            if not _syntax_fault(source):
                return f"{FENCE}python\n{source.strip()}\n{FENCE}"
        return None


class Trial:
    """One program at its tests: in a process of its own, and where tests are code, that code in another.

    A process that has ended is replaced for the next test.
    """

    def __init__(self, reward: CodeReward, source: str) -> None:
        self.reward = reward
        self.source = source
        self.deadline = time.monotonic() + reward.time_limit_s
        self.processes: dict[str, Process] = {}

    def fault(self, test: Test) -> str:
        """What is wrong with the program by this test; empty when it passes."""
        deadline = min(time.monotonic() + self.reward.test_timeout_s, self.deadline)
        if time.monotonic() >= self.deadline:
            return f"all tests together took longer than {self.reward.time_limit_s:g} s"
        try:
            if isinstance(test, StdinTest):
                return self._script(test, deadline)
            if isinstance(test, CallTest):
                return self._call(test, deadline)
            return self._code(test, deadline)
        except ProcessEnded as error:
            self.close()
            return f"the program {error}"
        except (MemoryError, RecursionError, ValueError) as error:  # of a value made for that
            self.close()
            return f"the program returned a value that cannot be compared ({type(error).__name__})"

    def _script(self, test: StdinTest, deadline: float) -> str:
        output, fault = _two_texts(self._process("script", self.source).ask(test.stdin, deadline))
        if fault:
            return fault
        return "" if _lines(output) == _lines(test.stdout) else f"printed {output[:SHOWN_CHARS]!r}"

    def _call(self, test: CallTest, deadline: float) -> str:
        value, fault = self._value(test.function, test.arguments, test.keywords, deadline)
        if fault:
            return ": ".join(fault)
        expected = _as_json(test.expected) if test.is_json else test.expected
        value = _as_json(value) if test.is_json else value
        return "" if value == expected else f"{test.function} returned {repr(value)[:SHOWN_CHARS]}"

    def _code(self, test: CodeTest, deadline: float) -> str:
        tests = self._process("tests", "")
        reply = tests.ask((test.source, list(test.names)), deadline)
        while isinstance(reply, list):
            name, arguments, keywords = (decoded(each) for each in reply)
            value, fault = self._value(name, arguments, keywords, deadline)
            reply = tests.ask(fault or (value,), deadline)
        return str(reply)

    def _value(
        self, function: str, arguments: Sequence[Any], keywords: Mapping[str, Any], deadline: float
    ) -> tuple[Any, tuple[str, str] | None]:
        """What a function of the program returns, or the name and the text of the exception that it raises."""
        reply = self._process("functions", self.source).ask((function, tuple(arguments), dict(keywords)), deadline)
        try:
            if isinstance(reply, list) and len(reply) == 1:
                return decoded(reply[0]), None
        except ValueError as error:
            return None, ("TypeError", str(error))
        return None, _two_texts(reply)

    def _process(self, part: str, source: str) -> Process:
        if part not in self.processes:
            sandbox = self.reward.sandbox
            try:
                process = Process(sandbox.command, interpreter(), self.reward.limits, calls=sandbox.calls)
            except (ProcessFault, OSError) as error:
                raise RewardError(f"the sandbox for a program could not be started: {error}") from error
            self.processes[part] = process
            process.send((part, source), self.deadline)
        return self.processes[part]

    def close(self) -> None:
        """End the processes; the next test starts others."""
        with ExitStack() as exits:
            for process in self.processes.values():
                exits.callback(process.close)
            self.processes = {}

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_code(context: PluginContext) -> CodeReward:
    """The `code` reward; ConfigError without a sandbox that works, unless `unsafe` allows that."""
    config = context.config
    table = config.table("reward", RewardTable)
    sandbox, reason = find_sandbox()
    if sandbox is None and not table.unsafe:
        what = f"reward 'code' runs programs that a model wrote, and there is no sandbox for them: {reason}"
        raise ConfigError(Problem(where=config.place("reward.type"), what=what, fix=FIX))
    if sandbox is None:
        LOG.warning("UNSAFE: programs that the model writes run WITHOUT A SANDBOX, with your rights: %s", reason)
    else:
        LOG.info("Programs run in a sandbox: %s", sandbox.name)
    if "boxed" in config.data.instruction:
        place = config.place("data.instruction")
        LOG.warning("%s asks for a box, and reward 'code' reads a program: ask for one ```python block there", place)
    time_limit_s = OWN_SHARE * time_limit_of(config, "code")
    return CodeReward(
        sandbox=sandbox or NO_SANDBOX,
        tests=table.tests,
        in_reference=table.tests == config.data.answer_key,
        program=table.program,
        partial=table.partial,
        test_timeout_s=table.test_timeout_s,
        time_limit_s=time_limit_s,
        limits=Limits(memory_bytes=table.test_memory_mb * 2**20, cpu_s=math.ceil(time_limit_s) + 1),
    )


def last_program(text: str) -> str:
    """The last fenced block of a text if it is Python (or names no language); empty when there is none, or no end."""
    found, lines, fence = "", list[str](), ""
    language = ""
    for line in text.splitlines():
        bare = line.strip()
        if not fence and bare.startswith(FENCE):
            fence = bare[: len(bare) - len(bare.lstrip("`"))]
            language, lines = bare[len(fence) :].strip().casefold(), []
        elif fence and bare == fence:
            found, fence = "\n".join(lines) if language in LANGUAGES else found, ""
        elif fence:
            lines.append(line)
    return "" if fence else found


def _syntax_fault(source: str) -> str:
    """Why a text is no program, found before any process starts; empty when it is one."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of the model's own escape sequences
            ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"no program: {type(error).__name__}"
    return ""


def _score(value: float, detail: str) -> Score:
    return Score(outcome=Outcome.SCORED, value=value, detail=detail)


def _two_texts(reply: Any) -> tuple[str, str]:
    if isinstance(reply, list) and len(reply) == 2 and all(isinstance(each, str) for each in reply):
        return reply[0], reply[1]
    raise ProcessEnded("answered with something that cannot be read")


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends, and without empty ones at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _as_json(value: Any) -> Any:
    """A value as JSON would hold it."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _as_json(each) for name, each in value.items()}
    return value
