"""The text of a configuration for a user's data: only non-default values are written, each with a comment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomlkit

from retrain.cli.start.own_data import FILES, HUB, DataChoice, Wishes, choose_reward, folder_of
from retrain.cli.start.templates import template_text
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.declared import Kind
from retrain.kernel.errors import RetrainError
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables
from retrain.tasks.scoring.build import DEFAULT_REWARD

# Every fifth example; none of fewer than twenty, of which four would give a rate in steps of a quarter.
HELD_OUT_SHARE, MOST_HELD_OUT, FEWEST = 5, 64, 20
EVALUATIONS = 5
BUILTIN = "builtin:"  # how the names of models begin that ship with a distribution
COMMENT_COLUMN = 28
COLUMNS = {"prompt_key": "column of the prompt", "answer_key": "column of the answer"}
ORDER = ("model", "backend", "algorithm", "sepa", "training", "data", "reward", "eval", "logging")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value, and its comment in the file."""

    value: Any
    comment: str = ""


Sections = dict[str, dict[str, Setting]]
REAL_MODEL: Sections = {
    "training": {
        "max_steps": Setting(value=100),
        "max_tokens": Setting(value=2048, comment="a longer completion is cut off here"),
    }
}


def templates_for(model: str, plugins: Plugins) -> Iterator[tomlkit.TOMLDocument]:
    """The templates that train this built-in model; with `BUILTIN` of any."""
    for entry in plugins.registered(Kind.TEMPLATE) if model.startswith(BUILTIN) else ():
        document = tomlkit.parse(template_text(plugins, entry.spec.name)[1])
        plain = document.unwrap()
        if "campaign" not in plain and str(plain.get("model", {}).get("model", "")).startswith(model):
            yield document


def advised(model: str, plugins: Plugins) -> Sections:
    """The settings of the template that was written for a model, otherwise those for any real model."""
    document = next(templates_for(model, plugins), None)
    if document is None:
        return REAL_MODEL
    return {
        table: {
            key: Setting(value=value, comment=document[table].item(key).trivia.comment.lstrip("# "))
            for key, value in keys.items()
        }
        for table, keys in document.unwrap().items()
    }


def held_out(examples: int) -> int:
    """The number of examples set aside: a fifth, at most 64; none where too few would be left."""
    return min(examples // HELD_OUT_SHARE, MOST_HELD_OUT) if examples >= FEWEST else 0


def configuration_text(
    wishes: Wishes,
    choice: DataChoice,
    plugins: Plugins,
    *,
    examples: int = 0,
    sizes: Mapping[str, int] | None = None,
    time: str = "",
) -> str:
    """The file for these wishes; with a known number of `examples`, some are held out.

    `sizes` by `table.key` replace those advised for the model; `time` says how long a run of them takes. A reward that
    is named replaces the verifier of a source that brings one, so it is written though it is the default.
    """
    sections = {table: dict(keys) for table, keys in advised(wishes.model, plugins).items()}
    training = sections.setdefault("training", {})
    if wishes.steps:
        training["max_steps"] = Setting(value=wishes.steps)
    if wishes.model:
        model = sections.setdefault("model", {})
        model["model"] = Setting(value=wishes.model, comment=model["model"].comment if "model" in model else "")
    advised_data = sections.pop("data", {})
    about_source = _summary(plugins, Kind.DATA_SOURCE, str(choice.settings["source"]))
    comments = {"source": about_source, "path": f"{examples} examples" if examples else "", **COLUMNS}
    kept = {key: value for key, value in advised_data.items() if key in ("instruction", "system_prompt")}
    data = sections["data"] = _settings(choice.settings, comments)
    data |= {key: value for key, value in kept.items() if key not in data}
    rewards = plugins.find(Kind.REWARD, wishes.reward)
    traits = rewards[0].spec.traits if rewards else None
    if isinstance(traits, Mapping) and (instruction := traits.get("instruction")):
        data["instruction"] = Setting(value=instruction, comment="read by the reward")
    reward = choose_reward(wishes.reward, choice.tests)
    about_reward = _summary(plugins, Kind.REWARD, str(reward.get("type", "")))
    sections["reward"] = _settings(reward, {"type": about_reward})
    sections["logging"] = _settings({"log_dir": folder_of(wishes)}, {"log_dir": "the run's records and its adapter"})
    evaluation = sections.pop("eval", {})
    if aside := held_out(examples):
        usual = Setting(value=max(int(training["max_steps"].value) // EVALUATIONS, 1))
        sections["eval"] = {
            "every": Setting(value=evaluation.get("every", usual).value, comment="steps"),
            "examples": Setting(value=aside, comment=f"of {examples}, never trained on"),
        }
    for path, value in (sizes or {}).items():
        table, _, name = path.partition(".")
        # Without held-out examples there is no [eval] to have sizes.
        if table in sections:
            comment = sections[table][name].comment if name in sections[table] else ""
            sections[table][name] = Setting(value=value, comment=comment)
    keep = set() if choice.settings["source"] in (FILES, HUB) else {"reward.type"}
    learner = wishes.model or "the default model"
    head = [f"# {one_line(learner)} learns {one_line(wishes.data)}."]
    if reward.get("type") == DEFAULT_REWARD and not keep:
        head.append(f"# The reward is the default, {DEFAULT_REWARD}: {one_line(about_reward)}.")
    head += [f"# Time: {time}."] if time else []
    keys = {key.path: key for key in all_keys(registered_tables(plugins))}
    return "\n".join([*head, *_lines(sections, keys, keep)]) + "\n"


def _settings(values: Mapping[str, Any], comments: Mapping[str, str]) -> dict[str, Setting]:
    return {key: Setting(value=value, comment=comments.get(key, "")) for key, value in values.items()}


@contextmanager
def put_aside(text: str, name: str) -> Iterator[Path]:
    """Within the block a temporary file with this text; errors call it by its `name`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        try:
            yield file
        except RetrainError as error:
            parts = ("where", "what", "why", "fix")
            problems = [
                replace(each, **{part: getattr(each, part).replace(f"{folder}/", "") for part in parts})
                for each in error.problems
            ]
            raise type(error)(*problems) from error


def one_line(text: str) -> str:
    """A text that cannot end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def _summary(plugins: Plugins, kind: Kind, name: str) -> str:
    found = plugins.find(kind, name)
    return found[0].spec.summary if found else ""


def _lines(sections: Mapping[str, Mapping[str, Setting]], keys: Mapping[str, Key], keep: set[str]) -> list[str]:
    lines: list[str] = []
    for table in [*ORDER, *(name for name in sections if name not in ORDER)]:
        rows = [
            _line(name, setting, known)
            for name, setting in sections.get(table, {}).items()
            if (known := keys.get(f"{table}.{name}")) is None or setting.value != known.default or known.path in keep
        ]
        lines += ["", f"[{table}]", *rows] if rows else []
    return lines


def _line(name: str, setting: Setting, key: Key | None) -> str:
    """One line; the comment defaults to the key's description."""
    text = f"{name} = {toml_text(setting.value)}"
    comment = setting.comment or (key.description.partition(";")[0].rstrip(".") if key else "")
    return f"{text:<{COMMENT_COLUMN - 2}}  # {one_line(comment)}" if comment else text
