"""Generated sections `keys`, `flags`, `annotated`, `metrics`, `commands` and `support`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from retrain.cli.manual import markdown
from retrain.cli.manual.json_schema import key_schemas
from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.config.load import TableEntry, all_keys
from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.declared import Capabilities, Kind, MetricSpec
from retrain.kernel.errors import Problem
from retrain.kernel.hooks import PROJECT
from retrain.kernel.plugins.first_party import promised_names
from retrain.kernel.registry import Plugins
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables

HOOK = f"{PROJECT}_describe_metrics"
LOOP = "retrain.observe.metrics.metric_names"
TRAIN = "train"
TRAIN_USAGE = "retrain [CONFIG] [--KEY VALUE]..."
RANGES = (("minimum", "≥ "), ("exclusiveMinimum", "> "), ("maximum", "≤ "), ("exclusiveMaximum", "< "))
COMMENT_FROM = 40  # column
# A longer default would push its comment past the column.
TEXT_LIMIT = 40
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "table"}


def keys(plugins: Plugins, *only: str) -> str:
    """Every key, table by table: type and range, default, flag, meaning; of all tables, or `only` of these."""
    lines = []
    for name, entry in registered_tables(plugins).items():
        if only and name not in only:
            continue
        schemas = key_schemas(entry)
        rows = []
        for key in keys_of(name, entry.model, entry.traits):
            is_long = isinstance(key.default, list) and any(isinstance(value, dict) for value in key.default)
            # the tables are too long for a cell; `retrain explain --keys --json` shows them
            default = f"{len(key.default)} tables" if is_long else markdown.value(key.default)
            also = f" Also called {', '.join(map(markdown.code, key.aliases))}." if key.aliases else ""
            meaning = key.description + also + (f" **Not yet:** {key.pending}." if key.pending else "")
            rows.append((f"`{key.name}`", _type(schemas[key.name]), default, f"`--{key.flag}`", meaning))
        purpose = markdown.prose(entry.model.__doc__).split("\n\n")[0]
        lines += [f"### [{name}]", purpose, markdown.table(("key", "type", "default", "flag", "meaning"), rows)]
    return "\n\n".join(lines)


def flags(plugins: Plugins) -> str:
    found = sorted(all_keys(registered_tables(plugins)), key=lambda key: key.flag)
    return markdown.table(("flag", "key"), [(f"`--{key.flag}`", f"`[{key.table}] {key.name}`") for key in found])


def _type(schema: dict[str, Any]) -> str:
    """`integer ≥ 1`, `"a" | "b"`, `list of text`."""
    if "enum" in schema:
        return " | ".join(markdown.value(choice) for choice in schema["enum"])
    if "const" in schema:
        return markdown.value(schema["const"])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'values'}"
    limits = [f"{sign}{schema[word]:g}" for word, sign in RANGES if word in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "any"), ", ".join(limits)]).strip()


def annotated(plugins: Plugins) -> str:
    """A TOML block with every key of a run at its default; loading it changes nothing."""
    tables = []
    for name, entry in registered_tables(plugins).items():
        if not entry.traits.starts_runs:
            keys = keys_of(name, entry.model, entry.traits)
            tables.append("\n".join([f"[{name}]", *(_line(key) for key in keys)]))
    return "```toml\n" + "\n\n".join(tables) + "\n```"


def _line(key: Key) -> str:
    comment = f"# {key.description}" + (f" Not yet: {key.pending}." if key.pending else "")
    if key.default is None:
        return f"# {key.name} =   {comment}"
    setting = f"{key.name} = {toml_text(key.default)}"
    return f"{comment}\n{setting}" if len(setting) > TEXT_LIMIT else f"{setting:<{COMMENT_FROM}}  {comment}"


def metrics(plugins: Plugins) -> str:
    sections = []
    for owner, specs in described(plugins).items():
        distribution, _, module = owner.partition(":")
        sections.append("### The loop" if module == LOOP else f"### {distribution}, {markdown.code(module)}")
        if isinstance(specs, Exception):
            sections.append(f"Cannot be described: {type(specs).__name__}.")
        else:
            rows = [(markdown.code(spec.name), spec.unit, spec.meaning, spec.absent or "never") for spec in specs]
            sections.append(markdown.table(("field", "unit", "meaning", "absent"), rows))
    return "\n\n".join(sections)


def described(plugins: Plugins) -> dict[str, list[MetricSpec] | Exception]:
    """The fields of each plugin, or its error, by distribution and module; the loop's come first."""
    found: dict[str, list[MetricSpec] | Exception] = {}
    for implementation in getattr(plugins.pluggy.hook, HOOK).get_hookimpls():
        try:
            found[implementation.plugin_name] = list(implementation.function() or ())
        except Exception as error:  # one broken plugin must not break the page
            found[implementation.plugin_name] = error
    return dict(sorted(found.items(), key=lambda item: (not item[0].endswith(f":{LOOP}"), item[0])))


def commands(plugins: Plugins) -> str:
    """Usage, help and options of each command; `train`, the default, comes first."""
    sections = []
    entries = plugins.registered(Kind.COMMAND)
    for entry in sorted(entries, key=lambda entry: (entry.spec.name != TRAIN, entry.spec.name)):
        try:
            command: click.Command = entry.spec.load()
        except Exception as error:  # one broken plugin must not break the page
            sections += [f"### retrain {entry.spec.name}", f"Cannot be loaded: {type(error).__name__}."]
            continue
        for path, found in _walk(f"retrain {entry.spec.name}", command):
            also = "".join(f" Also called `{alias}`." for alias in entry.spec.aliases) if found is command else ""
            sections += _section(path, found, also)
    return "\n\n".join(sections)


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _walk(f"{path} {name}", inner)


def _section(path: str, command: click.Command, also: str) -> list[str]:
    is_train = path == f"retrain {TRAIN}"
    # click keeps the help option of the first context: without this, `-h` is lost for the rest of the process
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    usage = TRAIN_USAGE if is_train else " ".join([path, *command.collect_usage_pieces(context)])
    text = "\n\n".join(part for part in (markdown.prose(command.help) + also, markdown.prose(command.epilog)) if part)
    lines = [f"### {path}", f"```text\n{usage}\n```", text]
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join(sorted(option.opts, key=len, reverse=True) + list(option.secondary_opts))
            metavar = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
            is_told = isinstance(option.default, str | int | float) and not (option.is_flag or option.multiple)
            default = markdown.value(option.default) if is_told else ""
            rows.append((markdown.code(names + metavar), default, option.help or ""))
    if rows:
        lines.append(markdown.table(("option", "default", "meaning"), rows))
    return [line for line in lines if line]


# Required settings of a backend.
NEEDED = {
    "prime_rl": ("--backend-opt", "output_dir=out", "--inference-engine", "vllm", "--max-tokens", "1024"),
}
# A non-default value of each key, after the settings that it requires.
TRIED: Sequence[Mapping[str, str]] = (
    {"algorithm.loss": "ppo", "algorithm.clip_eps": "0.1"},
    {"algorithm.loss": "ppo", "algorithm.clip_eps_high": "0.3"},
    {"algorithm.loss": "ppo", "algorithm.dual_clip": "3.0"},
    {"algorithm.aggregation": "sequence_mean"},
    {"algorithm.aggregation": "constant"},
    {"algorithm.tis_cap": "2.0"},
    {"algorithm.is_bounds": "[0.5, 2.0]"},
    {"algorithm.is_bounds": "[0.5, 2.0]", "algorithm.is_level": "sequence"},
    {"algorithm.is_bounds": "[0.5, 2.0]", "algorithm.is_mode": "mask"},
    {"algorithm.batch_norm": "true"},
    {"algorithm.advantage_clip": "5.0"},
    {"training.minibatches": "2"},
    {"training.epochs": "2"},
    {"training.overlong": "mask"},
    {"training.overlong": "drop"},
    {"training.soft_overlong": "8"},
    {"training.refill": "2"},
    {"optimizer.schedule": "cosine"},
    {"optimizer.warmup_steps": "2"},
    {"kl.where": "loss", "kl.coef": "0.1"},
    {"kl.where": "reward", "kl.coef": "0.1"},
    {"entropy.coef": "0.01"},
    {"training.minibatches": "2", "entropy.kl_cov": "0.002"},
    {"entropy.clip_cov": "0.002"},
    {"sft.steps": "20"},
    {
        "algorithm.advantage_mode": "distillation",
        "algorithm.transform_mode": "none",
        "training.temperature": "1.0",
        "teacher.model": "some-teacher",
    },
    {"model.adapter": "some-adapter"},
    {"model.lora_rank": "0"},
    {"model.quantize": "int8"},
    {"lora.rslora": "true"},
    {"lora.dora": "true"},
)
NO_FOLDER = "there is no such folder"  # a fault of the question, not of the backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A setting tried on every backend, as TOML has it, and the answers: empty for yes, or why not."""

    text: str
    values: Mapping[str, str]
    answers: Mapping[str, str]


def support(plugins: Plugins) -> str:
    """A table of losses, keys and recipes by backend, followed by the reasons of refusals."""
    installed = [entry.spec.name for entry in plugins.registered(Kind.BACKEND)]
    backends = sorted(installed, key=lambda name: (*promised_names(Kind.BACKEND), name).index(name))
    reasons: dict[str, int] = {}

    def cell(answer: str) -> str:
        return f"no ({reasons.setdefault(answer, len(reasons) + 1)})" if answer else "yes"

    rows = [
        (markdown.code(asked.text), *(cell(asked.answers[backend]) for backend in backends))
        for asked in ask(plugins, backends)
    ]
    told = [f"{number}. {reason}" for reason, number in reasons.items()]
    header = ("", *map(markdown.code, backends))
    return "\n\n".join([markdown.table(header, rows), "Why not:", "\n".join(told)])


def ask(plugins: Plugins, backends: Sequence[str]) -> Iterator[Asked]:
    """Put every setting to the check that precedes a run of each backend; only plugins' checks are imported."""
    tables = registered_tables(plugins)

    def problems(backend: str, values: Mapping[str, str]) -> list[Problem]:
        arguments = ["--backend", backend, "--devices", "cpu", *NEEDED.get(backend, ())]
        arguments += [f"--set={path}={value}" for path, value in values.items()]
        config, found = read_config(None, plugins, tables, arguments=arguments)
        return found + check(config, plugins, tables)[1]

    before = {backend: problems(backend, {}) for backend in backends}
    for values in questions(plugins, tables):
        answers = {}
        for backend in backends:
            found = problems(backend, values)
            new = [each for each in found if each not in before[backend] and NO_FOLDER not in each.what]
            answers[backend] = new[0].what.replace(f"backend {backend!r}", "this backend") if new else ""
        yield Asked(text=_toml(values), values=values, answers=answers)


def questions(plugins: Plugins, tables: Mapping[str, TableEntry]) -> Iterator[Mapping[str, str]]:
    """Every loss that some backend has, the keys above that are registered, every recipe."""
    losses = {entry.spec.name for entry in plugins.registered(Kind.LOSS)}
    for entry in plugins.registered(Kind.BACKEND):
        losses |= entry.spec.traits.losses if isinstance(entry.spec.traits, Capabilities) else frozenset()
    yield from ({"algorithm.loss": name} for name in sorted(losses))
    known = {key.path for key in all_keys(tables)}
    yield from (values for values in TRIED if values.keys() <= known)
    yield from ({"algorithm.recipe": entry.spec.name} for entry in plugins.registered(Kind.RECIPE))


def _toml(values: Mapping[str, str]) -> str:
    """The last of these settings, as TOML has it."""
    *_, (path, value) = values.items()
    table, _, name = path.partition(".")
    shown = value if value[:1].isdigit() or value[:1] == "[" or value == "true" else f'"{value}"'
    where = f'where = "{values["kl.where"]}", ' if "kl.where" in values else ""
    return f"[{table}] {where}{name} = {shown}"
