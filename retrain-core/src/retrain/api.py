"""Everything that a plugin may import, besides `retrain.advantages` and `retrain.testing`; frozen by a test.

Each name is imported on first use: a `plugin.py` that takes `PluginSpec` and `hookimpl` from here imports neither
pydantic nor numpy, so that `retrain --help`, which imports every `plugin.py`, stays fast.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.kernel.config.keys import Table, TableTraits, key
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.backend import Backend, Deliver, DeliversEarly, Engine, Measuring, Publishing
    from retrain.kernel.contracts.context import PhaseProgress, PluginContext
    from retrain.kernel.contracts.pacing import Pacer, PaceView
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
    from retrain.kernel.plugins.discover import load_plugins
    from retrain.kernel.plugins.first_party import install_line
    from retrain.kernel.plugins.installed import installed_dependents, installed_version
    from retrain.kernel.plugins.manager import Plugins
    from retrain.kernel.plugins.resolve import Found, resolve
    from retrain.kernel.plugins.spec import ConfigClaim, MetricSpec, PluginSpec
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
    from retrain.rooms.campaign.launching import FindsJobs, Job, Launcher, RunningJob
    from retrain.rooms.capacity.estimate import MemoryEstimate, MemoryModel, MemoryPhase, TensorSize, Workload
    from retrain.rooms.credit.forms import find_loss
    from retrain.rooms.credit.losses import LossClip, LossContext, LossSpec, LossTerms, LossTraits, LossTrial, LossValue
    from retrain.rooms.credit.parts import Controller, ControllerView, PlanningDetector
    from retrain.rooms.doctor.diagnosis import Diagnosis, diagnose_extra, diagnose_server
    from retrain.rooms.health.contract import Finding, HealthMonitor
    from retrain.rooms.inference.policy import Policy, TakesWeights
    from retrain.rooms.inference.throttle import Throttle
    from retrain.rooms.recorders.contract import Recorder
    from retrain.rooms.session.configure import load_checked
    from retrain.rooms.session.records.checkpoints import locate_adapter
    from retrain.rooms.session.report_parts import ReportPlot, ReportSection
    from retrain.rooms.session.steps.logprob_gap import LogprobRow
    from retrain.rooms.session.steps.overlapped import KeepsVersions, OverlapsTraining, SamplesAhead
    from retrain.rooms.session.streaming import (
        Feed,
        RanksTokens,
        ServedElsewhere,
        StreamsTokens,
        TopLogprobs,
        stream_from,
    )
    from retrain.rooms.tasks.columns import column_names, unknown_column, value_at
    from retrain.rooms.tasks.contracts import (
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
    from retrain.rooms.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest, Sampler
    from retrain.rooms.teacher.contract import Teacher
    from retrain.rooms.text.tool_calls import ToolCall, parse_tool_calls
    from retrain.rooms.use.contract import ExportedModel, ModelExport

__all__ = [
    "Action",
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
    "DeliversEarly",
    "Determinism",
    "Diagnosis",
    "Ending",
    "Engine",
    "EngineTraits",
    "Environment",
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

_HOMES = (  # a name comes from the first module that has it; those that import nothing come first, rooms last
    "retrain.kernel.declared",
    "retrain.rooms.credit.losses",
    "retrain.kernel.errors",
    "retrain.kernel.hooks",
    "retrain.kernel.plugins.spec",
    "retrain.kernel.plugins.installed",
    "retrain.kernel.plugins.first_party",
    "retrain.kernel.plugins.manager",
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
    "retrain.rooms.tasks.columns",
    "retrain.rooms.tasks.contracts",
    "retrain.rooms.tasks.sampling",
    "retrain.rooms.credit.parts",
    "retrain.rooms.recorders.contract",
    "retrain.rooms.health.contract",
    "retrain.rooms.session.streaming",
    "retrain.rooms.doctor.diagnosis",
    "retrain.rooms.campaign.launching",
    "retrain.rooms.session.records.checkpoints",
    "retrain.rooms.session.configure",
    "retrain.rooms.session.steps.logprob_gap",
    "retrain.rooms.session.steps.overlapped",
    "retrain.rooms.session.report_parts",
    "retrain.rooms.inference.policy",
    "retrain.rooms.teacher.contract",
    "retrain.rooms.text.tool_calls",
    "retrain.rooms.use.contract",
    "retrain.rooms.inference.throttle",
    "retrain.rooms.capacity.estimate",
    "retrain.rooms.credit.forms",
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
                    continue  # a room that was removed
                if value is not None:
                    globals()[name] = value
                    return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
