"""Registers backend `prime_rl`, and the command that writes PRIME-RL's own files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from retrain.api import Capabilities, CheckpointMode, Determinism, MetricSpec, PluginSpec, hookimpl

if TYPE_CHECKING:
    from retrain.api import Config, Plugins, Problem

NAME = "prime_rl"
# The loss stays with the trainer. On a resume the trainer continues from its own state: no weights are sent back to it.
CAPABILITIES = Capabilities(
    reports_sync_loss=False,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.ADAPTER_ONLY,
    determinism=Determinism.NONE,
    provides_entropy=False,
    losses=frozenset(),  # its trainer's own file says which
    all_weights=True,  # unless that file has [model.lora]
)

LOSS = (
    "the trainer's own: rho A, without tokens whose probability has moved by more than 0.2 the way of A (DPPO), plus "
    "0.001 times the squared log-ratio, over the tokens of the step, unless [loss] in its file says otherwise"
)
ABSENT = "without the backend prime_rl; on a step that sent nothing"
METRICS = (
    ("prime_rl_enqueue_time_s", "Packing and sending the rows; no training.", "s"),
    ("prime_rl_sync_time_s", "Waiting for the weights of the step; no training either.", "s"),
    ("prime_rl_step", "Number of the step on the wire.", ""),
    ("prime_rl_policy_lag", "Steps sent that are not in the newest weights.", "steps"),
    ("prime_rl_stale_steps", "Steps so far whose weights did not arrive in time.", "steps"),
)


@hookimpl
def retrain_register_backends(register: Callable[[PluginSpec], None]) -> None:
    register(
        PluginSpec(
            name=NAME,
            summary="A PRIME-RL trainer and its inference server; this process is their orchestrator.",
            factory="retrain_prime_rl.backend:create_backend",
            params="retrain_prime_rl.options:PrimeRlOptions",
            traits=CAPABILITIES,
        )
    )


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    summary = "Write PRIME-RL's trainer.toml and inference.toml for a run, and the commands that start them."
    register(PluginSpec(name="prime-rl-config", summary=summary, factory="retrain_prime_rl.config_files:command"))


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> list[Problem]:
    if config.backend.backend != NAME:
        return []
    from pydantic import ValidationError

    from retrain_prime_rl.options import PrimeRlOptions, problems_of

    try:
        options = PrimeRlOptions.model_validate(config.backend.options)
    except ValidationError:
        return []  # reported by the kernel
    return problems_of(config, plugins, options)


@hookimpl
def retrain_explain(config: Config) -> dict[str, str]:
    if config.backend.backend != NAME:
        return {}
    return {"prime_rl_loss": LOSS, "prime_rl_trainer": _trainer(config.backend.options)}


def _trainer(options: Mapping[str, Any]) -> str:
    """Return keys of the trainer's TOML, from options that may not have been checked yet."""
    transport = options.get("transport", "filesystem")
    socket = f", port = {options.get('zmq_port', 5555)}" if transport == "zmq" else ""
    return (
        f'[rollout_transport] type = "{transport}"{socket} (its own default is zmq); [weight_broadcast] type = '
        f'"filesystem"; output_dir and [model] seq_len as here; no max_steps, since a step without credit is not sent'
    )


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    return [MetricSpec(name=name, meaning=meaning, unit=unit, absent=ABSENT) for name, meaning, unit in METRICS]
