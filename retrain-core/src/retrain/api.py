"""All that a plugin may import from the kernel, beside `retrain.advantages` and `retrain.testing`; frozen by a test.

A name is imported when it is first asked for: a `plugin.py` that takes `PluginSpec` and `hookimpl` from here costs
neither pydantic nor numpy, and `retrain --help`, which imports every `plugin.py`, stays quick.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.config.keys import Table, TableTraits, key
    from retrain.config.resolved import Config
    from retrain.declared import EngineTraits
    from retrain.errors import (
        BackendError,
        ConfigError,
        CreditError,
        NonFiniteError,
        OutOfMemoryError,
        PluginError,
        Problem,
        ResumeError,
        RetrainError,
        RewardError,
    )
    from retrain.hookspecs import hookimpl
    from retrain.plugins.diagnosis import Diagnosis, diagnose_extra, diagnose_server
    from retrain.plugins.launching import Job, Launcher, RunningJob
    from retrain.plugins.manager import Plugins, load_plugins
    from retrain.plugins.pacing import Pacer, PaceView
    from retrain.plugins.protocols import (
        Ask,
        Backend,
        Controller,
        ControllerView,
        DataSource,
        Deliver,
        Ending,
        Engine,
        Environment,
        Finding,
        HealthMonitor,
        LoadedData,
        PlanningDetector,
        PluginContext,
        Recorder,
        Reply,
        Reward,
    )
    from retrain.plugins.resolve import Found, resolve
    from retrain.plugins.serving import LogprobRow, Measuring, Policy, Publishing, SamplesAhead, TakesWeights
    from retrain.plugins.spec import ConfigClaim, MetricSpec, PluginSpec
    from retrain.seeding import Seeds, generator
    from retrain.throttle import Throttle
    from retrain.types import (
        ActionRow,
        Capabilities,
        CheckpointMode,
        Completion,
        Determinism,
        Example,
        Floats,
        Group,
        Kind,
        Mask,
        Message,
        Outcome,
        Sample,
        SampleRequest,
        SamplingParams,
        Score,
        StopReason,
        Tokens,
        TrainBatch,
        TrainReport,
        TrainRow,
    )

__all__ = [
    "ActionRow",
    "Ask",
    "Backend",
    "BackendError",
    "Capabilities",
    "CheckpointMode",
    "Completion",
    "Config",
    "ConfigClaim",
    "ConfigError",
    "Controller",
    "ControllerView",
    "CreditError",
    "DataSource",
    "Deliver",
    "Determinism",
    "Diagnosis",
    "Ending",
    "Engine",
    "EngineTraits",
    "Environment",
    "Example",
    "Finding",
    "Floats",
    "Found",
    "Group",
    "HealthMonitor",
    "Job",
    "Kind",
    "Launcher",
    "LoadedData",
    "LogprobRow",
    "Mask",
    "Measuring",
    "Message",
    "MetricSpec",
    "NonFiniteError",
    "OutOfMemoryError",
    "Outcome",
    "PaceView",
    "Pacer",
    "PlanningDetector",
    "PluginContext",
    "PluginError",
    "PluginSpec",
    "Plugins",
    "Policy",
    "Problem",
    "Publishing",
    "Recorder",
    "Reply",
    "ResumeError",
    "RetrainError",
    "Reward",
    "RewardError",
    "RunningJob",
    "Sample",
    "SampleRequest",
    "SamplesAhead",
    "SamplingParams",
    "Score",
    "Seeds",
    "StopReason",
    "Table",
    "TableTraits",
    "TakesWeights",
    "Throttle",
    "Tokens",
    "TrainBatch",
    "TrainReport",
    "TrainRow",
    "diagnose_extra",
    "diagnose_server",
    "generator",
    "hookimpl",
    "key",
    "load_plugins",
    "resolve",
]

_HOMES = (  # a name comes from the first of these that has it; those that import nothing stand first
    "retrain.declared",
    "retrain.errors",
    "retrain.hookspecs",
    "retrain.plugins.spec",
    "retrain.plugins.manager",
    "retrain.plugins.resolve",
    "retrain.plugins.diagnosis",
    "retrain.plugins.launching",
    "retrain.plugins.pacing",
    "retrain.types",
    "retrain.seeding",
    "retrain.plugins.serving",
    "retrain.plugins.protocols",
    "retrain.config.keys",
    "retrain.config.resolved",
    "retrain.throttle",
)

if not TYPE_CHECKING:  # a type checker reads the imports above, and tells a misspelt name

    def __getattr__(name: str) -> object:
        """The public name, imported now and kept."""
        if name in __all__:
            for home in sorted(_HOMES, key=lambda home: home not in sys.modules):  # what is here already goes first
                value = getattr(import_module(home), name, None)
                if value is not None:
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
