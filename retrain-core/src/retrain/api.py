"""Everything that a plugin may import, besides `retrain.advantages` and `retrain.testing`; frozen by a test.

Each name is imported on first use: a `plugin.py` that takes `PluginSpec` and `hookimpl` from here imports neither
pydantic nor numpy, so that `retrain --help`, which imports every `plugin.py`, stays fast.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.campaign.launching import FindsJobs, Job, Launcher, RunningJob
    from retrain.credit.configured_loss import find_loss
    from retrain.credit.logprob_gap import LogprobRow
    from retrain.credit.specs import Controller, ControllerView, PlanningDetector
    from retrain.engines.policy import Policy, TakesWeights
    from retrain.engines.throttle import Throttle
    from retrain.kernel.config.keys import Table, TableTraits, key
    from retrain.kernel.config.plugin_tables import EnvironmentTable, PlanningTable, RewardTable
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.backend import Backend, Deliver, DeliversEarly, Engine, Measuring, Publishing, Teacher
    from retrain.kernel.contracts.context import PhaseProgress, PluginContext
    from retrain.kernel.contracts.diagnosis import Diagnosis
    from retrain.kernel.contracts.export import ExportedModel, ModelExport
    from retrain.kernel.contracts.losses import (
        LossClip,
        LossContext,
        LossSpec,
        LossTerms,
        LossTraits,
        LossTrial,
        LossValue,
    )
    from retrain.kernel.contracts.memory import MemoryEstimate, MemoryModel, MemoryPhase, TensorSize, Workload
    from retrain.kernel.contracts.pacing import Pacer, PaceView
    from retrain.kernel.contracts.report import ReportPlot, ReportSection
    from retrain.kernel.contracts.verifier import (
        Action,
        Ask,
        DataSource,
        Ending,
        Environment,
        EpisodeResult,
        LoadedData,
        Observation,
        Reply,
        Reward,
    )
    from retrain.kernel.contracts.views import Watcher
    from retrain.kernel.declared import EngineTraits, Needs
    from retrain.kernel.errors import (
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
    from retrain.kernel.hooks import hookimpl
    from retrain.kernel.plugin_spec import BackendFunctions, ConfigClaim, MetricSpec, PluginSpec
    from retrain.kernel.plugins.discover import load_plugins
    from retrain.kernel.plugins.first_party import install_line
    from retrain.kernel.plugins.installed import installed_dependents, installed_version
    from retrain.kernel.plugins.resolve import Found, resolve
    from retrain.kernel.registry import Plugins
    from retrain.kernel.seeding import Seeds, generator
    from retrain.kernel.types import (
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
    from retrain.observe.health.contract import Finding, HealthMonitor
    from retrain.observe.trackers.contract import Recorder
    from retrain.records.checkpoints import locate_adapter
    from retrain.run.configure import load_checked
    from retrain.run.steps.overlapped import KeepsVersions, OverlapsTraining, SamplesAhead
    from retrain.run.streaming import (
        Feed,
        RanksTokens,
        ServedElsewhere,
        StreamsTokens,
        TopLogprobs,
        stream_from,
    )
    from retrain.tasks.columns import column_names, unknown_column, value_at
    from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest, Sampler
    from retrain.text.tool_calls import ToolCall, parse_tool_calls
    from retrain.tools.doctor.diagnosis import diagnose_extra, diagnose_server

__all__ = [
    "Action",
    "ActionRow",
    "Ask",
    "Backend",
    "BackendError",
    "BackendFunctions",
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
    "DeliversEarly",
    "Determinism",
    "Diagnosis",
    "Ending",
    "Engine",
    "EngineTraits",
    "Environment",
    "EnvironmentTable",
    "EpisodeResult",
    "Example",
    "ExportedModel",
    "Feed",
    "Finding",
    "FindsJobs",
    "Floats",
    "Found",
    "Group",
    "GroupOutcome",
    "HealthMonitor",
    "Job",
    "KeepsVersions",
    "Kind",
    "Launcher",
    "LoadedData",
    "LogprobRow",
    "LossClip",
    "LossContext",
    "LossSpec",
    "LossTerms",
    "LossTraits",
    "LossTrial",
    "LossValue",
    "Mask",
    "Measuring",
    "MemoryEstimate",
    "MemoryModel",
    "MemoryPhase",
    "Message",
    "MetricSpec",
    "ModelExport",
    "Needs",
    "NonFiniteError",
    "Observation",
    "OutOfMemoryError",
    "Outcome",
    "OverlapsTraining",
    "PaceView",
    "Pacer",
    "PhaseProgress",
    "PlanningDetector",
    "PlanningTable",
    "PluginContext",
    "PluginError",
    "PluginSpec",
    "Plugins",
    "Policy",
    "Problem",
    "PromptChoice",
    "PromptRequest",
    "Publishing",
    "RanksTokens",
    "Recorder",
    "Reply",
    "ReportPlot",
    "ReportSection",
    "ResumeError",
    "RetrainError",
    "Reward",
    "RewardError",
    "RewardTable",
    "RunningJob",
    "Sample",
    "SampleRequest",
    "Sampler",
    "SamplesAhead",
    "SamplingParams",
    "Score",
    "Seeds",
    "ServedElsewhere",
    "Shaper",
    "StopReason",
    "StreamsTokens",
    "Table",
    "TableTraits",
    "TakesWeights",
    "Teacher",
    "TensorSize",
    "Throttle",
    "Tokens",
    "ToolCall",
    "TopLogprobs",
    "TrainBatch",
    "TrainReport",
    "TrainRow",
    "Watcher",
    "Workload",
    "column_names",
    "diagnose_extra",
    "diagnose_server",
    "find_loss",
    "generator",
    "hookimpl",
    "install_line",
    "installed_dependents",
    "installed_version",
    "key",
    "load_checked",
    "load_plugins",
    "locate_adapter",
    "parse_tool_calls",
    "resolve",
    "stream_from",
    "unknown_column",
    "value_at",
]

_HOMES = (  # a name comes from the first module that has it; those that import nothing come first
    "retrain.kernel.declared",
    "retrain.kernel.contracts.losses",
    "retrain.kernel.errors",
    "retrain.kernel.hooks",
    "retrain.kernel.plugin_spec",
    "retrain.kernel.plugins.installed",
    "retrain.kernel.plugins.first_party",
    "retrain.kernel.registry",
    "retrain.kernel.plugins.discover",
    "retrain.kernel.plugins.resolve",
    "retrain.kernel.contracts.pacing",
    "retrain.kernel.types",
    "retrain.kernel.seeding",
    "retrain.kernel.contracts.context",
    "retrain.kernel.contracts.backend",
    "retrain.kernel.contracts.tasks",
    "retrain.kernel.contracts.algorithm",
    "retrain.kernel.config.keys",
    "retrain.kernel.config.resolved",
    "retrain.kernel.config.plugin_tables",
    "retrain.tasks.columns",
    "retrain.kernel.contracts.verifier",
    "retrain.tasks.sampling",
    "retrain.credit.specs",
    "retrain.observe.trackers.contract",
    "retrain.observe.health.contract",
    "retrain.run.streaming",
    "retrain.tools.doctor.diagnosis",
    "retrain.campaign.launching",
    "retrain.records.checkpoints",
    "retrain.run.configure",
    "retrain.credit.logprob_gap",
    "retrain.run.steps.overlapped",
    "retrain.kernel.contracts.report",
    "retrain.kernel.contracts.views",
    "retrain.engines.policy",
    "retrain.text.tool_calls",
    "retrain.kernel.contracts.export",
    "retrain.engines.throttle",
    "retrain.kernel.contracts.memory",
    "retrain.credit.configured_loss",
)

if not TYPE_CHECKING:  # type checkers read the imports above and so find misspelt names

    def __getattr__(name: str) -> object:
        """The public name, imported now and kept."""
        if name in __all__:
            for home in sorted(_HOMES, key=lambda home: home not in sys.modules):  # loaded modules first
                try:
                    value = getattr(import_module(home), name, None)
                except ModuleNotFoundError as error:
                    if not home.startswith(error.name or "?"):
                        raise
                    continue  # a package that was removed
                if value is not None:
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
