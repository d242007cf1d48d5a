"""One training session: folders checked, parts built, records opened, the loop run, the ending written down."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from retrain.config.resolved import Config
from retrain.credit.flow import CreditFlow
from retrain.loop.assemble import assemble
from retrain.loop.train import Trainer
from retrain.plugins.manager import Plugins
from retrain.records.folder import RunFolder, check_run_folder, open_run_folder
from retrain.records.manifest import build_manifest, config_toml
from retrain.records.secrets import hide_text
from retrain.seeding import Seeds
from retrain.types import Determinism

LOG = logging.getLogger("retrain")
SAME_SEED = {
    Determinism.EXACT: "the same seed gives the same run anywhere",
    Determinism.SAME_MACHINE: "the same seed gives the same run on this machine",
    Determinism.NONE: "with this backend the same seed does not give the same run",
}


def train(config: Config, plugins: Plugins, flow: CreditFlow) -> None:
    """Run a configuration that has no problems, to its end; `run.json` tells how it ended, whatever happens."""
    check_run_folder(config.logging.log_dir, config.backend.adapter_path, place=config.place("logging.log_dir"))
    seeds = Seeds.from_config(config.training.seed)
    parts = assemble(config, plugins, flow, seeds)
    try:
        LOG.info("Seed %d: %s", seeds.root, SAME_SEED[parts.backend.capabilities.determinism])
        folder = open_run_folder(config.logging.log_dir, config.backend.adapter_path)
        manifest = build_manifest(config, plugins, seed=seeds.root, condition=flow.condition)
        folder.write_manifest(manifest, config_toml(config, seed=seeds.root))
        for recorder in parts.recorders:
            recorder.start(manifest)
        with folder:
            _run(Trainer(parts, folder), folder, manifest)
    finally:
        parts.backend.close()


def _run(trainer: Trainer, folder: RunFolder, manifest: dict[str, Any]) -> None:
    status, reason = "failed", ""
    try:
        trainer.run()
        status = "done"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except BaseException as error:
        reason = hide_text(f"{type(error).__name__}: {error}")
        raise
    finally:
        ending = {"status": status, "ended": datetime.now(UTC).isoformat(timespec="seconds")}
        folder.rewrite_manifest(manifest | ending | ({"error": reason} if reason else {}))
