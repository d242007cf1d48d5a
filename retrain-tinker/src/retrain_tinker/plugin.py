"""Registers the backend `tinker` and the download of adapters from `tinker://` paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.api import BackendFunctions, Capabilities, CheckpointMode, Determinism, PluginSpec, hookimpl

if TYPE_CHECKING:
    from retrain.api import Config, Problem

NAME = "tinker"
CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.NONE,
    provides_entropy=False,
    losses=frozenset({"importance_sampling", "ppo", "cispo", "dro", "likelihood"}),
    loss_keys=frozenset({"aggregation", "is_bounds", "off_policy_mask"}),
    regularisers=frozenset({"kl_reward"}),
)


@hookimpl
def retrain_register_backends(register: Callable[[PluginSpec], None]) -> None:
    register(
        PluginSpec(
            name=NAME,
            summary="LoRA training and sampling on a Tinker service: the hosted one or SkyRL-tx.",
            factory="retrain_tinker.backend:create_backend",
            params="retrain_tinker.options:TinkerOptions",
            traits=CAPABILITIES,
            functions=BackendFunctions(fetch_adapter="retrain_tinker.adapter:fetch_adapter"),
        )
    )


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    if config.backend.backend != NAME:
        return []
    from retrain_tinker.options import problems_of

    return problems_of(config)
