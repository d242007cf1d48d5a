"""Which examples of a data source can be trained on: each a different task, with a reference where one is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.verifier import LoadedData
from retrain.kernel.errors import ConfigError, PluginError, Problem
from retrain.kernel.types import Example
from retrain.text.chat import prompt_text
from retrain.text.terminal_text import printable

HEAD_CHARS = 60


def usable_examples(
    data: LoadedData, config: Config, *, comparing: Collection[str] = (), is_environment: bool = False
) -> tuple[list[Example], tuple[str, ...]]:
    """The examples without repeated ones and without those that the rewards cannot score, and notes on both.

    `comparing` names the rewards in use that compare with the reference. ConfigError when equal ids stand for different
    tasks, when nothing is left, or when such a reward replaces a source's own verifier and references are missing.
    PluginError when the source gives something other than an Example.
    """
    source = config.data.source
    examples, repeated = _unique(data.examples, source)
    notes = [f"{source}: {repeated} repeated examples dropped"] if repeated else []
    without = [example for example in examples if not example.reference.strip()]
    if is_environment or uses_own_verifier(data, config) or not without:
        return examples, tuple(notes)
    head = f"{len(without)} of {len(examples)} examples have no reference answer (first: {_shown(without[0].id)})"
    names = sorted(comparing)
    if not names:  # a judge or the user's own function may need none
        return examples, (*notes, f"{source}: {head}")
    if data.reward is not None:
        where = config.place("reward.weights" if config.reward.weights else "reward.type")
        what = f"{names[0]!r} compares with the reference, and {head}"
        fix = f"remove it: data source {source!r} brings a verifier of its own"
        raise ConfigError(Problem(where=where, what=what, fix=fix))
    if len(without) == len(examples):
        fix = "give every task a reference, or use a [reward] that needs none"
        raise ConfigError(Problem(where=config.place("data.source"), what=head, fix=fix))
    left = [example for example in examples if example.reference.strip()]
    return left, (*notes, f"{source}: {head}: left out, since {names[0]!r} would score silence as correct")


def uses_own_verifier(data: LoadedData, config: Config) -> bool:
    """Whether the source's own verifier scores: it brings one, and the user named no other."""
    return data.reward is not None and not names_a_reward(config)


def names_a_reward(config: Config) -> bool:
    """Whether the user named rewards, which then replace a source's own verifier."""
    return config.origin("reward.type") != DEFAULT_ORIGIN or bool(config.reward.weights)


def _unique(examples: Sequence[Example], source: str) -> tuple[list[Example], int]:
    unique: dict[str, Example] = {}
    repeated = 0
    for number, example in enumerate(examples):
        if fault := _fault(example):
            what = f"example {number} of data source {source!r} is {fault}"
            raise PluginError(Problem(where="[data] source", what=what, fix="repair the plugin that brings it"))
        first = unique.setdefault(example.id, example)
        if first is example:
            continue
        if _content(first) != _content(example):
            what = f"two different examples have the id {_shown(example.id)}"
            why = f"{_shown(prompt_text(first))!r} and {_shown(prompt_text(example))!r}"
            fix = "give every task its own id: the held-out split and the records go by it"
            raise ConfigError(Problem(where=f"data source {source!r}", what=what, why=why, fix=fix))
        repeated += 1
    return list(unique.values()), repeated


def _fault(example: object) -> str:
    """What is wrong with an object that should be an example, as "is ..."; empty when nothing is."""
    if not isinstance(example, Example):
        return f"a {type(example).__name__}, not an Example"
    if not isinstance(example.id, str) or not example.id:
        return f"one whose id is not text: {_shown(repr(example.id))}"
    if not isinstance(example.reference, str):
        return f"one whose reference is not text: {_shown(repr(example.reference))}"
    prompt = example.prompt
    if isinstance(prompt, str):
        return ""
    if not isinstance(prompt, Sequence) or not prompt or not all(isinstance(m, Mapping) for m in prompt):
        return f"one whose prompt is neither text nor a chat: {_shown(repr(prompt))}"
    if not all("role" in message and "content" in message for message in prompt):
        return f"a chat whose messages lack role or content: {_shown(repr(prompt))}"
    return ""


def _content(example: Example) -> tuple[object, ...]:
    return prompt_text(example), example.reference, example.task, dict(example.info)


def _shown(text: str) -> str:
    return printable(text[:HEAD_CHARS])
