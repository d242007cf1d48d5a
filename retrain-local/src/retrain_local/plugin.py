"""Registers backend `local`, engine `pytorch`, the model `builtin:tiny` and the templates `tiny` and `smollm2`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.api import (
    BackendFunctions,
    Capabilities,
    CheckpointMode,
    Determinism,
    EngineTraits,
    LossTraits,
    MetricSpec,
    PluginSpec,
    TableTraits,
    hookimpl,
)

if TYPE_CHECKING:
    from retrain.api import Config, Diagnosis, Plugins, Problem

CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.SAME_MACHINE,
    provides_entropy=True,
    regularisers=frozenset({"kl_log", "kl_reward", "kl_loss", "entropy", "kl_cov", "clip_cov", "distil"}),
    all_weights=True,
    losses=frozenset(),  # all are registered, through the door for plugins
    loss_keys=frozenset({"dual_clip", "aggregation", "is_bounds", "off_policy_mask", "level"}),
    max_staleness=64,  # on split devices
    provides_squared_probs=True,
)
LOCAL = frozenset({"local"})
NO_CLIP = LossTraits(backends=LOCAL, clips=False)
CLIPPED = LossTraits(backends=LOCAL, idle="clip")
MASKED = replace(NO_CLIP, idle="mask")
LOSSES = (  # name, summary, traits, model of the parameters
    ("importance_sampling", "The ratio times the advantage, without a clip.", NO_CLIP, ""),
    ("ppo", "The clipped ratio (PPO, DAPO's clip-higher, dual clip).", replace(CLIPPED, dual_clip=True), ""),
    ("cispo", "The clipped ratio as a weight: clipped tokens keep their gradient.", CLIPPED, ""),
    ("gspo", "The clipped ratio of a sequence, by geometric mean.", replace(CLIPPED, credit="weighted"), ""),
    ("luspo", "GSPO without its division by length.", replace(CLIPPED, credit="weighted"), ""),
    ("gmpo", "The geometric mean of clipped ratios.", replace(CLIPPED, credit="completion"), ""),
    ("sapo", "A soft gate of the ratio in place of a clip.", replace(NO_CLIP, idle="gate"), "SapoParams"),
    ("vespo", "A smooth weight by a sequence's ratio.", replace(MASKED, idle="phi", credit="weighted"), "VespoParams"),
    ("dppo_tv", "Leaves out tokens whose probability has moved far.", MASKED, "DppoTvParams"),
    ("dppo_kl", "The same by the KL divergence of (p, 1 - p).", MASKED, "DppoKlParams"),
    ("m2po", "Leaves out the fewest tokens that bound the mean squared log-ratio.", MASKED, "M2poParams"),
    ("dro", "log p times the advantage, less a squared log-ratio.", replace(NO_CLIP, idle="penalty"), "DroParams"),
    ("likelihood", "log p times the advantage, without a ratio; used by [sft].", NO_CLIP, ""),
)
OTHER_ENGINE = "nothing was sampled by engine pytorch"
MEANINGS = {
    "engine_prompt_reuse": "Share of prompt tokens whose keys and values were cached, from the group's prompt or an "
    "earlier turn.",
    "engine_rows_put_aside": "Preemptions of running completions because the keys and values of all did not fit.",
    "engine_live_rows_mean": "Completions decoded together, mean over decoding steps.",
}
NO_ROUTERS = "nothing was trained, or the model has no experts whose choice can be measured"
LOADS = {
    "expert_load_entropy": "Entropy of the shares of tokens that experts get, over ln(experts), mean over layers: 1 = "
    "all get the same.",
    "expert_load_max": "Largest share of tokens that one expert of any layer gets, times the number of experts: 1 = "
    "even; minus 1 it is MaxVio.",
    "expert_mismatch_rate": "Share of sampled tokens for which any layer chose other experts in sampling than in the "
    "first update.",
    "expert_unused_frac": "Share of experts that no token of the step was sent to, over all layers.",
}
METRICS = [
    MetricSpec(name=name, meaning=meaning, absent=absent)
    for meanings, absent in ((MEANINGS, OTHER_ENGINE), (LOADS, NO_ROUTERS))
    for name, meaning in meanings.items()
]
BUILTIN_MODELS = {"tiny": Path(__file__).parent / "tiny"}


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    default = TableTraits(extends=True, defaults={"backend": "local"})
    register(PluginSpec(name="backend", summary="The default backend.", factory=None, traits=default))
    for name, keys in (("model", "ModelKeys"), ("lora", "LoraKeys")):
        factory, extends = f"retrain_local.options:{keys}", TableTraits(extends=True)
        register(PluginSpec(name=name, summary="Keys of backend local.", factory=factory, traits=extends))


@hookimpl
def retrain_register_backends(register: Callable[[PluginSpec], None]) -> None:
    register(
        PluginSpec(
            name="local",
            summary="PyTorch on the CPU or on CUDA GPUs: in this process, on split devices that sample and train at "
            "once, or in one process for each device.",
            factory="retrain_local.factory:create_backend",
            params="retrain_local.options:LocalOptions",
            traits=CAPABILITIES,
            functions=BackendFunctions(
                find_devices=find_devices,
                estimate_memory="retrain_local.planning:estimate_memory",
                evaluate_loss="retrain_local.training.step_loss:evaluate_loss",
                export_model="retrain_local.export.write:export_model",
                models={f"builtin:{name}": folder for name, folder in BUILTIN_MODELS.items()},
            ),
        )
    )


def find_devices(config: Config) -> tuple[str, str] | None:
    if "gpu" not in config.backend.devices:
        return None  # without importing PyTorch
    from retrain_local.devices.torch_devices import find_devices as examined

    return examined(config)


@hookimpl
def retrain_register_inference_engines(register: Callable[[PluginSpec], None]) -> None:
    register(
        PluginSpec(
            name="pytorch",
            summary="Batched sampling in this process from the very weights that are trained.",
            factory="retrain_local.sampling.engine:create_engine",
            traits=EngineTraits(
                determinism=Determinism.SAME_MACHINE,
                provides_entropy=True,
                honours=frozenset({"attention_kernel", "dtype", "kv_cache_dtype"}),
                open_teacher="retrain_local.teacher:open_teacher",
                teaches_at_any_temperature=True,
            ),
        )
    )


@hookimpl
def retrain_register_losses(register: Callable[[PluginSpec], None]) -> None:
    for name, summary, traits, params in LOSSES:
        factory = f"retrain_local.training.loss_formulas:{name.upper()}"
        model = f"retrain_local.options:{params}" if params else None
        register(PluginSpec(name=name, summary=summary, factory=factory, traits=traits, params=model))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    return METRICS


@hookimpl
def retrain_register_init_templates(register: Callable[[PluginSpec], None]) -> None:
    for name, summary in (
        ("tiny", "The built-in tiny model learns two-digit arithmetic on a CPU in about a minute."),
        ("smollm2", "A real model of 135 M parameters, SmolLM2, learns small sums on a CPU."),
    ):
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_local.templates:{name.upper()}"))


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins, will_run: bool) -> list[Problem]:
    from retrain_local.checks import config_problems

    return config_problems(config, plugins, will_run=will_run)


@hookimpl
def retrain_explain(config: Config) -> dict[str, str]:
    if config.backend.backend != "local":
        return {}
    from retrain_local.memory.sizes import AUTO_DTYPE
    from retrain_local.options import ModelKeys  # imports pydantic, as `retrain --help` must not

    dtype = config.table("model", ModelKeys).dtype
    auto = f"auto: {AUTO_DTYPE['cpu']} on a CPU, {AUTO_DTYPE['cuda']} on a GPU"
    return {"model_dtype": auto if dtype == "auto" else dtype}


@hookimpl
def retrain_diagnose(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    from retrain_local.doctor import diagnose

    return diagnose(config, plugins)
