"""`run.json` and `config.toml`: enough to run it again."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.plugins.installed import versions_of
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.records.reading import time_now
from retrain.text.secrets import hide, hide_arguments

LIBRARIES = (
    *("torch", "transformers", "peft", "numpy", "tokenizers", "datasets", "reasoning-gym", "verifiers"),
    *("pydantic", "pluggy"),
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # in how many parts a sum is added up

COMMIT_LINE, NO_COMMIT = "# branch.oid ", "(initial)"


def build_manifest(config: Config, plugins: Plugins, *, seed: int, condition: str) -> dict[str, Any]:
    """Return `run.json`: resolved config with origins, versions, commit, hardware and seed, without secrets."""
    distributions = {
        entry.owner.distribution: entry.owner.version for kind in Kind for entry in plugins.registered(kind)
    }
    return {
        "status": "running",
        "pid": os.getpid(),
        "started": time_now(),
        "condition": condition,
        "seed": seed,
        "config_file": config.source,
        "config_sha256": hashlib.sha256(config_toml(config, seed=seed).encode()).hexdigest(),
        "config": public_values(config),
        "origins": {path: str(origin) for path, origin in sorted(config.origins.items())},
        "distributions": dict(sorted(distributions.items())),
        "libraries": versions_of(LIBRARIES),
        "python": platform.python_version(),
        "git": _git_commit(Path(config.folder)),
        "hardware": {
            "machine": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
            "cores": os.cpu_count(),
            "cpu": _cpu(),
            "threads": {name: value for name in THREADS if (value := os.environ.get(name))},
        },
        "command": hide_arguments(sys.argv[1:]),
    }


def config_toml(config: Config, *, seed: int) -> str:
    """Return the resolved configuration as TOML that reproduces the run, with the seed that was used."""
    tables = public_values(config)
    tables["training"]["seed"] = seed
    if config.origin("reward.type") == DEFAULT_ORIGIN:
        # Written out, it would replace the data source's verifier.
        tables.get("reward", {}).pop("type", None)
    return tomli_w.dumps({name: table for name, table in tables.items() if table})


def public_values(config: Config) -> dict[str, dict[str, Any]]:
    """Return `recorded_values` without keys, tokens or logins in URLs."""
    hidden: dict[str, dict[str, Any]] = hide(recorded_values(config))
    return hidden


def recorded_values(config: Config) -> dict[str, dict[str, Any]]:
    """Return every table as plain data, secrets included, with paths as the user wrote them.

    `[resume]` and `[campaign]` are omitted: with them a `config.toml` would continue this run, or start many.
    """
    left_out = {*config.foreign_tables, "resume"}
    tables = {name: table for name, table in config.as_dict().items() if name not in left_out}
    for path, value in config.written.items():
        table, _, name = path.partition(".")
        if table in tables:
            tables[table][name] = value
    return tables


def _cpu() -> str:
    """Return the processor's name; kernels that depend on it round differently."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _git_commit(folder: Path) -> dict[str, Any]:
    """Return the commit of the folder, and whether it has uncommitted changes; empty outside git."""
    # Comparing with the upstream branch takes seconds in a large repository.
    command = ["git", "status", "--porcelain=v2", "--branch", "--no-ahead-behind"]
    try:
        status = subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True, cwd=folder
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return {}
    heads = [line.removeprefix(COMMIT_LINE) for line in status if line.startswith(COMMIT_LINE)]
    if not heads or heads[0] == NO_COMMIT:
        return {}
    dirty = any(not line.startswith("#") for line in status)
    return {"commit": heads[0], "dirty": dirty, "folder": folder.absolute().name}
