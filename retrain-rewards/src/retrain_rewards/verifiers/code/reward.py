"""The `code` reward: the program of a completion passes the tests of its example, or it does not."""

from __future__ import annotations

import logging
import math
import re
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import ClassVar

from retrain.api import Example, Outcome, PluginContext, Problem, RewardError, Score
from retrain_rewards.faults import refused
from retrain_rewards.sandbox.checks import UNUSED
from retrain_rewards.sandbox.inside import HEADER_BYTES, TEXT_CHARS
from retrain_rewards.sandbox.process import Limits, Process, ProcessEnded, ProcessFault
from retrain_rewards.sandbox.sandbox import NO_SANDBOX, Sandbox, find_sandbox, no_sandbox, with_numpy
from retrain_rewards.tables import RewardTable, time_limit_of
from retrain_rewards.verifiers.code.compare import (
    SHOWN_CHARS,
    json_form,
    matches,
    printed_as_expected,
    read_reply,
    reply_limit,
    shown,
)
from retrain_rewards.verifiers.code.layouts import CallTest, CodeTest, StdinTest, Test, read_tests
from retrain_rewards.verifiers.code.source import FAULTS, FENCE, last_program, prelude, ready, unbound

LOG = logging.getLogger("retrain")
# Share of the scoring time limit: a program that is too slow scores 0; it is not a failed score.
OWN_SHARE = 0.8
PROCESSES = re.compile(r"\b(multiprocessing|ProcessPoolExecutor|subprocess|os\.(fork|system|popen|posix_spawn))\b")
NO_PROCESSES = " (the sandbox does not offer further processes, such as multiprocessing: use threads)"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeReward:
    """1.0 when the program passes every test of its example, otherwise 0.0; with `partial` the share that it passes.

    A program that crashes, runs out of time or memory, or says nothing is wrong. RewardError, a failed score, when the
    tests cannot be read or the sandbox does not start: the program is not to blame.
    """

    is_loaded: ClassVar[bool] = True
    sandbox: Sandbox
    tests: str = "tests"
    in_reference: bool = False
    program: str = "block"
    partial: bool = False
    test_timeout_s: float = 2.0
    test_tolerance: float = 0.0
    numpy: bool = False
    time_limit_s: float = 8.0
    limits: Limits = field(default_factory=Limits)

    def score(self, example: Example, text: str) -> Score:
        tests = read_tests(example, self.tests, in_reference=self.in_reference)
        source = text if self.program == "text" else last_program(text)
        if not source.strip():
            return _score(0.0, "no program")
        try:
            imports = prelude(unbound(source), has_numpy=self.numpy)
        except FAULTS as error:
            return _score(0.0, f"no program: {type(error).__name__}")
        # Only with the filter of system calls: without it processes work, and are not to blame.
        hint = NO_PROCESSES if self.sandbox.calls and PROCESSES.search(source) else ""
        passed, detail = 0, ""
        with closing(Trial(self, source, imports, tests)) as trial:
            for number, test in enumerate(tests, start=1):
                fault = trial.fault(test)
                passed += not fault
                detail = detail or (f"test {number} of {len(tests)}: {fault}{hint}" if fault else "")
                if fault and not self.partial:
                    break
        return _score(passed / len(tests) if self.partial else float(passed == len(tests)), detail)

    def gold(self, example: Example) -> str | None:
        if self.in_reference or not example.reference.strip():
            return None
        if self.program == "text" or last_program(example.reference):
            return example.reference
        prompt = example.prompt if isinstance(example.prompt, str) else ""
        for source in (example.reference, f"{prompt.rstrip()}\n{example.reference}"):
            with suppress(*FAULTS):
                unbound(source)
                return f"{FENCE}python\n{source.strip()}\n{FENCE}"
        return None


class Trial:
    """One program at its tests, in a process that is replaced when it ends; code of tests has another."""

    def __init__(self, reward: CodeReward, source: str, imports: str, tests: Sequence[Test]) -> None:
        self.reward = reward
        self.program = (source, imports)
        self.deadline = time.monotonic() + reward.time_limit_s
        self.processes: dict[str, Process] = {}
        self._is_linked = any(isinstance(test, CodeTest) for test in tests)
        self._sockets: tuple[socket.socket, ...] = ()

    def fault(self, test: Test) -> str:
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

    def _script(self, test: StdinTest, deadline: float) -> str:
        reply = self._process("script", *self.program).ask(test.stdin, deadline)
        size = int.from_bytes(reply[1 : 1 + HEADER_BYTES], "big")
        fault, output = (reply[1 + HEADER_BYTES :][part] for part in (slice(size), slice(size, None)))
        # The program started threads, so the next test runs in another process.
        if reply[:1] == b"1":
            self.close()
        if size:
            return fault.decode("utf-8", "replace")
        text = output.decode("utf-8", "replace")
        is_right = printed_as_expected(text, test.stdout, tolerance=self.reward.test_tolerance)
        return "" if is_right else f"printed {text[:SHOWN_CHARS]!r}"

    def _call(self, test: CallTest, deadline: float) -> str:
        expected = json_form(test.expected) if test.is_json else test.expected
        size, items = reply_limit(expected)
        message = (test.function, tuple(test.arguments), dict(test.keywords), test.is_json)
        reply = self._process("functions", *self.program).ask(message, deadline, size).decode("utf-8", "replace")
        if not reply.startswith("+"):
            return reply[1:][:TEXT_CHARS] or "the program answered with nothing"
        try:
            value = read_reply(reply[1:], items)
        except ValueError as error:
            return f"{test.function} returned {error}"
        if matches(value, expected, as_json=test.is_json, tolerance=self.reward.test_tolerance):
            return ""
        return f"{test.function} returned {shown(reply[1:])}"

    def _code(self, test: CodeTest, deadline: float) -> str:
        program = self._process("functions", *self.program)
        tests = self._process("tests")
        program.send(None, deadline)
        reply = tests.ask((ready(test.source), list(test.names)), deadline, beside=program)
        if reply == UNUSED.encode():
            what, fix = f"{UNUSED}: every program would pass", "let the tests call it, or leave them out"
            raise RewardError(Problem(code="reward.unused-program", what=what, fix=fix))
        return reply.decode("utf-8", "replace")[: 4 * SHOWN_CHARS]

    def _process(self, part: str, *given: str) -> Process:
        if part not in self.processes:
            reward = self.reward
            if self._is_linked and not self._sockets:
                self._sockets = socket.socketpair()
            link = self._sockets[part == "tests"] if self._sockets and part != "script" else None
            try:
                process = reward.sandbox.process(reward.limits, link)
            except (ProcessFault, OSError) as error:
                what = f"the sandbox for a program could not be started: {error}"
                fix = "`retrain doctor` checks the sandbox: it may be out of memory, processes or rights"
                raise RewardError(Problem(code="reward.sandbox-failed", what=what, fix=fix)) from error
            if link is not None:
                # So that the other process sees the end of this one.
                link.close()
            self.processes[part] = process
            process.send((part, *given), self.deadline)
        return self.processes[part]

    def close(self) -> None:
        with ExitStack() as exits:
            for process in self.processes.values():
                exits.callback(process.close)
            for end in self._sockets:
                exits.callback(end.close)
            self.processes, self._sockets = {}, ()


def make_code(context: PluginContext) -> CodeReward:
    config = context.config
    table = config.table("reward", RewardTable)
    sandbox, reason = find_sandbox()
    if sandbox is not None:
        LOG.info("Programs run in a sandbox: %s", sandbox.name)
    elif table.unsafe:
        LOG.warning("UNSAFE: programs that the model writes run WITHOUT A SANDBOX, with your rights: %s", reason)
        sandbox = NO_SANDBOX
    else:
        raise no_sandbox(config.place("reward.type"), reason)
    if table.numpy:
        try:
            sandbox = with_numpy(sandbox)
        except ImportError as error:
            what, fix = f"programs cannot have numpy: {error}", "pip install numpy in this environment, or leave it out"
            raise refused(config.place("reward.numpy"), code="reward.no-numpy", what=what, fix=fix) from None
    if "boxed" in config.data.instruction:
        place = config.place("data.instruction")
        LOG.warning("%s requests a box, but reward 'code' reads a program: request one ```python block there", place)
    time_limit_s = OWN_SHARE * time_limit_of(config, "code")
    return CodeReward(
        sandbox=sandbox,
        tests=table.tests,
        in_reference=table.tests == config.data.answer_key,
        program=table.program,
        partial=table.partial,
        test_timeout_s=table.test_timeout_s,
        test_tolerance=table.test_tolerance,
        numpy=table.numpy,
        time_limit_s=time_limit_s,
        limits=Limits(memory_bytes=table.test_memory_mb * 2**20, cpu_s=math.ceil(time_limit_s) + 1),
    )


def _score(value: float, detail: str) -> Score:
    return Score(outcome=Outcome.SCORED, value=value, detail=detail)
