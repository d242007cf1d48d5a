"""Everything that a plugin may import, besides `retrain.advantages` and `retrain.testing`; frozen by a test.

Each name is imported on first use: a `plugin.py` that takes `PluginSpec` and `hookimpl` from here imports neither
pydantic nor numpy, so that `retrain --help`, which imports every `plugin.py`, stays fast. The imports below are for
type checkers; a test compares the two lists. What `declared` has comes from there: it imports nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.campaign.launching import FindsJobs as FindsJobs
    from retrain.campaign.launching import Job as Job
    from retrain.campaign.launching import Launcher as Launcher
    from retrain.campaign.launching import RunningJob as RunningJob
    from retrain.credit.configured_loss import find_loss as find_loss
    from retrain.credit.specs import Controller as Controller
    from retrain.credit.specs import ControllerView as ControllerView
    from retrain.credit.specs import PlanningDetector as PlanningDetector
    from retrain.engines.policy import Policy as Policy
    from retrain.engines.policy import TakesWeights as TakesWeights
    from retrain.engines.throttle import Throttle as Throttle
    from retrain.kernel.config.keys import Table as Table
    from retrain.kernel.config.keys import key as key
    from retrain.kernel.config.plugin_tables import EnvironmentTable as EnvironmentTable
    from retrain.kernel.config.plugin_tables import PlanningTable as PlanningTable
    from retrain.kernel.config.plugin_tables import RewardTable as RewardTable
    from retrain.kernel.config.resolved import Config as Config
    from retrain.kernel.contracts.algorithm import Shaper as Shaper
    from retrain.kernel.contracts.backend import Backend as Backend
    from retrain.kernel.contracts.backend import Deliver as Deliver
    from retrain.kernel.contracts.backend import DeliversEarly as DeliversEarly
    from retrain.kernel.contracts.backend import Engine as Engine
    from retrain.kernel.contracts.backend import Measuring as Measuring
    from retrain.kernel.contracts.backend import Publishing as Publishing
    from retrain.kernel.contracts.backend import Teacher as Teacher
    from retrain.kernel.contracts.context import PhaseProgress as PhaseProgress
    from retrain.kernel.contracts.context import PluginContext as PluginContext
    from retrain.kernel.contracts.diagnosis import Diagnosis as Diagnosis
    from retrain.kernel.contracts.export import ExportedModel as ExportedModel
    from retrain.kernel.contracts.export import ModelExport as ModelExport
    from retrain.kernel.contracts.losses import LossClip as LossClip
    from retrain.kernel.contracts.losses import LossContext as LossContext
    from retrain.kernel.contracts.losses import LossSpec as LossSpec
    from retrain.kernel.contracts.losses import LossTerms as LossTerms
    from retrain.kernel.contracts.losses import LossTraits as LossTraits
    from retrain.kernel.contracts.losses import LossTrial as LossTrial
    from retrain.kernel.contracts.losses import LossValue as LossValue
    from retrain.kernel.contracts.memory import MemoryEstimate as MemoryEstimate
    from retrain.kernel.contracts.memory import MemoryModel as MemoryModel
    from retrain.kernel.contracts.memory import MemoryPhase as MemoryPhase
    from retrain.kernel.contracts.memory import TensorSize as TensorSize
    from retrain.kernel.contracts.memory import Workload as Workload
    from retrain.kernel.contracts.pacing import Pacer as Pacer
    from retrain.kernel.contracts.pacing import PaceView as PaceView
    from retrain.kernel.contracts.report import ReportPlot as ReportPlot
    from retrain.kernel.contracts.report import ReportSection as ReportSection
    from retrain.kernel.contracts.tasks import Action as Action
    from retrain.kernel.contracts.tasks import Ask as Ask
    from retrain.kernel.contracts.tasks import DataSource as DataSource
    from retrain.kernel.contracts.tasks import Ending as Ending
    from retrain.kernel.contracts.tasks import Environment as Environment
    from retrain.kernel.contracts.tasks import EpisodeResult as EpisodeResult
    from retrain.kernel.contracts.tasks import LoadedData as LoadedData
    from retrain.kernel.contracts.tasks import Observation as Observation
    from retrain.kernel.contracts.tasks import Reply as Reply
    from retrain.kernel.contracts.tasks import Reward as Reward
    from retrain.kernel.contracts.views import Watcher as Watcher
    from retrain.kernel.declared import BackendFunctions as BackendFunctions
    from retrain.kernel.declared import Capabilities as Capabilities
    from retrain.kernel.declared import CheckpointMode as CheckpointMode
    from retrain.kernel.declared import ConfigClaim as ConfigClaim
    from retrain.kernel.declared import Determinism as Determinism
    from retrain.kernel.declared import EngineTraits as EngineTraits
    from retrain.kernel.declared import Kind as Kind
    from retrain.kernel.declared import MetricSpec as MetricSpec
    from retrain.kernel.declared import Needs as Needs
    from retrain.kernel.declared import PluginSpec as PluginSpec
    from retrain.kernel.declared import TableTraits as TableTraits
    from retrain.kernel.errors import BackendError as BackendError
    from retrain.kernel.errors import ConfigError as ConfigError
    from retrain.kernel.errors import CreditError as CreditError
    from retrain.kernel.errors import NonFiniteError as NonFiniteError
    from retrain.kernel.errors import OutOfMemoryError as OutOfMemoryError
    from retrain.kernel.errors import PluginError as PluginError
    from retrain.kernel.errors import Problem as Problem
    from retrain.kernel.errors import ResumeError as ResumeError
    from retrain.kernel.errors import RetrainError as RetrainError
    from retrain.kernel.errors import RewardError as RewardError
    from retrain.kernel.hooks import hookimpl as hookimpl
    from retrain.kernel.plugins.discover import load_plugins as load_plugins
    from retrain.kernel.plugins.first_party import install_line as install_line
    from retrain.kernel.plugins.installed import installed_dependents as installed_dependents
    from retrain.kernel.plugins.installed import installed_version as installed_version
    from retrain.kernel.plugins.resolve import Found as Found
    from retrain.kernel.plugins.resolve import resolve as resolve
    from retrain.kernel.registry import Plugins as Plugins
    from retrain.kernel.seeding import Seeds as Seeds
    from retrain.kernel.seeding import generator as generator
    from retrain.kernel.types import ActionRow as ActionRow
    from retrain.kernel.types import Completion as Completion
    from retrain.kernel.types import Example as Example
    from retrain.kernel.types import Floats as Floats
    from retrain.kernel.types import Group as Group
    from retrain.kernel.types import LogprobRow as LogprobRow
    from retrain.kernel.types import Mask as Mask
    from retrain.kernel.types import Message as Message
    from retrain.kernel.types import Outcome as Outcome
    from retrain.kernel.types import Sample as Sample
    from retrain.kernel.types import SampleRequest as SampleRequest
    from retrain.kernel.types import SamplingParams as SamplingParams
    from retrain.kernel.types import Score as Score
    from retrain.kernel.types import StopReason as StopReason
    from retrain.kernel.types import Tokens as Tokens
    from retrain.kernel.types import TrainBatch as TrainBatch
    from retrain.kernel.types import TrainReport as TrainReport
    from retrain.kernel.types import TrainRow as TrainRow
    from retrain.observe.health.contract import Finding as Finding
    from retrain.observe.health.contract import HealthMonitor as HealthMonitor
    from retrain.observe.trackers.contract import Recorder as Recorder
    from retrain.records.checkpoints import locate_adapter as locate_adapter
    from retrain.run.configure import load_checked as load_checked
    from retrain.run.steps.staleness import KeepsVersions as KeepsVersions
    from retrain.run.steps.staleness import OverlapsTraining as OverlapsTraining
    from retrain.run.steps.staleness import SamplesAhead as SamplesAhead
    from retrain.run.streaming import Feed as Feed
    from retrain.run.streaming import RanksTokens as RanksTokens
    from retrain.run.streaming import ServedElsewhere as ServedElsewhere
    from retrain.run.streaming import StreamsTokens as StreamsTokens
    from retrain.run.streaming import TopLogprobs as TopLogprobs
    from retrain.run.streaming import stream_from as stream_from
    from retrain.tasks.columns import column_names as column_names
    from retrain.tasks.columns import unknown_column as unknown_column
    from retrain.tasks.columns import value_at as value_at
    from retrain.tasks.sampling import GroupOutcome as GroupOutcome
    from retrain.tasks.sampling import PromptChoice as PromptChoice
    from retrain.tasks.sampling import PromptRequest as PromptRequest
    from retrain.tasks.sampling import Sampler as Sampler
    from retrain.text.tool_calls import ToolCall as ToolCall
    from retrain.text.tool_calls import parse_tool_calls as parse_tool_calls
    from retrain.tools.doctor.diagnosis import diagnose_extra as diagnose_extra
    from retrain.tools.doctor.diagnosis import diagnose_server as diagnose_server

_HOMES = {
    "retrain.campaign.launching": "FindsJobs Job Launcher RunningJob",
    "retrain.credit.configured_loss": "find_loss",
    "retrain.credit.specs": "Controller ControllerView PlanningDetector",
    "retrain.engines.policy": "Policy TakesWeights",
    "retrain.engines.throttle": "Throttle",
    "retrain.kernel.config.keys": "Table key",
    "retrain.kernel.config.plugin_tables": "EnvironmentTable PlanningTable RewardTable",
    "retrain.kernel.config.resolved": "Config",
    "retrain.kernel.contracts.algorithm": "Shaper",
    "retrain.kernel.contracts.backend": "Backend Deliver DeliversEarly Engine Measuring Publishing Teacher",
    "retrain.kernel.contracts.context": "PhaseProgress PluginContext",
    "retrain.kernel.contracts.diagnosis": "Diagnosis",
    "retrain.kernel.contracts.export": "ExportedModel ModelExport",
    "retrain.kernel.contracts.losses": "LossClip LossContext LossSpec LossTerms LossTraits LossTrial LossValue",
    "retrain.kernel.contracts.memory": "MemoryEstimate MemoryModel MemoryPhase TensorSize Workload",
    "retrain.kernel.contracts.pacing": "Pacer PaceView",
    "retrain.kernel.contracts.report": "ReportPlot ReportSection",
    "retrain.kernel.contracts.tasks": (
        "Action Ask DataSource Ending Environment EpisodeResult LoadedData Observation Reply Reward"
    ),
    "retrain.kernel.contracts.views": "Watcher",
    "retrain.kernel.declared": (
        "BackendFunctions Capabilities CheckpointMode ConfigClaim Determinism EngineTraits Kind MetricSpec Needs "
        "PluginSpec TableTraits"
    ),
    "retrain.kernel.errors": (
        "BackendError ConfigError CreditError NonFiniteError OutOfMemoryError PluginError Problem ResumeError "
        "RetrainError RewardError"
    ),
    "retrain.kernel.hooks": "hookimpl",
    "retrain.kernel.plugins.discover": "load_plugins",
    "retrain.kernel.plugins.first_party": "install_line",
    "retrain.kernel.plugins.installed": "installed_dependents installed_version",
    "retrain.kernel.plugins.resolve": "Found resolve",
    "retrain.kernel.registry": "Plugins",
    "retrain.kernel.seeding": "Seeds generator",
    "retrain.kernel.types": (
        "ActionRow Completion Example Floats Group LogprobRow Mask Message Outcome Sample SampleRequest SamplingParams "
        "Score StopReason Tokens TrainBatch TrainReport TrainRow"
    ),
    "retrain.observe.health.contract": "Finding HealthMonitor",
    "retrain.observe.trackers.contract": "Recorder",
    "retrain.records.checkpoints": "locate_adapter",
    "retrain.run.configure": "load_checked",
    "retrain.run.steps.staleness": "KeepsVersions OverlapsTraining SamplesAhead",
    "retrain.run.streaming": "Feed RanksTokens ServedElsewhere StreamsTokens TopLogprobs stream_from",
    "retrain.tasks.columns": "column_names unknown_column value_at",
    "retrain.tasks.sampling": "GroupOutcome PromptChoice PromptRequest Sampler",
    "retrain.text.tool_calls": "ToolCall parse_tool_calls",
    "retrain.tools.doctor.diagnosis": "diagnose_extra diagnose_server",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = list(_HOME)

if not TYPE_CHECKING:  # type checkers read the imports above and so find misspelt names

    def __getattr__(name: str) -> object:
        """The public name, imported now and kept."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(_HOME)
