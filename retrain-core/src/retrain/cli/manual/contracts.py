"""Generated sections `hooks`, `contract KIND` and `checks KIND`: what plugins can implement."""

from __future__ import annotations

import importlib
from types import FunctionType

from retrain.cli.manual import markdown
from retrain.cli.manual.parts import naming_keys
from retrain.cli.manual.public import described, signature
from retrain.kernel import hooks as hookspecs
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import HOOK_OF_KIND, Plugins
from retrain.kernel.types import Kind

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
    sections = []
    for function in _specs():
        sections += [
            f"### {markdown.anchor(function.__name__)}",
            _signature(function),
            markdown.prose(function.__doc__),
        ]
    return "\n\n".join(sections)


def contract(plugins: Plugins, kind: str) -> str:
    """The hook that registers a kind, the TOML key that names a part, and the types involved."""
    wanted = next((known for known in PUBLIC if known.value.replace(" ", "-") == kind), None)
    if wanted is None:
        fix = f"use one of: {', '.join(known.value.replace(' ', '-') for known in PUBLIC)}"
        raise ConfigError(Problem(what=f"there is no contract of kind {kind!r}", fix=fix))
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
    """The conformance checks of a kind, with the purpose of each."""
    testing = importlib.import_module("retrain.testing")
    rows = [(markdown.code(check.name), check.purpose) for check in testing.conformance(kind, "any")]
    return markdown.table(("check", "what it is for"), rows)


def _specs() -> list[FunctionType]:
    found = [value for name, value in vars(hookspecs).items() if name.startswith(f"{hookspecs.PROJECT}_")]
    return [value for value in found if isinstance(value, FunctionType)]


def _signature(function: FunctionType) -> str:
    return f"```python\ndef {function.__name__}{signature(function)}\n```"
