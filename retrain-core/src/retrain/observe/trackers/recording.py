"""Passes a run to its recorders, whose exceptions never stop training; the names of fields and keys in trackers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.resolve import build_part
from retrain.kernel.types import Kind
from retrain.observe.trackers.contract import Recorder, TrackerKeys
from retrain.records.reading import table_of
from retrain.run.fault_guard import FaultGuard
from retrain.text.secrets import redacted

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.views import RunView


STATE = "recorders"
OPTIONAL = frozenset({"state", "restore", "checkpoint"})


def recorder_names(config: Config) -> dict[str, str]:
    """The recorders of a configuration, each with the key that selects it; `wandb_project` selects `wandb`."""
    names = dict.fromkeys(config.logging.recorders, "logging.recorders")
    return ({"wandb": "logging.wandb_project"} if config.table("logging", TrackerKeys).wandb_project else {}) | names


def watch_run(context: PluginContext) -> Recorders:
    names = recorder_names(context.config)
    return Recorders({name: build_part(Kind.RECORDER, name, path, context) for name, path in names.items()})


class Recorders:
    """Every recorder by its name, in order; after a failed `start` it gets only `state` and `finish`."""

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self._recorders = dict(recorders)
        self._started: list[str] = []
        self._guard = FaultGuard("Recorder", "Training continues; its records have gaps.")

    @hookimpl
    def retrain_load_state(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.get(STATE, {}).items():
            if name in self._recorders:
                self._call(name, "restore", saved)

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        manifest = redacted(run.manifest)
        self._started = [name for name in self._recorders if self._call(name, "start", manifest, run.folder)]

    @hookimpl
    def retrain_step_end(self, metrics: Mapping[str, Any]) -> None:
        for name in self._started:
            self._call(name, "step", redacted(metrics))

    @hookimpl
    def retrain_save_state(self, name: str, folder: Path | None) -> dict[str, Any]:
        if folder is not None:
            for recorder in self._started:
                self._call(recorder, "checkpoint", folder, name)
            return {}
        methods = {name: getattr(recorder, "state", dict) for name, recorder in self._recorders.items()}
        states = {name: self._guard.state(name, method) for name, method in methods.items()}
        return {STATE: {name: state for name, state in states.items() if state}}

    @hookimpl
    def retrain_run_end(self, error: BaseException | None) -> None:
        for name in self._recorders:
            self._call(name, "finish", error)

    def _call(self, name: str, method: str, *arguments: Any) -> bool:
        """True if the call succeeded, or the recorder lacks an optional method."""
        recorder = self._recorders[name]
        if method in OPTIONAL and not hasattr(recorder, method):
            return True
        return self._guard.call(name, method, getattr(recorder, method), *arguments)[0]


class KeepsId:
    """A recorder whose run there has an id under the key `id_key` of checkpoints: a resumed session continues it."""

    id_key: str

    def __init__(self) -> None:
        self._run_id = ""

    def restore(self, state: Mapping[str, Any]) -> None:
        self._run_id = str(state.get(self.id_key) or "")

    def state(self) -> dict[str, str]:
        return {self.id_key: self._run_id} if self._run_id else {}


# Constant throughout a run, so they go into the tracker's configuration.
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
# Name in the tracker -> path of the value in `run.json`.
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
    found = {}
    for name, path in CONFIG_KEYS.items():
        *tables, key = path.split(".")
        found[name] = table_of(manifest, *tables).get(key)
    return {name: value for name, value in found.items() if value is not None}


def run_name(manifest: Mapping[str, Any]) -> str:
    return str(manifest["config"]["logging"]["wandb_run_name"] or manifest["condition"])


def require(library: str, *, where: str, needs: Sequence[str] = ()) -> None:
    """ConfigError if `library`, named like its extra, or a package in `needs` is not installed; imports nothing."""
    for package in (library, *needs):
        spec = find_spec(package)
        # Without an origin it is only a folder of that name, such as the one that wandb creates.
        if spec is None or spec.origin is None:
            from retrain.kernel.plugins.missing import install_line  # only the message needs it

            what = f"recorder {library!r} needs the package {package!r}, and it is not installed"
            fix = f"install it: {install_line('retrain-core', library)}"
            raise ConfigError(Problem(code="plugin.missing-package", where=where, what=what, fix=fix))
