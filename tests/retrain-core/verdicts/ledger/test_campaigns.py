"""Which campaign of the ledger lies in a folder, and what of it contradicts its plan."""

import json
from types import SimpleNamespace

import pytest

from retrain.verdicts.ledger.campaigns import cells_of, check_campaign, find_campaign, not_given, run_before
from retrain.verdicts.ledger.disk import RunOnDisk
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


# Words that tell findings apart.
MARKS = {"resealed", "not define", "not list", "was run as", "second campaign", "by --new", "the same plan"}
MARKS |= {"same folder", "in old", "in single", "earlier campaign", "already run", "run again", "it is gone", "unknown"}
OPENED = {"line": 5, "plan": "p", "question": "q", "content": "c", "cells": cells_of({})}
SECOND, GONE, EARLIER, AGAIN = "second campaign", "it is gone", "already run", "run again"


def run(name="old/runs/r", line=9, *, seed="1", opening=1, steps=3, learns="x"):
    """A run on record; `steps=None`: it has not ended."""
    first = {"condition": "a", "seed": seed, "learns": learns}
    ended = None if steps is None else {"state": "done", "steps": steps}
    return RunHistory(name=name, started=f"t{line}", first=first, opening=opening, line=line, ended=ended)


def on_disk(known, name="", seed="1", started="t"):
    manifest = {"condition": "a", "seed": seed, "started": started}
    return RunOnDisk(name=name, folder=None, manifest=manifest, hashes={}, known=known)


SINGLE, PILOT = run("single", opening=0), [run("new/runs/s", line, opening=0) for line in (3, 8)]
OWN_SEEDS = [run("new/runs/s", 8, seed="2"), run("new/runs/t", 8, learns="")]
THREE = [opening(1, "p1"), opening(2, ""), opening(3, "p3"), opening(6, "", continued=True)]


@pytest.mark.parametrize(
    ("expected", "old", "runs", "given"),
    [
        ([{"in old", EARLIER, GONE}], [], [run(line=4), run("old/runs/s", 6)], {}),
        ([{"in old", AGAIN, GONE, "?"}], [], [run(line=5)], {}),
        *[([{"in old", AGAIN, GONE}], THREE, [run(opening=each)], {}) for each in (1, 3)],
        *[([{"in old", AGAIN, GONE, "?"}], THREE, [run(opening=each)], {}) for each in (0, 2, 4)],
        *[([{"in old", AGAIN, GONE, "?"}], [], [run(steps=each)], {}) for each in (None, 1)],
        ([], [], [run(steps=0), run(line=8, learns="y"), run(line=7, seed="2")], {}),
        ([], [], [run(learns=""), *OWN_SEEDS], {}),
        ([{"in old", AGAIN, GONE, "?"}], [], [run(seed="2"), *OWN_SEEDS], {}),
        ([{"in single", AGAIN, GONE, "?"}], [], [SINGLE], {}),
        ([{"in single", AGAIN, "?"}], [], [SINGLE, run("new", 8, opening=0)], {}),
        ([{"earlier campaign", "same folder", EARLIER}], [], PILOT[:1], {}),
        ([{SECOND, "the same plan", GONE}], [{**OPENED, "line": 2}], [run(line=3)], {}),
        ([{SECOND, "the same plan", GONE, "by --new"}], [{**OPENED, "line": 2, "new": True}], [], {}),
        ([{SECOND, "the same plan", GONE, "by --new"}], [{**OPENED, "line": 2}], [], {"new": True}),
        ([], [{**OPENED, "line": 2, "question": "other"}], [], {}),
        ([], [{"line": 2}], [], {"question": "", "content": "", "now": ""}),
        ([{SECOND, GONE}], [{**OPENED, "line": 2}], [], {"question": ""}),
        ([{"resealed"}], [], [], {"plan": "p2"}),
        ([{"not define"}], [], [], {"now": "d"}),
        ([], [], [], {"now": ""}),
        ([{"not define"}], [], [], {"definition": {"a": 1}}),
        ([{"not list"}], [], [], {"cells": "other"}),
        ([{"was run as"}], [], [], {"present": SINGLE}),
        ([{"unknown", "?"}], [], [], {"line": 0, "present": SINGLE}),
        ([], [], [], {"line": 0}),
        ([{"in old", EARLIER, GONE}, {"unknown", "?"}], [], [run()], {"line": 0, "present": SINGLE}),
        ([{"in old", AGAIN, GONE, "?"}], [], [run(line=5), *PILOT], {"line": 0}),
    ],
)
def test_everything_that_contradicts_a_plan_is_found(expected, old, runs, given, tmp_path):
    """The campaign is in `new`, on record from line 5 on if at all; `?` is a finding that is not certain."""
    opened = {**OPENED, **given}
    manifest = {"plan": {"sha256": "p"}, "sha256": opened.get("now", opened["content"])}
    own = [run("new/runs/r", 7)] if opened["line"] else []
    present = [on_disk(each) for each in [*own, *([given["present"]] if "present" in given else [])] or [None]]
    (tmp_path / "new").mkdir()
    (tmp_path / "new/manifest.json").write_text(json.dumps(manifest))
    if "definition" in given:
        (tmp_path / "new/campaign.json").write_text(json.dumps(given["definition"]))
    history = History(folder=tmp_path, num_lines=10, campaigns={"old": old} | ({"new": [opened]} if own else {}))
    every = [*runs, *(each.known for each in present if each.known)]
    history.runs = {(each.name, each.started): each for each in every}
    found = check_campaign(history, find_campaign(history, tmp_path / "new", present), present)
    marks = [({mark for mark in MARKS if mark in each.what}, set() if each.is_certain else {"?"}) for each in found]
    assert [words | certainty for words, certainty in marks] == expected


def test_an_earlier_run_in_no_ledger_is_named_if_older_than_the_campaign(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    history = History(folder=tmp_path.parent, campaigns={tmp_path.name: [opening(5, "")]})
    found = find_campaign(history, tmp_path, [])
    times = ("2026-03-04", "2026-03-05", "2026-03-06")
    unknown = [on_disk(None, f"seed{seed}_{time}", seed, time) for seed in "12" for time in times]
    (named,) = run_before(found, [on_disk(None)], unknown)
    assert named.is_certain
    assert [each.name for each in unknown if each.name in named.what] == ["seed1_2026-03-04"]


def test_finished_runs_of_the_same_conditions_that_were_not_given_are_named(tmp_path):
    given, *others = [run(f"{number}{steps}", seed=str(number)) for number, steps in enumerate("abcd")]
    others[1].ended = {"state": "failed"}
    others[2].first["learns"] = "y"
    history = History(folder=tmp_path, runs={(each.name, ""): each for each in (given, *others)})
    (finding,) = not_given(history, [on_disk(given)])
    assert not finding.is_certain
    assert [each.name for each in (given, *others) if each.name in finding.what] == ["1b"]
    assert not_given(history, [on_disk(given), on_disk(others[0])]) == []
