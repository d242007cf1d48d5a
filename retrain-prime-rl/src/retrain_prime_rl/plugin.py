"""What this distribution registers: backend `prime_rl`."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import ValidationError

from retrain.api import (
    Capabilities,
    CheckpointMode,
    Config,
    Determinism,
    Plugins,
    PluginSpec,
    Problem,
    hookimpl,
)
from retrain_prime_rl import checks
from retrain_prime_rl.options import PrimeRlOptions

NAME = "prime_rl"
# The loss stays with the trainer. On a resume the trainer goes on from where it is: no weights are brought back to it.
CAPABILITIES = Capabilities(
    reports_sync_loss=False,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.ADAPTER_ONLY,
    determinism=Determinism.NONE,
    provides_entropy=False,
)


@hookimpl
def retrain_register_backends(register: Callable[[PluginSpec], None]) -> None:
    register(
        PluginSpec(
            name=NAME,
            summary="A PRIME-RL trainer and its inference server; this process is their orchestrator.",
            factory="retrain_prime_rl.create:create_backend",
            params=PrimeRlOptions,
            traits=CAPABILITIES,
        )
    )


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> list[Problem]:
    if config.backend.backend != NAME:
        return []
    try:
        options = PrimeRlOptions.model_validate(config.backend.options)
    except ValidationError:
        return []  # the kernel tells of it
    return checks.problems_of(config, plugins, options)
