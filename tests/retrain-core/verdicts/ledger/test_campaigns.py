"""Which campaign of the ledger lies in a folder."""

import json
from types import SimpleNamespace

import pytest

from retrain.verdicts.ledger.campaigns import find_campaign
from retrain.verdicts.ledger.history import History, RunHistory


def opening(line, plan, **fields):
    return {"line": line, "plan": plan, "time": f"2026-03-0{line}", **fields}


OLD = [opening(1, "p1"), opening(2, "p2"), opening(3, "", continued=True)]


@pytest.fixture
def found_as(tmp_path):
    """`found_as("p2", {"old": [...]}, [("old", 1)])`: the campaign in `new` with this plan and these runs."""

    def find(plan, campaigns, heads=()):
        (tmp_path / "new").mkdir()
        (tmp_path / "new/manifest.json").write_text(json.dumps({"plan": {"sha256": plan}} if plan else {}))
        history = History(folder=tmp_path, campaigns=campaigns)
        known = [RunHistory(name=f"{name}/runs/r", started="t", first={}, opening=number) for name, number in heads]
        present = [SimpleNamespace(known=each) for each in (*known, None)]
        found = find_campaign(history, tmp_path / "new", present)
        lines = [each and each["line"] for each in (found.opening, found.last)]
        return (*lines, set(found.keys))

    return find


NEW = [opening(4, "p2"), opening(5, "p3")]
MOVED = [opening(6, "", continued=True)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("", {"old": OLD}), (None, None, {("new", 0)})),
        (("p4", {"old": OLD}), (None, None, {("new", 0)})),
        (("p1", {"old": OLD}), (1, 3, {("old", 1)})),
        (("p2", {"old": OLD}), (2, 3, {("old", 2)})),
        (("p2", {"old": OLD, "new": MOVED}), (2, 6, {("old", 2), ("new", 0)})),
        (("p1", {"old": OLD, "new": NEW}), (5, 5, {("new", 2)})),
        (("p1", {"old": OLD, "new": NEW}, [("new", 1)]), (4, 5, {("new", 1)})),
        (("p1", {"old": OLD, "new": NEW}, [("new", 1), ("old", 2), ("old", 2)]), (2, 3, {("old", 2)})),
        (("p1", {"old": OLD, "new": NEW}, [("old", 2), ("new", 2)]), (5, 5, {("new", 2)})),
        (("p1", {"old": OLD}, [("old", 0), ("old", 4)]), (1, 3, {("old", 1)})),
        (("p1", {"old": OLD}, [("old", 3)]), (1, 3, {("old", 1)})),
    ],
)
def test_a_campaign_is_known_by_most_runs_then_by_name_then_by_plan(found_as, given, expected):
    assert found_as(*given) == expected
