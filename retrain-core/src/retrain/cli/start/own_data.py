"""Settings of a run from a model, a data set and a reward as a user names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import build_part, resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.run.tables import read_config, registered_tables
from retrain.text.terminal_text import printable

FILES, HUB = "files", "hub"  # the sources that read any table
PREVIEWED = 200  # rows that are looked at for the columns
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
SPLIT_NAME = re.compile(r"(?<![a-z])(train|training|test|validation|valid|val|dev)(?![a-z])", re.IGNORECASE)
TABULAR = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "task", "messages", "conversation", "text")
ANSWERS = (
    *("answer", "final_answer", "reference", "reference_answer", "ground_truth", "expected_answer", "expected", "gold"),
    *("target", "label", "solution", "result", "output", "response", "completion"),
)
TESTS = ("tests", "test_cases", "test_list", "input_output", "verification_info", "public_tests", "asserts", "test")
SOLUTIONS = ("answer", "solution", "canonical_solution", "reference_solution", "code")
# A text this many times longer than every other is taken for the prompt: answers and hints are rarely that short of it.
LONGER = 3.0
# Not all rows: a published data set has a few solutions without the mark.
MOST = 0.9
HASHES, BOXES = "####", (r"\boxed", r"\fbox")
HEAD_CHARS, MOST_SHOWN = 40, 20
CUSTOM, CODE, JUDGE = "custom", "code", "judge"
ASK_FOR_PROGRAM = "Put your whole program into one ```python block."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The flags of the user; an empty text leaves the choice to us, 0 steps too."""

    model: str = ""
    data: str = ""
    reward: str = ""
    prompt_key: str = ""
    answer_key: str = ""
    subset: str = ""
    split: str = ""
    revision: str = ""
    steps: int = 0
    log_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """The settings of `[data]`, and remarks on how they were found."""

    settings: dict[str, Any]
    told: Sequence[str] = ()
    tests: str = ""  # the column of a program's tests
    reward: str = ""  # that suits it; empty where the source brings its own verifier, or any may do


def choose_data(wishes: Wishes, plugins: Plugins) -> DataChoice:
    """The source that reads the data named by `--data`, with its columns; ConfigError when these are unclear.

    The name of a source (`math`), by itself, with the value of its one required option (`reasoning_gym:chain_sum`) or
    with a local copy (`gsm8k:./gsm8k`); otherwise a file, folder or pattern; otherwise the id of a hub data set.
    """
    name, _, value = wishes.data.partition(":")
    if plugins.find(Kind.DATA_SOURCE, name) and name not in (FILES, HUB):
        is_copy = bool(value) and Path(value).expanduser().exists()
        options = {} if is_copy else _required(plugins, name, value)
        named = {"source": name, **({"path": value} if is_copy else {}), **_options(wishes, options)}
        given = {"prompt_key": wishes.prompt_key, "answer_key": wishes.answer_key}
        return DataChoice(settings=named | {key: column for key, column in given.items() if column})
    data = wishes.data.removeprefix(f"{HUB}:").removeprefix(f"{FILES}:")
    folder = Path(data).expanduser()
    is_hub = not folder.exists() and HUB_ID.fullmatch(data) and not data.lower().endswith(TABULAR)
    has_splits = folder.is_dir() and any(SPLIT_NAME.search(entry.name) for entry in folder.rglob("*"))
    settings: dict[str, Any] = {"source": HUB if is_hub else FILES, "path": data}
    settings |= _options(wishes, {"split": "train"} if has_splits else {})
    columns = _columns(settings, wishes, plugins)
    keys = {"prompt_key": columns.prompt, "answer_key": columns.answer}
    settings |= {key: column for key, column in keys.items() if column}
    if columns.options:
        settings["options"] = {**settings.get("options", {}), **columns.options}
    if columns.tests:
        settings["instruction"] = ASK_FOR_PROGRAM
    reward = "math" if columns.has_formulas else "match"
    return DataChoice(settings=settings, told=columns.told, tests=columns.tests, reward=reward)


def choose_reward(reward: str, tests: str = "") -> dict[str, Any]:
    """The settings of `[reward]`: a name, a dotted path, `my_reward.py`, `my_reward.py:function` or `judge:MODEL`."""
    if reward == CODE:
        return {"type": CODE, **({"tests": tests} if tests else {})}
    file, _, function = reward.partition(":")
    if file == JUDGE:
        return {"type": JUDGE, **({"judge_model": function} if function else {})}
    if file.endswith(".py"):
        return {"type": CUSTOM, "custom_module": file, **({"custom_function": function} if function else {})}
    return {"type": reward} if reward else {}


def folder_of(wishes: Wishes) -> str:
    """`logs/tasks` for `data/tasks.jsonl`."""
    stem = re.sub(r"[^\w-]+", "-", Path(wishes.data.partition(":")[2] or wishes.data.rstrip("/")).stem).strip("-")
    return wishes.log_dir or f"logs/{stem or 'train'}"


def _required(plugins: Plugins, name: str, value: str) -> dict[str, Any]:
    """`value` as the one option without which the source does nothing, such as the data set of `reasoning_gym`."""
    params = resolve(plugins, Kind.DATA_SOURCE, name, where="--data").params
    fields = params.model_fields if params else {}
    wanted = next((key for key, info in fields.items() if info.is_required()), "")
    if bool(wanted) == bool(value):
        return {wanted: value} if wanted else {}
    if wanted:
        what, fix = f"{name!r} needs its {wanted}", f"write it after a colon: --data {name}:{wanted.upper()}"
        raise ConfigError(Problem(code="init.source-needs-value", where="--data", what=what, fix=fix))
    what, fix = f"source {name!r} takes no value, and there is no file {name}:{value}", f"write --data {name}"
    raise ConfigError(Problem(code="init.source-takes-no-value", where="--data", what=what, fix=fix))


def _options(wishes: Wishes, options: Mapping[str, Any]) -> dict[str, Any]:
    named = {"subset": wishes.subset, "split": wishes.split, "revision": wishes.revision}
    both = {**options, **{name: value for name, value in named.items() if value}}
    return {"options": both} if both else {}


def _columns(settings: Mapping[str, Any], wishes: Wishes, plugins: Plugins) -> Columns:
    tables = registered_tables(plugins)
    arguments = [word for key, value in settings.items() if key != "options" for word in (f"--data-{key}", value)]
    config, problems = read_config(None, plugins, tables, arguments=arguments, environ={})
    if problems:
        raise ConfigError(*problems)
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins)
    options = settings.get("options", {})
    source = build_part(Kind.DATA_SOURCE, str(settings["source"]), "data.source", context, options, "data.options")
    where, by_tests = f"--data {wishes.data}", wishes.reward == CODE
    try:
        rows = source.preview(PREVIEWED)
    except ConfigError as error:
        if settings["source"] != HUB:
            raise
        what = f"no file or folder {wishes.data!r} is here, so it was looked for on the hub"
        here = Problem(code="init.data-not-here", where=where, what=what, fix="check the path")
        raise ConfigError(here, *error.problems) from None
    if not rows:
        what, fix = "the data set is empty", "give one task per row"
        raise ConfigError(Problem(code="data.empty", where=where, what=what, fix=fix))
    return find_columns(rows, prompt=wishes.prompt_key, answer=wishes.answer_key, where=where, by_tests=by_tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of prompt and answer, the options of `[data]` that go with them, and an explanation for the user."""

    prompt: str
    answer: str
    options: Mapping[str, Any]
    told: tuple[str, ...]
    tests: str = ""  # of a program, with `by_tests`
    has_formulas: bool = False  # among the answers, so that equal ones may be written in several ways


def find_columns(
    rows: Sequence[Mapping[str, Any]], *, prompt: str = "", answer: str = "", where: str, by_tests: bool = False
) -> Columns:
    """The columns of prompt and answer; a given one is used unchanged.

    With `by_tests` a program's tests decide, in a separate column; the answer is a solution, or the tests again.
    ConfigError when the rows do not decide it: it lists the columns, with a value of each, and the flag that decides.
    """
    fields = _fields(rows)
    prompt, by = (prompt, "--prompt-key") if prompt else _prompt(fields, answer)
    if not prompt:
        what, fix = "it is unclear which column holds the prompt", "name it: --prompt-key COLUMN"
        raise _unsure(fields, where, code="data.prompt-column-unclear", what=what, fix=fix)
    if by_tests:
        tests = _named(TESTS, [name for name in fields if name != prompt]) or answer
        if not tests:
            what, fix = "it is unclear which column holds the tests of a program", "name it: --answer-key COLUMN"
            raise _unsure(fields, where, code="data.answer-column-unclear", what=what, fix=fix)
        texts = [name for name, values in fields.items() if _is_text(values) and name not in (prompt, tests)]
        answer = answer or _named(SOLUTIONS, texts) or tests
        explained = (f"prompt: column {prompt!r} ({by})", f"tests: column {tests!r}", f"answer: column {answer!r}")
        return Columns(prompt=prompt, answer=answer, options={}, told=explained, tests=tests)
    chats = [value for value in fields.get(prompt, []) if isinstance(value, list) and value]
    in_chat = not answer and _is_chat(fields.get(prompt, [])) and all(c[-1]["role"] == "assistant" for c in chats)
    if in_chat:
        answer, found = "", "the last message of that chat"
        values = [chat[-1].get("content") for chat in fields[prompt] if isinstance(chat, list) and chat]
    else:
        answer, found = (answer, "--answer-key") if answer else _answer(fields, prompt)
        values = fields.get(answer, [])
    if not answer and not in_chat:
        what, fix = "it is unclear which column holds the answer", "name it: --answer-key COLUMN"
        raise _unsure(fields, where, code="data.answer-column-unclear", what=what, fix=fix)
    extract = _extract(values)
    options = ({"answer_in_chat": True} if in_chat else {}) | ({"extract": extract} if extract else {})
    told = [f"prompt: column {prompt!r} ({by})", f"answer: {f'column {answer!r} ({found})' if answer else found}"]
    rest = [name for name in ANSWERS if name in fields and name not in (prompt, answer)]
    if found == "by its name" and rest:
        told[1] += f"; {', '.join(map(repr, rest))} would do as well: --answer-key decides"
    if extract:
        stated = f"the text after their last {HASHES}" if extract == "hashes" else r"their last \boxed{...}"
        told.append(f"the answers are worked solutions: {stated} is the reference")
    has_formulas = any(sign in str(value) for value in values for sign in ("\\", "/", "^"))
    return Columns(prompt=prompt, answer=answer, options=options, told=tuple(told), has_formulas=has_formulas)


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The values of every column; of a column of objects also the values of its fields, as `column.part`."""
    fields: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            inner = value.items() if isinstance(value, Mapping) else ()
            for part, each in (("", value), *inner):
                fields.setdefault(f"{name}.{part}" if part else name, []).append(each)
    return fields


def _prompt(fields: Mapping[str, list[Any]], answer: str) -> tuple[str, str]:
    askable = {
        name: values for name, values in fields.items() if name != answer and (_is_text(values) or _is_chat(values))
    }
    if named := _named(PROMPTS, askable):
        return named, "by its name"
    rest = {name: values for name, values in askable.items() if _plain(name) not in ANSWERS}
    texts = {name: fmean(len(str(value)) for value in values) for name, values in rest.items()}
    longest = max(texts, key=texts.__getitem__, default="")
    if longest and all(texts[longest] >= LONGER * length for name, length in texts.items() if name != longest):
        return longest, "by its content: the longest text"
    return "", ""


def _answer(fields: Mapping[str, list[Any]], prompt: str) -> tuple[str, str]:
    given = {name: values for name, values in fields.items() if name != prompt and _is_text(values, int, float)}
    if named := _named(ANSWERS, given):
        return named, "by its name"
    return (next(iter(given)), "the only other column that can be one") if len(given) == 1 else ("", "")


def _extract(values: Sequence[Any]) -> str:
    """`hashes` or `boxed` where almost every answer is a solution that states its result in this way."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    marks = {"hashes": (HASHES,), "boxed": BOXES} if texts else {}
    counts = {form: sum(any(mark in text for mark in each) for text in texts) for form, each in marks.items()}
    return next((form for form, count in counts.items() if count >= MOST * len(texts)), "")


def _unsure(fields: Mapping[str, Sequence[Any]], where: str, *, code: str, what: str, fix: str) -> ConfigError:
    """The error that lists every column with a value: `id (3), question ('What is ...')`."""
    listed = []
    for name, values in fields.items():
        head = printable(repr(next((value for value in values if value is not None), None)))
        listed.append(f"{printable(name)} ({head if len(head) <= HEAD_CHARS else f'{head[:HEAD_CHARS]}...'})")
    more = [f"{len(fields) - MOST_SHOWN} more"] if len(fields) > MOST_SHOWN else []
    why = f"columns: {', '.join([*listed[:MOST_SHOWN], *more]) or 'none'}"
    return ConfigError(Problem(code=code, where=where, what=what, why=why, fix=fix))


def _named(wanted: Sequence[str], columns: Iterable[str]) -> str:
    """The first column with one of these names, the earlier names first; empty otherwise."""
    by_name = {_plain(column): column for column in reversed([*columns])}
    return next((by_name[name] for name in wanted if name in by_name), "")


def _plain(name: str) -> str:
    return name.rpartition(".")[2].strip().lower().replace(" ", "_").replace("-", "_")


def _is_text(values: Sequence[Any], *others: type) -> bool:
    """True if there are values, and all are texts or of the `others`."""
    plain = [value for value in values if value is not None]
    return bool(plain) and all(isinstance(each, (str, *others)) and not isinstance(each, bool) for each in plain)


def _is_chat(values: Sequence[Any]) -> bool:
    chats = [value for value in values if value]
    return bool(chats) and all(
        isinstance(chat, list)
        and all(isinstance(turn, Mapping) and {"role", "content"} <= turn.keys() for turn in chat)
        for chat in chats
    )
