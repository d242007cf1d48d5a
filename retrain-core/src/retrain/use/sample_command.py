"""`retrain sample`: completions of prompts from a file, one line of JSON per prompt."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Kind, Sample, SampleRequest, SamplingParams, Tokens
from retrain.run.opened import Opened, opened, subject_config
from retrain.run.seed_sources import sample_seed
from retrain.run.subject import find_subject
from retrain.tasks.columns import column_names, unknown_column, value_at
from retrain.tasks.prompts import encode_prompts
from retrain.tasks.rollout import draw_samples
from retrain.text.chat import as_chat
from retrain.text.command_options import checkpoint_option, overrides_argument, subject_argument
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import context_length

AT_ONCE = 1024  # prompts given to the engine together
DIGITS = 6  # of a log-probability
EPILOG = """\b
Examples:
  retrain sample logs/train --prompts questions.txt
  retrain sample logs/train --prompts questions.jsonl --samples 8 --temperature 0.7 --out answers.jsonl
  retrain sample logs/train --prompts tasks.parquet --prompt-key question
  echo "What is 17 + 25?" | retrain sample logs/train --checkpoint best --prompts - --greedy
  retrain sample Qwen/Qwen3-0.6B --prompts questions.txt --raw --max-tokens 64

\b
Exit codes: 0 done; 1 failed; 2 usage or configuration error.
"""
FIELDS = ("prompt", "messages", "question", "problem")
TABLES = (".json", ".csv", ".parquet")  # which the source `files` reads
Prompt = str | Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    samples: int
    greedy: bool
    seed: int
    raw: bool
    tokens: bool
    logprobs: bool


@click.command("sample", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@subject_argument()
@overrides_argument()
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    required=True,
    help="JSONL, JSON, CSV, Parquet, or one prompt per line; - for stdin.",
)
@checkpoint_option()
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Completions of each prompt.")
@click.option("--greedy", is_flag=True, help="Take the likeliest token each time.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the completions.")
@click.option("--raw", is_flag=True, help="Give the model each prompt verbatim, without chat template.")
@click.option("--tokens", is_flag=True, help="Write token ids too.")
@click.option("--logprobs", is_flag=True, help="Write the log-probability of each token too.")
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write here; continues where it was stopped."
)
@click.pass_obj
def command(
    plugins: Plugins,
    /,
    subject: str,
    overrides: tuple[str, ...],
    file: str,
    checkpoint: str,
    out: Path | None,
    **wanted: Any,
) -> None:
    """Sample completions of every prompt in FILE from SUBJECT: a run, an adapter, or a model.

    Prompts are rendered as in training. Temperature, token limit and other settings come from the run; keys of the
    configuration are flags: --temperature 0.7, --max-tokens 64. Each line of the output is an object with the prompt
    and its completions."""
    policy = find_subject(subject, checkpoint)
    prompts = read_prompts(file, subject_config(policy, plugins, overrides).config, plugins)
    with opened(policy, plugins, overrides) as source:
        sample_file(source, prompts, Wanted(**wanted), out)


def sample_file(source: Opened, prompts: Sequence[Prompt], wanted: Wanted, out: Path | None) -> None:
    """Write a line for every prompt as soon as its last completion ends; those already in `out` are skipped."""
    training, config = source.config.training, source.config
    params = SamplingParams(max_tokens=training.max_tokens, temperature=training.temperature, greedy=wanted.greedy)
    names = [f"prompt {number}" for number in range(len(prompts))]
    rows = prompt_tokens(source, prompts, names, raw=wanted.raw)
    # equal where the same prompt gives the same completions and the same line
    subject, data = source.subject, config.data.model_dump(mode="json")
    kept = {name: data[name] for name in ("system_prompt", "instruction", "template_args", "thinking")}
    content = [subject.model, str(subject.folder and subject.folder.resolve()), subject.steps, asdict(params)]
    text = json.dumps([*content, asdict(wanted), kept], sort_keys=True, default=str)
    settings = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    done = _done(out, settings, prompts) if out else set()
    left = [number for number in range(len(prompts)) if number not in done]
    with ExitStack() as stack:
        target: IO[str] = sys.stdout
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(out.open("a", encoding="utf-8"))
        lines = _Lines(source, prompts, wanted, settings, target)
        for start in range(0, len(left), AT_ONCE):
            numbers = left[start : start + AT_ONCE]
            requests = [
                SampleRequest(
                    prompt_T=rows[number],
                    seeds_G=tuple(sample_seed(wanted.seed, number, index) for index in range(wanted.samples)),
                )
                for number in numbers
            ]

            def take(place: int, index: int, sample: Sample, numbers: Sequence[int] = numbers) -> None:
                lines.take(numbers[place], index, sample)

            groups = draw_samples(source.backend, requests, params, [names[n] for n in numbers], take)
            for number, group in zip(numbers, groups, strict=True):
                for index, sample in enumerate(group):
                    lines.take(number, index, sample)


class _Lines:
    def __init__(
        self, source: Opened, prompts: Sequence[Prompt], wanted: Wanted, settings: str, target: IO[str]
    ) -> None:
        self._decode, self._prompts, self._wanted = source.tokenizer.decode, prompts, wanted
        self._settings, self._target = settings, target
        self._samples: dict[int, dict[int, Sample]] = {}
        self._written: set[int] = set()

    def take(self, number: int, index: int, sample: Sample) -> None:
        if number in self._written:
            return
        group = self._samples.setdefault(number, {})
        group[index] = sample
        if len(group) == self._wanted.samples:
            self._written.add(number)
            line = self._line(number, [group[n] for n in range(len(group))])
            self._target.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
            self._target.flush()
            del self._samples[number]

    def _line(self, number: int, samples: Sequence[Sample]) -> Mapping[str, Any]:
        line: dict[str, Any] = {
            "index": number,
            "prompt": self._prompts[number],
            "completions": [str(self._decode(sample.tokens_T, skip_special_tokens=True)) for sample in samples],
            "stop_reasons": [sample.stop_reason.value for sample in samples],
            "num_tokens": [len(sample.tokens_T) for sample in samples],
        }
        if self._wanted.tokens:
            line["tokens"] = [sample.tokens_T.tolist() for sample in samples]
        if self._wanted.logprobs:
            line["logprobs"] = [np.round(sample.logprobs_T, DIGITS).tolist() for sample in samples]
        return line | {"settings": self._settings}


def _done(out: Path, settings: str, prompts: Sequence[Prompt]) -> set[int]:
    """Return the numbers of the prompts already in a file; a torn last line is cut off.

    ConfigError if the file is from other settings.
    """
    if not out.exists():
        return set()
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            is_ours = entry["settings"] == settings and prompts[entry["index"]] == entry["prompt"]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            is_ours = False
        if not is_ours:
            what = "was sampled from another subject, or with other prompts or settings"
            fix = "give another file, or remove this one"
            raise ConfigError(Problem(code="sample.other-settings", where=f"{out}:{number}", what=what, fix=fix))
        done.add(int(entry["index"]))
    if len(whole) < len(content):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    return done


def read_prompts(path: str, config: Config, plugins: Plugins) -> list[Prompt]:
    """Read the prompts of a file, or of stdin for `-`; ConfigError names a line without one.

    Lines of `.jsonl`, lines that begin with `{`, and rows of a table hold a text or a chat in the column of
    `prompts_of`. In other files each non-blank line is a prompt.
    """
    if Path(path).suffix.lower() in TABLES:
        return prompts_of([(f"{path} row {n}", row) for n, row in enumerate(_rows(path, config, plugins), 1)], config)
    try:
        with click.open_file(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeError) as error:
        fix = "give a file of UTF-8 text, or - for stdin"
        what = f"cannot be read: {error}"
        raise ConfigError(Problem(code="sample.unreadable-file", where=path, what=what, fix=fix)) from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        fix = "write one prompt on each line"
        raise ConfigError(Problem(code="sample.empty-file", where=path, what="holds no prompt", fix=fix))
    if Path(path).suffix != ".jsonl" and not numbered[0][1].lstrip().startswith("{"):
        return [line.strip() for _, line in numbered]
    entries = []
    for number, line in numbered:
        where = f"{path}:{number}"
        try:
            entries.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            what, fix = f"is not JSON: {error}", "correct the line"
            raise ConfigError(Problem(code="sample.bad-json", where=where, what=what, fix=fix)) from None
    return prompts_of(entries, config)


def prompts_of(entries: Iterable[tuple[str, Any]], config: Config) -> list[Prompt]:
    """Return the prompt of each (place, entry): a text, a chat, or an object with one of them in a column.

    A column that a flag names must exist; otherwise the first of the run's columns and of `FIELDS` counts.
    """
    keys = {f"data.{name}": getattr(config.data, name) for name in ("messages_key", "prompt_key")}
    wanted = {path: key for path, key in keys.items() if config.origin(path).layer is Layer.COMMAND_LINE and key}
    known = [key for key in keys.values() if key]
    return [_prompt(entry, where, wanted, (*known, *FIELDS), config.data.messages_key) for where, entry in entries]


def _prompt(row: Any, where: str, wanted: Mapping[str, str], known: Sequence[str], chats: str) -> Prompt:
    names, entry = [*wanted.values()] or known, row
    if isinstance(row, Mapping):
        for path, key in wanted.items():
            columns = [*column_names(row)]
            if key not in columns:
                named_by = f"--{path.removeprefix('data.').replace('_', '-')}"
                raise ConfigError(unknown_column(key, columns, where=where, named_by=named_by))
        entry = next((value for name in names if (value := value_at(row, name))), None)
    if isinstance(entry, str) and entry:
        return entry
    if messages := as_chat(entry):
        is_training_chat = chats and isinstance(row, Mapping) and value_at(row, chats) is entry
        is_answered = is_training_chat and len(messages) > 1 and messages[-1]["role"] == "assistant"
        return messages[:-1] if is_answered else messages
    fix = f"give a text or messages in one of {', '.join(dict.fromkeys(names))}, or name another with --prompt-key"
    raise ConfigError(Problem(code="sample.no-prompt", where=where, what="holds no prompt", fix=fix))


def _rows(path: str, config: Config, plugins: Plugins) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a table, as the source `files` reads them for training."""
    data = config.data.model_copy(update={"source": "files", "path": path, "messages_key": ""})
    origins = {**config.origins, "data.path": Origin(layer=Layer.COMMAND_LINE, place="--prompts")}
    reading = replace(config, tables={**config.tables, "data": data}, origins=origins)
    context = PluginContext(config=reading, seeds=Seeds(0), plugins=plugins)
    source = build_part(Kind.DATA_SOURCE, "files", "--prompts", context, {}, "--prompts")
    rows: Sequence[Mapping[str, Any]] = source.preview(sys.maxsize)
    return rows


def prompt_tokens(
    opened: Opened, prompts: Sequence[Prompt], names: Sequence[str], *, raw: bool = False
) -> list[Tokens]:
    """Return the token ids of each prompt; ConfigError names an unreadable one, or one that fills the context.

    As in training: through the chat template, a plain text with system prompt and instruction of `[data]`; with `raw`
    without any of these.
    """
    if raw:
        rows = [_raw_tokens(opened, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    else:
        examples = [Example(id=name, prompt=prompt, reference="") for prompt, name in zip(prompts, names, strict=True)]
        rows = encode_prompts(examples, opened.tokenizer, opened.config)
    limit = context_length(opened.config, opened.plugins)
    for tokens_T, name in zip(rows, names, strict=True):
        if not len(tokens_T) or (limit is not None and len(tokens_T) >= limit):
            what = f"has {len(tokens_T)} tokens" + (f", and the model reads {limit} with its answer" if limit else "")
            fix = "use another prompt"
            raise ConfigError(Problem(code="sample.prompt-length", where=printable(name), what=what, fix=fix))
    return rows


def _raw_tokens(opened: Opened, prompt: Prompt, name: str) -> Tokens:
    what, fix = "is a chat, and --raw takes texts", "leave --raw out, or write the text to continue"
    if isinstance(prompt, str):
        try:
            return np.asarray(opened.tokenizer(prompt, verbose=False)["input_ids"], dtype=np.int64)
        except Exception as error:
            # Each tokenizer library has its own error for half a surrogate pair.
            what = f"the tokenizer refuses it: {type(error).__name__}: {printable(str(error))[:300]}"
            fix = "repair the text"
    raise ConfigError(Problem(code="sample.bad-raw-prompt", where=printable(name), what=what, fix=fix))
