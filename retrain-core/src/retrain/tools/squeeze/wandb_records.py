"""The analysis as a wandb run of its own, `squeeze-analysis`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.text.secrets import hide, hide_text
from retrain.text.terminal_text import printable
from retrain.tools.squeeze.analysis import SqueezeAnalysis

LOG = logging.getLogger("retrain")
RUN_NAME = "squeeze-analysis"
VALUES = ("rank", "mean_variance", "min_variance", "max_variance")
MAX_REASON_CHARS = 300
FINISH_TIMEOUT_S = 300.0  # an unreachable server must not block a finished command for ever
# As for training runs, nothing is sent but what this module logs.
SETTINGS = {"x_disable_meta": True, "disable_git": True, "disable_code": True, "console": "off", "silent": True}


def record_analysis(analysis: SqueezeAnalysis, table: Mapping[str, Any], folder: Path) -> str:
    """Send the analysis to the `wandb_project` of `[logging]`, if one is set; returns the run's id, else "".

    A fault of wandb is logged and ends nothing.
    """
    if not table.get("wandb_project"):
        return ""
    try:
        return _record(analysis, table, folder)
    except Exception as error:  # no package, disk or server: the analysis itself is complete
        LOG.warning("The squeeze analysis is not in wandb: %s", _reason(error))
        return ""


def run_arguments(analysis: SqueezeAnalysis, table: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `wandb.init`."""
    own = [tag.strip() for tag in table.get("wandb_tags", "").split(",") if tag.strip()]
    rank = [] if analysis.recommended_rank is None else [f"rank-{analysis.recommended_rank}"]
    config: Mapping[str, Any] = hide({k: v for k, v in analysis.as_data().items() if k != "ranks"})
    return {
        "project": table["wandb_project"],
        "entity": table.get("wandb_entity") or None,
        "group": table.get("wandb_group") or None,
        "name": RUN_NAME,
        "job_type": "squeeze",
        "tags": list(dict.fromkeys([*own, "squeeze", *rank])),
        "dir": os.environ.get("WANDB_DIR") or str(folder),
        "config": dict(config),
    }


def _record(analysis: SqueezeAnalysis, wanted: Mapping[str, Any], folder: Path) -> str:
    import wandb

    run = _open(wandb, run_arguments(analysis, wanted, folder))
    rows = [[getattr(row, name) for name in VALUES] for row in analysis.rows]
    run.define_metric("squeeze/*", step_metric="squeeze/rank")
    for row in rows:
        run.log({f"squeeze/{name}": value for name, value in zip(VALUES, row, strict=True)})
    table = [[*row, row[0] == analysis.recommended_rank] for row in rows]
    run.log({"squeeze/variance_table": wandb.Table(columns=[*VALUES, "recommended"], data=table)})
    names = ("recommended_rank", "source_rank", "min_variance_retention", "num_layers")
    data = analysis.as_data()
    run.summary.update({f"squeeze/{name}": data[name] for name in names})
    run.finish()
    return str(run.id)


def _open(wandb: Any, arguments: Mapping[str, Any]) -> Any:
    """The run, offline if the server is unreachable."""
    settings: dict[str, Any] = dict(SETTINGS)
    if "WANDB_FINISH_TIMEOUT" not in os.environ:
        settings |= {"finish_timeout": FINISH_TIMEOUT_S, "finish_timeout_raises": True}
    if wandb.setup().settings.mode not in ("online", "shared"):
        return wandb.init(**arguments, settings=wandb.Settings(**settings))
    try:
        if not wandb.login(prompt=False, verify=False):
            raise ConnectionError("no API key; run `wandb login`, or set WANDB_API_KEY")
        return wandb.init(**arguments, settings=wandb.Settings(**settings))
    except Exception as error:  # no key, network or entity: keep the records on disk
        run = wandb.init(**arguments, mode="offline", settings=wandb.Settings(**settings))
        LOG.warning("wandb works offline (%s). Upload with: wandb sync %s", _reason(error), Path(run.dir).parent)
        return run


def _reason(error: Exception) -> str:
    return printable(" ".join(hide_text(f"{type(error).__name__}: {error}").split())[:MAX_REASON_CHARS])
