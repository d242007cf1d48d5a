"""The text of a configuration for a user's own data: only what differs from the defaults, with a comment on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tomlkit

from retrain.cli.start.fitted import Fitted
from retrain.cli.start.own_data import FILES, HUB, DataChoice, Wishes, choose_reward, folder_of
from retrain.cli.start.templates import template_text
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import all_keys
from retrain.kernel.declared import Kind
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables
from retrain.tasks.scoring.build import DEFAULT_REWARD

HELD_OUT_SHARE, MOST_HELD_OUT, FEWEST = 5, 64, 20  # every fifth example; none of fewer than twenty
EVALUATIONS = 5
BUILTIN = "builtin:"  # how the names of models begin that ship with a distribution
COMMENT_COLUMN = 28
COLUMNS = {"prompt_key": "column of the prompt", "answer_key": "column of the answer"}
ORDER = ("model", "backend", "algorithm", "sepa", "training", "data", "reward", "eval", "logging")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value, and what the file says about it."""

    value: Any
    comment: str = ""


Sections = dict[str, dict[str, Setting]]
REAL_MODEL: Sections = {
    "training": {
        "max_steps": Setting(value=100),
        "max_tokens": Setting(value=2048, comment="a longer completion is cut off here"),
    },
}


def templates_for(model: str, plugins: Plugins) -> Iterator[tomlkit.TOMLDocument]:
    """The templates that train this built-in model; with `BUILTIN` those of any."""
    for entry in plugins.registered(Kind.TEMPLATE) if model.startswith(BUILTIN) else ():
        document = tomlkit.parse(template_text(plugins, entry.spec.name)[1])
        plain = document.unwrap()
        if "campaign" not in plain and str(plain.get("model", {}).get("model", "")).startswith(model):
            yield document


def advised(model: str, plugins: Plugins) -> Sections:
    """The settings of the template that was written for a model, where there is one; else those for any real model."""
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


def steps_advised(model: str, plugins: Plugins) -> int:
    """How many steps a run of this model should start with."""
    return int(advised(model, plugins)["training"]["max_steps"].value)


def held_out(examples: int) -> int:
    """How many of so many examples are set aside: a fifth, at most 64; none where too few would be left."""
    return min(examples // HELD_OUT_SHARE, MOST_HELD_OUT) if examples >= FEWEST else 0


def configuration_text(
    wishes: Wishes, choice: DataChoice, plugins: Plugins, *, examples: int = 0, fitted: Fitted | None = None
) -> str:
    """The file for these wishes; where it is known how many `examples` there are, some are held out.

    The sizes of `fitted` replace those advised for the model.

    A reward that is named replaces the verifier of a source that brings one, so it is written though it is the default.
    """
    sections = {table: dict(keys) for table, keys in advised(wishes.model, plugins).items()}
    training = sections.setdefault("training", {})
    if wishes.steps:
        training["max_steps"] = Setting(value=wishes.steps)
    steps = int(training["max_steps"].value)
    if wishes.model:
        about = sections.setdefault("model", {}).get("model", Setting(value=""))
        sections["model"] = {**sections["model"], "model": Setting(value=wishes.model, comment=about.comment)}
    own = {key: value for key, value in sections.pop("data", {}).items() if key in ("instruction", "system_prompt")}
    about_source = _summary(plugins, Kind.DATA_SOURCE, str(choice.settings["source"]))
    comments = {"source": about_source, "path": f"{examples} examples" if examples else "", **COLUMNS}
    data = {key: Setting(value=value, comment=comments.get(key, "")) for key, value in choice.settings.items()}
    sections["data"] = data | {key: value for key, value in own.items() if key not in data}
    if asked := _instruction_for(wishes.reward, plugins):
        sections["data"]["instruction"] = Setting(value=asked, comment="what the reward reads")
    reward = choose_reward(wishes.reward, choice.tests)
    about_reward = _summary(plugins, Kind.REWARD, str(reward.get("type", "")))
    comments = {"type": about_reward}
    sections["reward"] = {key: Setting(value=value, comment=comments.get(key, "")) for key, value in reward.items()}
    sections["logging"] = {"log_dir": Setting(value=folder_of(wishes), comment="the run's records and its adapter")}
    if aside := held_out(examples):
        every = sections.get("eval", {}).get("every", Setting(value=max(steps // EVALUATIONS, 1)))
        sections["eval"] = {
            "every": Setting(value=every.value, comment="steps"),
            "examples": Setting(value=aside, comment=f"of {examples}, never trained on"),
        }
    else:
        sections.pop("eval", None)
    if fitted:
        _apply(fitted, sections)
    keep = set() if choice.settings["source"] in (FILES, HUB) else {"reward.type"}
    learner = wishes.model or "the default model"
    head = [f"# {one_line(learner)} learns {one_line(wishes.data)}. Run it with: retrain"]
    if reward.get("type") == DEFAULT_REWARD and not keep:
        head.append(f"# The reward is the default, {DEFAULT_REWARD}: {one_line(about_reward)}.")
    head += [f"# It takes {fitted.text}."] if fitted else []
    keys = {key.path: key for key in all_keys(registered_tables(plugins))}
    return "\n".join([*head, *_lines(sections, keys, keep)]) + "\n"


def _apply(fitted: Fitted, sections: Sections) -> None:
    """Write the fitted sizes over those that differ, with the comments that stand there."""
    for path, value in fitted.values.items():
        table, _, name = path.partition(".")
        keys = sections.get(table, {})
        if table == "eval" and not keys:  # nothing is held out
            continue
        comment = keys[name].comment if name in keys else ""
        sections[table] = {**keys, name: Setting(value=value, comment=comment)}


def one_line(text: str) -> str:
    """A text that cannot end a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def _summary(plugins: Plugins, kind: Kind, name: str) -> str:
    found = plugins.find(kind, name)
    return found[0].spec.summary if found else ""


def _instruction_for(reward: str, plugins: Plugins) -> str:
    """What a prompt must ask for so that the reward finds its answer; empty where the default does."""
    found = plugins.find(Kind.REWARD, reward)
    traits = found[0].spec.traits if found else None
    return str(traits.get("instruction", "")) if isinstance(traits, Mapping) else ""


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
    """One line; what a key is for is the comment where there is none of its own."""
    text = f"{name} = {_toml(setting.value)}"
    comment = setting.comment or (key.description.partition(";")[0].rstrip(".") if key else "")
    return f"{text:<{COMMENT_COLUMN - 2}}  # {one_line(comment)}" if comment else text


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        table = tomlkit.inline_table()
        table.update(value)
        return str(table.as_string())
    return str(tomlkit.item(value).as_string())
