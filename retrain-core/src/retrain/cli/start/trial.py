"""Loads the tasks of a configuration that is about to be written, and tries its verifier, before any model loads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from retrain.cli.start.own_data import HUB_ID
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.verifier import Verifier
from retrain.kernel.errors import ConfigError, RetrainError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, Score, Tokens
from retrain.run.configure import load_checked
from retrain.run.seed_sources import run_seeds
from retrain.tasks.scoring.build import judges
from retrain.tasks.tasks import Tasks, load_tasks
from retrain.text.hub import hub_options
from retrain.text.tokenizer import load_tokenizer

SHOWN, MEASURED = 3, 4
LONG_CHARS = 100  # a reference that is longer, in the middle of all, is not what a model writes word for word


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A text as an answer, and its score; `read` is what the verifier took for the answer, where `is_read`."""

    text: str
    score: str
    read: str | None = None
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownExample:
    """An example as the model sees it, with a perfect answer and with the reference alone."""

    prompt: str
    reference: str
    perfect: Tried | None
    alone: Tried | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The tasks of a configuration: how many, what was left out, what to beware of, and some of them."""

    examples: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    shown: tuple[ShownExample, ...]
    rewards: tuple[str, ...]
    prompts: tuple[Tokens, ...]  # of some examples, for a measurement; none where the model is not here yet


def check_text(text: str, name: str, plugins: Plugins) -> Config:
    """The configuration of a text that is not yet in its file; ConfigError with every problem, as `retrain explain`."""
    with tempfile.TemporaryDirectory() as folder, _as_written(folder):
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        return load_checked([str(file)], plugins).config


def try_out(text: str, name: str, plugins: Plugins) -> Trial:
    """Load the tasks of this text and try the verifier on some; RewardError when it fails its audit."""
    with tempfile.TemporaryDirectory() as folder, _as_written(folder):
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        config = load_checked([str(file)], plugins).config
        tokenizer, warnings = _tokenizer(config, plugins)
        seeds = run_seeds(config)
        context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=tokenizer)
        tasks = load_tasks(context)
        try:
            tasks.verifier.start()
            shown = tuple(_shown(tasks, tokenizer))
            plugins.notify("retrain_tasks_loaded", context=context, tasks=tasks)  # the reward audit of a run
        finally:
            tasks.verifier.close()
    return Trial(
        examples=len(tasks.prompts),
        notes=tasks.notes,
        warnings=(*warnings, *_doubts(tasks)),
        shown=shown,
        rewards=tasks.verifier.names,
        prompts=() if isinstance(tokenizer, PlainTokenizer) else tuple(p.tokens_T for p in tasks.prompts[:MEASURED]),
    )


@contextmanager
def _as_written(folder: str) -> Iterator[None]:
    """Errors name the file as it will be called, not where it was tried."""
    try:
        yield
    except RetrainError as error:
        prefix = f"{folder}/"
        problems = [
            replace(each, **{part: getattr(each, part).replace(prefix, "") for part in ("where", "what", "why", "fix")})
            for each in error.problems
        ]
        raise type(error)(*problems) from error


def _tokenizer(config: Config, plugins: Plugins) -> tuple[Any, list[str]]:
    """The model's tokenizer; a stand-in, and a warning, where the model can be fetched only later."""
    model = config.model.model
    is_here = plugins.locate_model(model) or Path(model).expanduser().is_dir()
    if HUB_ID.fullmatch(model) and not is_here:
        try:
            hub_options(model, where=config.place("model.model"))
        except ConfigError as error:
            warning = f"{error.problems[0].what}; prompts are shown without its chat template, and no length is checked"
            return PlainTokenizer(), [warning]
    return load_tokenizer(config, plugins), []


def _shown(tasks: Tasks, tokenizer: Any) -> Iterator[ShownExample]:
    prompts = tasks.prompts[:SHOWN]
    rewards = tasks.verifier.rewards
    pairs = [(prompt.example, text) for prompt in prompts for text in _texts(prompt.example, rewards)]
    pairs = pairs if judges(rewards) else []
    scores = tasks.verifier.score_texts([pair for pair in pairs if pair[1]])
    found = iter(scores)
    tried = [(_tried(text, next(found).score, tasks.verifier) if text else None) for _, text in pairs]
    for number, prompt in enumerate(prompts):
        perfect, alone = tried[2 * number : 2 * number + 2] or (None, None)
        rendered = str(tokenizer.decode(prompt.tokens_T, skip_special_tokens=False))
        yield ShownExample(prompt=rendered, reference=prompt.example.reference, perfect=perfect, alone=alone)


def _texts(example: Example, rewards: tuple[Any, ...]) -> tuple[str, str]:
    r"""A perfect answer, as the rewards declare it, else in a box, and the reference as it stands; empty for none."""
    methods = [reward.gold for reward in rewards if hasattr(reward, "gold")]
    declared = next((text for method in methods if (text := method(example))), "")
    boxed = "" if methods or not example.reference else rf"\boxed{{{example.reference}}}"
    perfect = declared or boxed
    return perfect, example.reference if example.reference != perfect else ""


def _tried(text: str, score: Score, verifier: Verifier) -> Tried:
    given = f"{score.value:g}" if score.value is not None else score.outcome.value.replace("_", " ")
    readers = [reward.answer_in for reward in verifier.rewards if hasattr(reward, "answer_in")]
    if not readers:
        return Tried(text=text, score=given)
    return Tried(text=text, score=given, read=readers[0](text), is_read=True)


def _doubts(tasks: Tasks) -> Iterator[str]:
    """What the tasks make doubtful, although a run would start."""
    lengths = [len(prompt.example.reference) for prompt in tasks.prompts]
    compares = any(getattr(reward, "needs_reference", False) for reward in tasks.verifier.rewards)
    if compares and (middle := median(lengths)) > LONG_CHARS:
        yield (
            f"the references are long texts ({middle:.0f} characters in the middle): no answer will equal one; "
            "name the column of the final answer with --answer-key, or let a judge compare: --reward judge"
        )


# A stand-in for the tokenizer of a model that is not here yet: a token per character, and no chat template.


class PlainTokenizer:
    """Enough of a tokenizer to look at prompts and to try a verifier; its lengths say nothing about the model's."""

    chat_template = None

    def __call__(self, texts: str | Sequence[str], **_: Any) -> dict[str, Any]:
        rows = [[ord(char) for char in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return {"input_ids": rows[0] if isinstance(texts, str) else rows}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of these tokens."""
        return "".join(chr(int(each)) for each in ids)
