"""Loads the tasks of a configuration that is about to be written, tries its verifier, and shows the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from retrain.cli.start.own_data import HUB_ID, DataChoice
from retrain.cli.start.written import FEWEST, held_out, put_aside
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Example, Tokens
from retrain.run.configure import load_checked
from retrain.run.seed_sources import run_seeds
from retrain.tasks.loading import load_tasks
from retrain.tasks.scoring.build import judges
from retrain.tasks.tasks import Tasks
from retrain.text.hub import hub_options
from retrain.text.terminal_text import printable
from retrain.text.tokenizer import load_tokenizer

SHOWN, MEASURED = 3, 4
MOST_LINES, MOST_CHARS = 12, 400
# Above this median length of references, a model cannot be expected to match them word for word.
LONG_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A text as an answer, and its score; `read` is the answer that the verifier found in it, where `is_read`."""

    text: str
    score: str
    read: str | None = None
    is_read: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownExample:
    """An example as the model sees it, with a perfect answer and with the bare reference."""

    prompt: str
    reference: str
    perfect: Tried | None
    alone: Tried | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The tasks of a configuration, warnings about them, and some of them as examples."""

    examples: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    shown: tuple[ShownExample, ...]
    rewards: tuple[str, ...]
    prompts: tuple[Tokens, ...]  # of some examples, for a measurement; none where the model is not here yet

    def as_data(self, choice: DataChoice) -> dict[str, Any]:
        counts = {"examples": self.examples, "held_out": held_out(self.examples)}
        told = {"columns": choice.told, "notes": list(self.notes), "warnings": list(self.warnings)}
        shown = [asdict(example) for example in self.shown]
        return {"data": choice.settings, **counts, **told, "rewards": list(self.rewards), "shown": shown}


def show_trial(choice: DataChoice, trial: Trial) -> None:
    """Print the trial; data and model output are neutralised for the terminal."""
    for told in (*choice.told, *trial.notes):
        click.echo(printable(told))
    aside = held_out(trial.examples)
    click.echo(f"{trial.examples - aside} examples to train on, {aside} held out")
    for number, example in enumerate(trial.shown, start=1):
        click.echo(f"\nExample {number} of {trial.examples}, as the model sees it:")
        lines = example.prompt[:MOST_CHARS].splitlines() or [""]
        is_cut = len(example.prompt) > MOST_CHARS or len(lines) > MOST_LINES
        for line in [*lines[:MOST_LINES], *(["..."] if is_cut else [])]:
            click.echo(f"  | {printable(line)}")
        click.echo(f"  reference            {_short(example.reference)}")
        for name, tried in (("perfect answer", example.perfect), ("bare reference", example.alone)):
            if tried:
                answer = "no answer" if tried.read is None else _short(tried.read)
                read = f"the verifier reads {answer}, " if tried.is_read else ""
                click.echo(f"  {name:<20} {_short(tried.text)}: {read}score {tried.score}")
    click.echo(f"\nReward audit of {printable(', '.join(trial.rewards))}: passed")
    for warning in trial.warnings:
        click.secho(f"warning: {printable(warning)}", fg="yellow")


def _short(text: str) -> str:
    shown = printable(" ".join(text.split())) or "(empty)"
    return shown if len(shown) <= MOST_CHARS // 4 else f"{shown[: MOST_CHARS // 4]}..."


def check_text(text: str, name: str, plugins: Plugins) -> Config:
    """The configuration of a text that is not yet in its file; ConfigError with every problem, as `retrain explain`."""
    with put_aside(text, name) as file:
        return load_checked([str(file)], plugins).config


def try_out(text: str, name: str, plugins: Plugins) -> Trial:
    """Load the tasks of this text and try the verifier on some; RewardError when it fails its audit."""
    with put_aside(text, name) as file:
        config = load_checked([str(file)], plugins).config
        tokenizer, warnings = _tokenizer(config, plugins)
        context = PluginContext(config=config, seeds=run_seeds(config), plugins=plugins, tokenizer=tokenizer)
        tasks = load_tasks(context)
        try:
            tasks.verifier.start()
            shown = tuple(_shown(tasks, tokenizer))
            # On this hook a run audits its reward, so that here it fails in the same way.
            plugins.notify("retrain_tasks_loaded", context=context, tasks=tasks)
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


def _tokenizer(config: Config, plugins: Plugins) -> tuple[Any, list[str]]:
    """The model's tokenizer; a substitute, and a warning, where the model can be fetched only later."""
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
    prompts, verifier = tasks.prompts[:SHOWN], tasks.verifier
    texts = [_texts(prompt.example, verifier.rewards) for prompt in prompts]
    if not judges(verifier.rewards):
        texts = [("", "")] * len(prompts)
    pairs = [(p.example, text) for p, both in zip(prompts, texts, strict=True) for text in both if text]
    found = iter(verifier.score_texts(pairs))
    reader = next((reward.answer_in for reward in verifier.rewards if hasattr(reward, "answer_in")), None)

    def tried(text: str) -> Tried | None:
        if not text:
            return None
        score = next(found).score
        given = f"{score.value:g}" if score.value is not None else score.outcome.value.replace("_", " ")
        return Tried(text=text, score=given, read=reader(text) if reader else None, is_read=reader is not None)

    for prompt, both in zip(prompts, texts, strict=True):
        perfect, alone = map(tried, both)
        rendered = str(tokenizer.decode(prompt.tokens_T, skip_special_tokens=False))
        yield ShownExample(prompt=rendered, reference=prompt.example.reference, perfect=perfect, alone=alone)


def _texts(example: Example, rewards: Sequence[Any]) -> tuple[str, str]:
    """A perfect answer, as the rewards declare it or otherwise in a box, and the bare reference; empty for none."""
    methods = [reward.gold for reward in rewards if hasattr(reward, "gold")]
    perfect = next((text for method in methods if (text := method(example))), "")
    if not methods and example.reference:
        perfect = rf"\boxed{{{example.reference}}}"
    return perfect, example.reference if example.reference != perfect else ""


def _doubts(tasks: Tasks) -> Iterator[str]:
    """Warnings about tasks with which a run would start all the same."""
    count, lengths = len(tasks.prompts), [len(prompt.example.reference) for prompt in tasks.prompts]
    compares = any(getattr(reward, "needs_reference", False) for reward in tasks.verifier.rewards)
    if compares and (middle := median(lengths)) > LONG_CHARS:
        yield (
            f"the references are long texts ({middle:.0f} characters in the middle): no answer will equal one; "
            "name the column of the final answer with --answer-key, or let a judge compare: --reward judge"
        )
    if count < FEWEST:
        yield f"{count} examples are too few to hold some out (at least {FEWEST}): nothing will be evaluated"


class PlainTokenizer:
    """A substitute where the model is not here yet: a token per character, and no chat template."""

    chat_template = None

    def __call__(self, texts: str | Sequence[str], **_: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": [ord(char) for char in texts]}
        return {"input_ids": [[ord(char) for char in text] for text in texts]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(int(each)) for each in ids)
