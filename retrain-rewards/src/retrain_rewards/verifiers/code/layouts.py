"""The tests of an example, in the layouts that data sets of programming tasks use."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from retrain.api import Example, Problem, RewardError, value_at
from retrain_rewards.verifiers.code.source import modules_read, unbound

LAYOUTS = (
    'a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]} with "fn_name" for a function, '
    "a list of assert statements, or test code that calls the program"
)
FUNCTION_KEYS = ("fn_name", "entry_point", "function")
SETUP_KEYS = ("test_setup_code", "test_imports")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """The program, given `stdin`, prints `stdout`."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """The program's `function` returns `expected`; with `is_json` tuples are lists and keys are texts."""

    function: str
    arguments: Sequence[Any]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    expected: Any
    is_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTest:
    """Code that raises nothing when the program is right, whose functions and classes it uses by `names`."""

    source: str
    names: Sequence[str]


Test = StdinTest | CallTest | CodeTest


def read_tests(example: Example, column: str, *, in_reference: bool) -> tuple[Test, ...]:
    value: Any = example.reference if in_reference else value_at(example.info, column)
    before = sys.get_int_max_str_digits()
    # The data are trusted, so a number in them may have more than 4,300 digits.
    sys.set_int_max_str_digits(0)
    try:
        tests = tuple(_read(_plain(value), example.info))
    except (ValueError, TypeError, LookupError, RecursionError, SyntaxError) as error:
        what = f"the tests of example {example.id} cannot be read: {type(error).__name__}: {error}"
        raise RewardError(Problem(code="reward.unreadable-tests", what=what, fix=f"write them as {LAYOUTS}")) from None
    finally:
        sys.set_int_max_str_digits(before)
    if not tests:
        what = f"example {example.id} has no tests in {column!r}: every program would pass"
        raise RewardError(Problem(code="reward.no-tests", what=what, fix="name their column in [reward] tests"))
    if all(isinstance(test, StdinTest) and not test.stdout.strip() for test in tests):
        what = f"the tests of example {example.id} expect no output: silence would pass"
        raise RewardError(Problem(code="reward.silent-tests", what=what, fix="leave the example out"))
    return tests


def _plain(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _read(value: Any, info: Mapping[str, Any]) -> list[Test]:
    if value is None:
        return []
    if isinstance(value, str):
        return _code(value, info) if value.strip() else []
    if isinstance(value, Mapping):
        if "inputs" not in value:
            return _read([value], info)
        name = _function({**info, **value})
        return [_pair(i, o, name) for i, o in zip(value["inputs"], value["outputs"], strict=True)]
    found: list[Test] = []
    for entry in value:
        if isinstance(entry, str):
            found += _asserts(entry, info)
        elif "args" in entry or entry.get("testtype") == "functional":
            name, keywords = _function({**info, **entry}), dict(entry.get("kwargs") or {})
            if "args" in entry:
                arguments, expected = entry["args"], entry["output"]
            else:
                arguments = [json.loads(line) for line in entry["input"].splitlines() if line.strip()]
                expected = json.loads(entry["output"])
            found.append(_json_call(name, arguments, expected, keywords))
        else:
            found.append(_pair(entry["input"], entry["output"], ""))
    return found


def _json_call(function: str, arguments: Sequence[Any], expected: Any, keywords: Mapping[str, Any]) -> CallTest:
    return CallTest(function=function, arguments=arguments, keywords=keywords, expected=expected, is_json=True)


def _pair(given: Any, expected: Any, function: str) -> Test:
    if function:
        # The layout of APPS puts a value into a list.
        if isinstance(expected, list) and len(expected) == 1:
            expected = expected[0]
        return _json_call(function, given, expected, {})
    texts = ["\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in (given, expected)]
    return StdinTest(stdin=texts[0], stdout=texts[1])


def _function(fields: Mapping[str, Any]) -> str:
    metadata = _plain(fields.get("metadata"))
    if isinstance(metadata, Mapping) and metadata.get("func_name"):
        return str(metadata["func_name"])
    return next((str(fields[key]) for key in FUNCTION_KEYS if fields.get(key)), "")


def _code(source: str, info: Mapping[str, Any]) -> list[Test]:
    entry = _function(info)
    if entry and any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in ast.parse(source).body):
        source += f"\ncheck({entry})\n"
    return [_code_test(source)]


def _asserts(source: str, info: Mapping[str, Any]) -> list[Test]:
    setup = [info.get(key) or "" for key in SETUP_KEYS]
    before = "\n".join(part if isinstance(part, str) else "\n".join(part) for part in setup).strip()
    match [] if before else ast.parse(source.strip()).body:
        case [
            ast.Assert(
                test=ast.Compare(left=ast.Call(func=ast.Name(id=name)) as call, ops=[ast.Eq()], comparators=[expected])
            )
        ]:
            with suppress(ValueError, TypeError):  # more than a plain value
                simple = CallTest(
                    function=name,
                    arguments=[ast.literal_eval(each) for each in call.args],
                    keywords={str(each.arg): ast.literal_eval(each.value) for each in call.keywords if each.arg},
                    expected=ast.literal_eval(expected),
                )
                return [simple]
    return [_code_test(f"{before}\n{source.strip()}\n")]


def _code_test(source: str) -> CodeTest:
    names = sorted(unbound(source) - modules_read(source))
    if not names:
        raise ValueError("the test code calls nothing of the program")
    return CodeTest(source=source, names=names)
