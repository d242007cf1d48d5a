"""Generated sections about plugins: `hooks`, `contract KIND`, `checks KIND`, `plugins`, `api` and `scaffold`."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from retrain.cli.manual import markdown
from retrain.cli.scaffold.render import kind_of, names_from, render_file
from retrain.kernel import hooks as hookspecs
from retrain.kernel.config.keys import keys_of
from retrain.kernel.declared import TableTraits
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import HOOK_OF_KIND, Plugins, Registered
from retrain.kernel.types import Kind
from retrain.run.tables import registered_tables

MODULES = ("retrain.api", "retrain.advantages", "retrain.testing", "retrain")  # the last one for scripts
ALIASES = ("retrain.kernel.types", "retrain.kernel.contracts.backend")  # define the type aliases
PUBLIC = {  # the types of each kind, in retrain.api or retrain.advantages
    Kind.ADVANTAGE: ("AdvantageSpec", "AdvantageContext"),
    Kind.TRANSFORM: ("TransformSpec", "TransformContext", "TransformOutput", "CreditStage"),
    Kind.UNCERTAINTY: ("UncertaintySpec", "UncertaintyContext"),
    Kind.ALGORITHM: (
        *("AlgorithmSpec", "TransformContext", "TransformOutput"),
        *("Algorithm", "Needs", "Credit", "TokenCredit"),
    ),
    Kind.RECIPE: (),
    Kind.LOSS: ("LossSpec", "LossContext", "LossTerms", "LossClip", "LossTraits"),
    Kind.PLANNING_DETECTOR: ("PlanningDetector",),
    Kind.CONTROLLER: ("Controller", "ControllerView"),
    Kind.REWARD: ("Reward", "Score"),
    Kind.DATA_SOURCE: ("DataSource", "LoadedData", "Example"),
    Kind.ENVIRONMENT: ("Environment", "Observation", "Action", "EpisodeResult"),
    Kind.BACKEND: ("Backend", "Capabilities", "BackendFunctions", "TrainBatch", "TrainReport"),
    Kind.INFERENCE_ENGINE: ("Engine", "SampleRequest", "SamplingParams", "Sample"),
    Kind.RECORDER: ("Recorder",),
    Kind.HEALTH_MONITOR: ("HealthMonitor", "Finding"),
    Kind.PACER: ("Pacer", "PaceView"),
    Kind.SAMPLER: ("Sampler", "PromptRequest", "PromptChoice", "GroupOutcome"),
    Kind.LAUNCHER: ("Launcher", "Job", "RunningJob", "FindsJobs"),
}


def hooks(plugins: Plugins) -> str:
    """Every hook in life-cycle order, with its signature and docstring."""
    specs = (value for name, value in vars(hookspecs).items() if name.startswith(f"{hookspecs.PROJECT}_"))
    return "\n\n".join(_entry(value.__name__, value) for value in specs if isinstance(value, FunctionType))


def contract(plugins: Plugins, kind: str) -> str:
    """The hook that registers a kind, the TOML key that names a part, and the types involved."""
    wanted = next((known for known in PUBLIC if known.value.replace(" ", "-") == kind), None)
    if wanted is None:
        fix = f"use one of: {', '.join(known.value.replace(' ', '-') for known in PUBLIC)}"
        raise ConfigError(Problem(code="help.unknown-kind", what=f"there is no contract of kind {kind!r}", fix=fix))
    hook = getattr(hookspecs, HOOK_OF_KIND[wanted])
    names = ", ".join(markdown.code(entry.spec.name) for entry in plugins.registered(wanted))
    rows = [
        ("registered by", markdown.code(f"{hook.__name__}(register)")),
        ("named in", naming_keys(plugins).get(wanted, "")),
        ("installed", names or "none"),
    ]
    sections = [markdown.table(("", ""), rows), markdown.prose(hook.__doc__)]
    return "\n\n".join([*sections, *(described(name) for name in PUBLIC[wanted])])


def checks(plugins: Plugins, kind: str) -> str:
    testing = importlib.import_module("retrain.testing")
    rows = [(markdown.code(check.name), check.purpose) for check in testing.conformance(kind, "any")]
    return markdown.table(("check", "purpose"), rows)


# The places that name parts, for kinds that no config key declares.
KEYS = {
    Kind.CONTROLLER: "named by a `TransformSpec`",
    Kind.CONFIG_TABLE: "the table itself",
    Kind.COMMAND: "`retrain NAME`",
    Kind.TEMPLATE: "`retrain init --template NAME`",
}


def parts(plugins: Plugins, *only: str) -> str:
    """One table of parts per kind: name, distribution, summary; then the parameters of parts that take any.

    `only` limits it to these kinds, with hyphens in their names: `data-source`.
    """
    where = naming_keys(plugins)
    sections = []
    for kind in Kind:
        entries = plugins.registered(kind)
        if not entries or (only and kind.value.replace(" ", "-") not in only):
            continue
        rows = []
        for spec, owner in ((entry.spec, entry.owner) for entry in entries):
            also = f" ({', '.join(map(markdown.code, spec.aliases))})" if spec.aliases else ""
            rows.append((markdown.code(spec.name) + also, owner.distribution, spec.summary))
        sections += [f"### {kind.value}", f"Named in: {where.get(kind, '')}." if kind in where else ""]
        sections.append(markdown.table(("name", "distribution", "summary"), rows))
        sections += [_params(entry) for entry in entries]
    return "\n\n".join(section for section in sections if section)


def naming_keys(plugins: Plugins) -> dict[Kind, str]:
    """The TOML keys that name parts, by kind."""
    found = dict(KEYS)
    for name, entry in registered_tables(plugins).items():
        for key in keys_of(name, entry.model, entry.traits):
            if key.names:
                others = [found[key.names]] if key.names in found else []
                found[key.names] = ", ".join([*others, f"`[{key.table}] {key.name}`"])
    return found


def _params(entry: Registered) -> str:
    try:
        model = entry.spec.load_params()
    except Exception:  # a broken plugin; `retrain plugins` reports it
        return ""
    if model is None or not issubclass(model, BaseModel) or not model.model_fields:
        return ""
    rows = [
        (markdown.code(key.name), markdown.value(key.default), key.description)
        for key in keys_of(entry.spec.name, model, TableTraits())
    ]
    return f"Parameters of `{entry.spec.name}`:\n\n" + markdown.table(("parameter", "default", "meaning"), rows)


def api(plugins: Plugins, module: str) -> str:
    if module not in MODULES:
        raise ConfigError(
            Problem(code="help.not-public", what=f"{module!r} is not public", fix=f"use one of: {', '.join(MODULES)}")
        )
    content = importlib.import_module(module)
    return "\n\n".join(_entry(name, getattr(content, name)) for name in sorted(content.__all__, key=str.lower))


def described(name: str) -> str:
    for module in MODULES[:2]:
        content = importlib.import_module(module)
        if name in content.__all__:
            return _entry(name, getattr(content, name))
    raise ConfigError(Problem(code="help.not-public", what=f"{name!r} is not public", fix="use a name of retrain.api"))


def signature(function: Callable[..., Any]) -> str:
    """`(rewards_G: Numbers, *, eps: float = 1e-06) -> Floats`: annotations as in the source, without `self`."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=_text(p.annotation)) for name, p in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=parameters, return_annotation=_text(found.return_annotation)))


class _Text(str):
    """An annotation that is stored as text, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


def _entry(name: str, value: Any) -> str:
    lines = [f"### {markdown.anchor(name)}"]
    if inspect.isclass(value) and value.__name__ != name:
        lines.append(f"The former name of {markdown.code(value.__name__)}, kept for plugins that use it.")
    elif inspect.isclass(value):
        # `dataclass` and `Enum` write the signature into a docstring that the class does not have.
        is_generated = (value.__doc__ or "").startswith(f"{name}(")
        doc = "" if is_generated else markdown.prose(value.__doc__)
        lines += [f"```python\n{_class_line(name, value)}\n```", doc, *_members(value)]
    elif inspect.isfunction(value):
        lines += [f"```python\ndef {name}{signature(value)}\n```", markdown.prose(value.__doc__)]
    elif written := _alias(name):
        lines.append(f"```python\n{name} = {written}\n```")
    else:
        lines += [
            f"```python\n{name}: {type(value).__name__}\n```",
            markdown.prose(type(value).__doc__).split("\n\n")[0],
        ]
    return "\n\n".join(line for line in lines if line)


def _alias(name: str) -> str:
    """A type alias as in the source: its runtime text differs between versions of numpy and Python."""
    for module in ALIASES:
        found = re.search(
            rf"^{name} = (.+?)(?:  #.*)?$", inspect.getsource(importlib.import_module(module)), re.MULTILINE
        )
        if found:
            return found[1]
    return ""


def _class_line(name: str, value: type) -> str:
    if dataclasses.is_dataclass(value):
        fields = ",\n    ".join(map(_field, dataclasses.fields(value)))
        return f"{name}(\n    {fields},\n)"
    if issubclass(value, enum.Enum):
        return f"class {name}: " + ", ".join(repr(getattr(member, "value", member)) for member in value)
    base = next((base.__name__ for base in value.__bases__ if base is not object), "")
    return f"class {name}({base})" if base else f"class {name}"


def _field(field: dataclasses.Field[Any]) -> str:
    """Name, type and default as in the source; `...` for a default made by a function."""
    default = field.default
    if isinstance(default, enum.Enum):
        shown = f"{type(default).__name__}.{default.name}"
    elif default is dataclasses.MISSING:
        shown = "" if field.default_factory is dataclasses.MISSING else "..."
    else:
        shown = "..." if callable(default) else repr(default)
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    return f"{field.name}: {kind}" + (f" = {shown}" if shown else "")


def _members(value: type) -> Iterator[str]:
    """Methods and properties that have a docstring, in source order."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(inner) or not inner.__doc__:
            continue
        call = "" if isinstance(member, property) else signature(inner)
        yield f"`{name}{call}`\n:   " + markdown.prose(inner.__doc__).replace("\n", "\n    ")


def scaffold(plugins: Plugins, kind: str, name: str) -> str:
    """The file that `retrain init-plugin` writes, and the TOML that it prints."""
    made = render_file(kind_of(kind), names_from(name, where="scaffold"), "plugins")
    toml = f"and in the configuration:\n\n```toml\n{made.toml.strip()}\n```"
    return f"`plugins/{name}.py`:\n\n```python\n{made.module.rstrip()}\n```\n\n{toml}"
