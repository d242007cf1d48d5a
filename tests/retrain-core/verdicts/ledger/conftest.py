"""Campaigns as they lie on disk after their sessions, with the ledger that these wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, cast

import pytest

from retrain.campaign.manifest import CampaignRecord
from retrain.campaign.report_lines import Lines
from retrain.kernel.contracts.views import RunView
from retrain.records.files import seal_of
from retrain.verdicts.ledger.chain import begin, end

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
PLAN = {
    "hypothesis": "maxrl+none ends above grpo+none",
    "primary_metric": "eval_correct_rate:final",
    "alpha": 0.05,
    "stop_rule": "all seeds to the end",
    "baseline": "grpo+none",
    "direction": "higher",
    "conditions": ["grpo+none", "maxrl+none"],
    "seeds": [1, 2],
    "max_steps": 10,
    "written": "2026-03-01T12:00:00+00:00",
}


@pytest.fixture
def recorded() -> Callable[..., Path]:
    """`recorded(run, **fields)`: a run whose `run.json` has these fields, begun and ended as the hooks see it."""

    def record(run: Path, error: BaseException | None = None, **fields: Any) -> Path:
        manifest = json.loads((run / "run.json").read_text()) | fields
        (run / "run.json").write_text(json.dumps(manifest))
        view = RunView(
            config=cast(Any, None),
            condition=manifest["condition"],
            folder=run,
            seed=manifest["seed"],
            first_step=0,
            capabilities=cast(Any, None),
            manifest=manifest,
        )
        begin(view)
        end(view, error)
        return run

    return record


@pytest.fixture
def campaign(
    made: ModuleType, recorded: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`campaign("name")`: a campaign with a sealed plan, run to its end in `logs` of the current folder.

    `is_planned=False` leaves the plan out; `run` are fields of its `MadeRun`, all other arguments those of the plan.
    """
    monkeypatch.chdir(tmp_path)

    def build(
        name: str = "campaign_a",
        *,
        is_new: bool = False,
        started: str = made.STARTED,
        is_planned: bool = True,
        seeds: Sequence[int] = (1, 2),
        steps: int = 10,
        run: Mapping[str, Any] = NO_FIELDS,
        **planned: Any,
    ) -> Path:
        plan = {**PLAN, "seeds": list(seeds), "max_steps": steps, **planned}
        sealed = {**plan, "sha256": seal_of(plan)} if is_planned else None
        effects = {"grpo+none": 0.0, "maxrl+none": 0.1}
        folder: Path = made.write_campaign(
            Path("logs") / name, effects, seeds=seeds, steps=steps, plan=sealed, **{"eval_every": 5, **run}
        )
        content = json.loads((folder / "manifest.json").read_text())
        record = CampaignRecord(folder, Lines(4, parallel=False))
        record.opened(content, is_new=is_new, is_beyond_plan=False)
        for each in sorted((folder / "runs").iterdir()):
            record.attempt(each.name, 1, continues=False)
            recorded(each, started=started)
        record.ended("done", done=4, failed=0)
        return folder

    return build
