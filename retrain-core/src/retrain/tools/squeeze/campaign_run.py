"""Squeeze inside a campaign: the adapter of a finished run, by the campaign's `[squeeze]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.records.run import Run
from retrain.tools.squeeze.job import auto_squeeze
from retrain.tools.squeeze.table import SqueezeTable


def squeeze_run(config: Config, run: Path, campaign: Path) -> dict[str, Any]:
    """`auto_squeeze` on the newest checkpoint of `run`; `adapter_path` in `[squeeze]` takes precedence."""
    settings = config.table("squeeze", SqueezeTable)
    adapter = settings.adapter_path or Run(run).adapters
    return auto_squeeze(adapter, settings, campaign, wandb=config.as_dict()["logging"])
