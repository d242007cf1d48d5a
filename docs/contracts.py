"""Generated sections about Python: `contract KIND`, `checks KIND`, `api`, `scaffold`, `source` and `public_names`."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from typing import Any

from retrain.cli.manual import markdown
from retrain.cli.manual.sections import described_function, naming_keys, signature
from retrain.cli.scaffold.render import kind_of, names_from, render_file
from retrain.kernel import hooks as hookspecs
from retrain.kernel.registry import HOOK_OF_KIND, Plugins
from retrain.kernel.types import Kind
from retrain.run import public_package

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
NO_COUNTERPART = "no counterpart: "
BY_SLUG = {kind.value.replace(" ", "-"): kind for kind in PUBLIC}


def contract(plugins: Plugins, kind: str) -> str:
    """The hook that registers a kind, the TOML key that names a part, and the types involved."""
    wanted = BY_SLUG[kind]
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


def api(plugins: Plugins, module: str) -> str:
    content = importlib.import_module(module)
    return "\n\n".join(_entry(name, getattr(content, name)) for name in sorted(content.__all__, key=str.lower))


def described(name: str) -> str:
    """Return the entry of a name of `retrain.api` or `retrain.advantages`."""
    modules = map(importlib.import_module, MODULES[:2])
    return _entry(name, getattr(next(module for module in modules if name in module.__all__), name))


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
        return described_function(name, value)
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


def source(plugins: Plugins, place: str) -> str:
    """The source of `module:Class.method`, as in the tree."""
    found = pkgutil.resolve_name(place)
    return f"```python\n{textwrap.dedent(inspect.getsource(found)).rstrip()}\n```"


def public_names(plugins: Plugins) -> str:
    """Every name of the public package `retrain` that this one does not have, and its replacement."""
    rows = [
        (", ".join(map(markdown.code, names)), NO_COUNTERPART * (status == "none") + note)
        for names, status, note in public_package.public_names()
    ]
    return markdown.table(("there", "here"), rows)


def scaffold(plugins: Plugins, kind: str, name: str) -> str:
    """The file that `retrain init-plugin` writes, and the TOML that it prints."""
    made = render_file(kind_of(kind), names_from(name, where="scaffold"), "plugins")
    toml = f"and in the configuration:\n\n```toml\n{made.toml.strip()}\n```"
    return f"`plugins/{name}.py`:\n\n```python\n{made.module.rstrip()}\n```\n\n{toml}"
