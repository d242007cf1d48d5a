"""Campaigns as they lie on disk after their sessions, with the ledger that these wrote."""

import json
from pathlib import Path
from types import MappingProxyType

import pytest

from retrain.campaign.manifest import CampaignRecord
from retrain.campaign.report_lines import Lines
from retrain.records.files import seal_of
from tests.kit.ledgers import recorded
from tests.kit.made_runs import STARTED, WRITTEN, write_campaign

NO_FIELDS = MappingProxyType({})
EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}
PLAN = {"hypothesis": "maxrl+none ends above grpo+none", "primary_metric": "eval_correct_rate:final", "alpha": 0.05}
PLAN |= {"stop_rule": "all seeds to the end", "baseline": "grpo+none", "direction": "higher"}
PLAN |= {"conditions": list(EFFECTS), "written": WRITTEN}


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """`campaign("name")`: a campaign with a sealed plan, run to its end in `logs` of the current folder.

    `is_planned=False` leaves the plan out; `run` are fields of its `MadeRun`, all other arguments those of the plan.
    """
    monkeypatch.chdir(tmp_path)

    def build(
        name="campaign_a",
        *,
        is_new=False,
        started=STARTED,
        is_planned=True,
        seeds=(1, 2),
        steps=10,
        run=NO_FIELDS,
        **planned,
    ):
        plan = {**PLAN, "seeds": list(seeds), "max_steps": steps, **planned}
        sealed = {**plan, "sha256": seal_of(plan)} if is_planned else None
        fields = {"seeds": seeds, "steps": steps, "plan": sealed, "eval_every": 5, **run}
        folder = write_campaign(Path("logs") / name, EFFECTS, **fields)
        record = CampaignRecord(folder, Lines(4, parallel=False))
        record.opened(json.loads((folder / "manifest.json").read_text()), is_new=is_new, is_beyond_plan=False)
        for each in sorted((folder / "runs").iterdir()):
            record.attempt(each.name, 1, continues=False)
            recorded(each, started=started)
        record.ended("done", done=4, failed=0)
        return folder

    return build
