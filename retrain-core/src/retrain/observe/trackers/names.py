"""The names of metrics, configuration keys and runs in other trackers, and the check that a library is installed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from retrain.kernel.errors import ConfigError, Problem

# Constant throughout a run, so they go into the configuration there.
CONSTANTS = frozenset({"algorithm_mode", "advantage_mode", "transform_mode", "condition"})
# Parts of `run.json` that say what made the run.
PROVENANCE = ("config", "distributions", "libraries", "python", "git", "hardware", "command")
_PATTERNS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"(exec|plan)_(entropy|surprisal|uncertainty)_(mean|var)", r"train/\2/\1_\3"),
        (r"post_(exec|plan)_(entropy|surprisal|uncertainty)_(mean|var)", r"train/\2/post_\1_\3"),
        (r"(mean_reward|correct_rate|running_correct_rate|shadow_\w+)", r"train/rewards/\1"),
        (r"reward_((?:tie|uniform|unique)_\w+|p\d+)", r"train/rewards/\1"),
        (r"backend_(reports_sync_loss|preserves_token_advantages)", r"train/backend/\1"),
        (r"bp_(\w+)", r"train/backpressure/\1"),
        (r"eval_(\w+)", r"eval/\1"),
    )
)
# Name there -> path of the value in `run.json`.
CONFIG_KEYS = {
    "algorithm_mode": "config.algorithm.algorithm_mode",
    "advantage_mode": "config.algorithm.advantage_mode",
    "transform_mode": "config.algorithm.transform_mode",
    "uncertainty_kind": "config.algorithm.uncertainty_kind",
    "condition": "condition",
    "model": "config.model.model",
    "lora_rank": "config.model.lora_rank",
    "lr": "config.training.lr",
    "batch_size": "config.training.batch_size",
    "group_size": "config.training.group_size",
    "max_tokens": "config.training.max_tokens",
    "temperature": "config.training.temperature",
    "gtpo_beta": "config.gtpo.beta",
    "hicra_alpha": "config.hicra.alpha",
    "sepa_steps": "config.sepa.steps",
    "sepa_delay_steps": "config.sepa.delay_steps",
    "sepa_correct_rate_gate": "config.sepa.correct_rate_gate",
    "max_steps": "config.training.max_steps",
    "backend": "config.backend.backend",
    "seed": "seed",
}


def metric_name(field: str) -> str:
    """Name of one field of `metrics.jsonl`: `mean_reward` -> `train/rewards/mean_reward`; `train/FIELD` unless listed.

    No two fields share a name.
    """
    for pattern, name in _PATTERNS:
        match = pattern.fullmatch(field)
        if match:
            return match.expand(name)
    return f"train/{field}"


def named_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A line of `metrics.jsonl` under the trackers' names, without `step`, `CONSTANTS` and null fields."""
    return {
        metric_name(field): value
        for field, value in metrics.items()
        if field != "step" and field not in CONSTANTS and value is not None
    }


def named_config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration under flat names, from the content of `run.json`; keys of tables not installed are left out."""
    found = {name: _look_up(manifest, path) for name, path in CONFIG_KEYS.items()}
    return {name: value for name, value in found.items() if value is not None}


def run_name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["config"]["logging"]["wandb_run_name"] or manifest["condition"])


def require(library: str, *, where: str, needs: Sequence[str] = ()) -> None:
    """ConfigError if `library`, named like its extra, or a package in `needs` is not installed; imports nothing."""
    for package in (library, *needs):
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # no origin: only a folder of that name, such as wandb creates
            what = f"recorder {library!r} needs the package {package!r}, which is not installed"
            from retrain.kernel.plugins.missing import install_line  # only the message needs it

            raise ConfigError(Problem(where=where, what=what, fix=install_line("retrain-core", library)))


def _look_up(content: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(content, Mapping):
            return None
        content = content.get(part)
    return content
