"""The public surface: what plugins may import is exactly this, so that a change of it is a decision."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

from retrain import advantages, api

API = """
Action ActionRow Ask Backend BackendError BackendFunctions Capabilities CheckpointMode Completion Config ConfigClaim
ConfigError Controller ControllerView CreditError DataSource Deliver DeliversEarly Determinism Diagnosis DistilTable
Ending Engine EngineTraits Environment EnvironmentTable EpisodeResult Example ExportedModel Feed Finding FindsJobs
Floats Found Group GroupOutcome HealthMonitor Job KeepsVersions Kind Launcher LoadedData LogprobRow LossClip
LossContext LossSpec LossTerms LossTraits LossTrial LossValue Mask Measuring MemoryEstimate MemoryModel MemoryPhase
Message MetricSpec ModelExport Needs NonFiniteError Observation OutOfMemoryError Outcome OverlapsTraining PaceView
Pacer PhaseProgress PlanningDetector PlanningTable PluginContext PluginError PluginSpec Plugins Policy Problem
PromptChoice PromptRequest Publishing RanksTokens Recorder Reply ReportPlot ReportSection ResumeError RetrainError
Reward RewardError RewardTable RunningJob Sample SampleRequest Sampler SamplesAhead SamplingParams Score Seeds
ServedElsewhere Shaper StopReason StreamsTokens Table TableTraits TakesWeights Teacher TensorSize Throttle Tokens
ToolCall TopLogprobs TrainBatch TrainReport TrainRow Watcher Workload column_names diagnose_extra diagnose_server
find_loss generator hookimpl install_line installed_dependents installed_version key load_checked load_plugins
locate_adapter parse_tool_calls resolve stream_from unknown_column value_at
"""
ADVANTAGES = """
AdvantageContext AdvantageSpec Algorithm AlgorithmSpec Credit CreditStage GroupStatus Needs StepAdvantageContext
TokenAdvantageContext TokenCredit TransformContext TransformOutput TransformSpec Turns UncertaintyContext
UncertaintySpec amplify_planning compute_composable_advantages group_status gtpo_weights top_rho_threshold
train_rows
"""


def test_the_public_api_is_frozen() -> None:
    assert sorted(api.__all__) == sorted(API.split())
    assert sorted(advantages.__all__) == sorted(ADVANTAGES.split())


def test_every_public_name_exists_and_is_documented() -> None:
    for module in (api, advantages):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and getattr(value, "__module__", "").startswith("retrain"):
                assert value.__doc__, name


def test_nothing_else_is_public_by_accident() -> None:
    for module in (api, advantages):
        names = {name for name in dir(module) if not name.startswith("_")}
        assert names == set(module.__all__)


def test_what_is_imported_late_is_what_a_type_checker_sees() -> None:
    stub = Path(api.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom) and node.module]
    assert sorted(alias.name for node in imports for alias in node.names) == sorted(api.__all__)
    for node in imports:
        for alias in node.names:
            assert getattr(api, alias.name) is getattr(import_module(node.module or ""), alias.name), alias.name
    assert not hasattr(api, "PluginSpecs")
