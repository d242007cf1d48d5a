"""Finds out which columns of a table hold prompt and answer: by their names, else by what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.terminal_text import printable

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "task", "messages", "conversation", "text")
ANSWERS = (
    *("answer", "final_answer", "reference", "reference_answer", "ground_truth", "expected_answer", "expected", "gold"),
    *("target", "label", "solution", "result", "output", "response", "completion"),
)
TESTS = ("tests", "test_cases", "test_list", "input_output", "verification_info", "public_tests", "asserts", "test")
SOLUTIONS = ("answer", "solution", "canonical_solution", "reference_solution", "code")
LONGER = 3.0  # times: a text that is so much longer than every other is taken for the prompt
MOST = 0.9  # of the rows must be of one form
HASHES, BOXES = "####", (r"\boxed", r"\fbox")
HEAD_CHARS, MOST_SHOWN = 40, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where prompt and answer are, the options of `[data]` that go with it, and how that was found, for the user."""

    prompt: str
    answer: str
    options: Mapping[str, Any]
    told: tuple[str, ...]
    tests: str = ""  # of a program, with `by_tests`
    has_formulas: bool = False  # among the answers, so that equal ones may be written in several ways


def find_columns(
    rows: Sequence[Mapping[str, Any]], *, prompt: str = "", answer: str = "", where: str, by_tests: bool = False
) -> Columns:
    """The columns of prompt and answer; a given one is taken as it is.

    With `by_tests` a program's tests decide, in a column of their own; the answer is a solution, or the tests again.

    ConfigError when the rows do not decide it: it lists the columns, with a value of each, and the flag that decides.
    """
    fields = _fields(rows)
    prompt, by = (prompt, "--prompt-key") if prompt else _prompt(fields, answer)
    if not prompt:
        raise _unsure("the prompt", "--prompt-key", fields, where)
    if by_tests:
        return _with_tests(fields, prompt, by, answer, where)
    in_chat = not answer and _ends_with_answer(fields.get(prompt, []))
    if in_chat:
        answer, found = "", "the last message of that chat"
        values = [chat[-1].get("content") for chat in fields[prompt] if isinstance(chat, list) and chat]
    else:
        answer, found = (answer, "--answer-key") if answer else _answer(fields, prompt)
        values = fields.get(answer, [])
    if not answer and not in_chat:
        raise _unsure("the answer", "--answer-key", fields, where)
    extract = _extract(values)
    options = ({"answer_in_chat": True} if in_chat else {}) | ({"extract": extract} if extract else {})
    told = [f"prompt: column {prompt!r} ({by})", f"answer: {f'column {answer!r} ({found})' if answer else found}"]
    rest = [name for name in ANSWERS if name in fields and name not in (prompt, answer)]
    if found == "by its name" and rest:
        told[1] += f"; {', '.join(map(repr, rest))} would do as well: --answer-key decides"
    if extract:
        told.append(f"the answers are worked solutions: {_stated(extract)} is the reference")
    has_formulas = any(sign in str(value) for value in values for sign in ("\\", "/", "^"))
    return Columns(prompt=prompt, answer=answer, options=options, told=tuple(told), has_formulas=has_formulas)


def shown(fields: Mapping[str, Sequence[Any]]) -> str:
    """Every column with a value: `id (3), question ('What is ...')`."""
    listed = [f"{printable(name)} ({_head(values)})" for name, values in fields.items()]
    more = [f"{len(fields) - MOST_SHOWN} more"] if len(fields) > MOST_SHOWN else []
    return ", ".join([*listed[:MOST_SHOWN], *more]) or "none"


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every column; of a column of objects those of its fields too, as `column.field`."""
    fields: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            for field, each in (("", value), *inner):
                fields.setdefault(f"{name}.{field}" if field else name, []).append(each)
    return fields


def _prompt(fields: Mapping[str, list[Any]], answer: str) -> tuple[str, str]:
    askable = {
        name: values for name, values in fields.items() if name != answer and (_is_text(values) or _is_chat(values))
    }
    for wanted in PROMPTS:
        for name in askable:
            if _plain(name) == wanted:
                return name, "by its name"
    texts = {name: _length(values) for name, values in askable.items() if _plain(name) not in ANSWERS}
    longest = max(texts, key=texts.__getitem__, default="")
    if longest and all(texts[longest] >= LONGER * length for name, length in texts.items() if name != longest):
        return longest, "by its content: the longest text"
    return "", ""


def _answer(fields: Mapping[str, list[Any]], prompt: str) -> tuple[str, str]:
    given = {name: values for name, values in fields.items() if name != prompt and _is_answer(values)}
    for wanted in ANSWERS:
        for name in given:
            if _plain(name) == wanted:
                return name, "by its name"
    return (next(iter(given)), "the only other column that can be one") if len(given) == 1 else ("", "")


def _with_tests(fields: Mapping[str, list[Any]], prompt: str, by: str, answer: str, where: str) -> Columns:
    tests = next((name for wanted in TESTS for name in fields if _plain(name) == wanted and name != prompt), answer)
    if not tests:
        raise _unsure("the tests of a program", "--answer-key", fields, where)
    texts = [name for name, values in fields.items() if _is_text(values) and name not in (prompt, tests)]
    answer = answer or next((name for wanted in SOLUTIONS for name in texts if _plain(name) == wanted), tests)
    told = (f"prompt: column {prompt!r} ({by})", f"tests: column {tests!r}", f"answer: column {answer!r}")
    return Columns(prompt=prompt, answer=answer, options={}, told=told, tests=tests)


def _extract(values: Sequence[Any]) -> str:
    """`hashes` or `boxed` where almost every answer is a solution that states its result in this way."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    if not texts:
        return ""
    if sum(HASHES in text for text in texts) >= MOST * len(texts):
        return "hashes"
    return "boxed" if sum(any(box in text for box in BOXES) for text in texts) >= MOST * len(texts) else ""


def _stated(extract: str) -> str:
    return f"what follows their last {HASHES}" if extract == "hashes" else r"their last \boxed{...}"


def _unsure(what: str, flag: str, fields: Mapping[str, Sequence[Any]], where: str) -> ConfigError:
    why, fix = f"columns: {shown(fields)}", f"name it: {flag} COLUMN"
    return ConfigError(Problem(where=where, what=f"cannot tell which column holds {what}", why=why, fix=fix))


def _plain(name: str) -> str:
    return name.rpartition(".")[2].strip().lower().replace(" ", "_").replace("-", "_")


def _is_text(values: Sequence[Any]) -> bool:
    return any(isinstance(value, str) for value in values) and all(
        value is None or isinstance(value, str) for value in values
    )


def _is_answer(values: Sequence[Any]) -> bool:
    plain = [value for value in values if value is not None]
    return bool(plain) and all(isinstance(value, str | int | float) and not isinstance(value, bool) for value in plain)


def _is_chat(values: Sequence[Any]) -> bool:
    chats = [value for value in values if value]
    return bool(chats) and all(
        isinstance(chat, list)
        and all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in chat)
        for chat in chats
    )


def _ends_with_answer(values: Sequence[Any]) -> bool:
    chats = [value for value in values if isinstance(value, list) and value]
    return _is_chat(values) and all(chat[-1]["role"] == "assistant" for chat in chats)


def _length(values: Sequence[Any]) -> float:
    return fmean([len(str(value)) for value in values] or [0])


def _head(values: Sequence[Any]) -> str:
    text = printable(repr(next((value for value in values if value is not None), None)))
    return text if len(text) <= HEAD_CHARS else f"{text[:HEAD_CHARS]}..."
