"""The public surface: what plugins may import is exactly this, so that a change of it is a decision."""

from __future__ import annotations

from retrain import advantages, api

API = """
Ask Backend BackendError Capabilities CheckpointMode Completion Config ConfigClaim ConfigError Controller
ControllerView CreditError DataSource Deliver Determinism Ending Engine EngineTraits Environment Example Finding Floats Found Group
HealthMonitor Job Kind Launcher LoadedData LogprobRow Mask Measuring Message NonFiniteError Outcome OutOfMemoryError PaceView Pacer
PlanningDetector PluginContext PluginError Plugins PluginSpec Policy Problem Publishing Recorder Reply ResumeError RetrainError Reward
RewardError RunningJob Sample SampleRequest SamplingParams Score Seeds StopReason Table TableTraits TakesWeights Throttle Tokens
TrainBatch TrainReport TrainRow generator hookimpl key load_plugins resolve
"""
ADVANTAGES = """
AdvantageContext AdvantageSpec AlgorithmSpec TransformContext TransformOutput TransformSpec UncertaintyContext
UncertaintySpec amplify_planning compute_composable_advantages gtpo_weights top_rho_threshold
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
        names = {name for name in vars(module) if not name.startswith("_")}
        assert names == set(module.__all__)
