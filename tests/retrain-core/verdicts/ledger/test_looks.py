"""Looks: which count as one, whose they are, and which unfinished campaigns a command puts on record."""

import json
import shutil
from pathlib import Path

import pytest

from retrain.verdicts.ledger.chain import NAME, append
from retrain.verdicts.ledger.history import History, read_chain
from retrain.verdicts.ledger.looks import InterimLooks, Looks, campaign_of, looks_in
from tests.kit.made_runs import MadeRun, write_campaign, write_run

LOOK = {"campaign": "c", "runs": ["c/runs/a", "c/runs/b"], "metric": "m:final", "alpha": 0.05, "data": "d1"}
LOOK |= {"seeds": {"a": [1, 2, 3], "b": [1, 2]}}
BY = {"campaign": "c", "by": "status", "seeds": {"a": [1]}}


def history(*looks):
    return History(folder=Path("logs"), looks=list(looks))


@pytest.mark.parametrize(
    ("asked", "is_found"),
    [
        ({}, False),
        ({"campaigns": ["c"]}, True),
        ({"campaigns": ["d"]}, False),
        ({"runs": ["c/runs/b", "x"]}, True),
        ({"runs": ["x"]}, False),
        ({"data": "d1"}, True),
        ({"data": "d2"}, False),
    ],
)
def test_a_look_is_found_by_its_campaign_a_run_or_its_records(asked, is_found):
    assert len(looks_in(history(LOOK), **asked).looks) == is_found
    assert looks_in(history({"runs": "damaged"}), **asked) == Looks()


def test_looks_count_once_by_what_they_saw_and_chose():
    other = [LOOK | {"alpha": 0.01}, LOOK | {"data": "d2"}, LOOK | {"metric": "n"}]
    same = [LOOK | {"campaign": "c", "runs": []}, BY | {"data": "d3"}]
    found = looks_in(history(LOOK, BY, *same, *other, BY | {"seeds": {"a": [2]}}, BY | {"by": "top"}), campaigns=["c"])
    assert [(each.by, each.metric, each.data, each.num_seeds) for each in found.looks] == [
        ("", "m:final", "d1", 2),
        ("status", "", "", 1),
        ("", "m:final", "d1", 2),
        ("", "m:final", "d2", 2),
        ("", "n", "d1", 2),
        ("status", "", "", 1),
        ("top", "", "", 1),
    ]
    assert (found.metrics, found.num_choices) == (("m:final", "n"), 3)
    assert dict(found.looks[0].seeds) == {"a": (1, 2, 3), "b": (1, 2)}
    assert looks_in(history(LOOK | {"seeds": {}}), campaigns=["c"]).looks[0].num_seeds == 0


def recorded_looks(folder):
    lines = [entry.record for entry in read_chain(folder / NAME)]
    return [{name: line.get(name) for name in ("campaign", "by", "seeds")} for line in lines if line["kind"] == "look"]


def test_an_unfinished_campaign_is_put_on_record_with_the_seeds_that_are_done(tmp_path):
    states = {("a+none", 2): "stopped"}
    folder = write_campaign(tmp_path / "c", {"a+none": 0.0, "b+none": 0.0}, seeds=[1, 2], steps=4, states=states)
    (not_begun,) = (folder / "runs").glob("b*1")
    shutil.rmtree(not_begun)
    expected = {"campaign": "c", "by": "status", "seeds": {"a+none": [1], "b+none": [2]}}
    said: list[str] = []
    looks = InterimLooks("status", said.append)
    looks.at([tmp_path, tmp_path / "c", tmp_path / "c/runs/a-none_s1"])
    assert (recorded_looks(tmp_path), said) == ([expected], [])
    (tmp_path / NAME).unlink()
    looks.at([tmp_path / "c"])
    assert recorded_looks(tmp_path) == [], "one command records it once"
    InterimLooks("status").at([tmp_path / "c"])
    append(tmp_path, "verdict", campaign="c")
    InterimLooks("status").at([tmp_path / "c"])
    InterimLooks("top").at([tmp_path / "c"])
    assert recorded_looks(tmp_path) == [expected, expected | {"by": "top"}]
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-1])  # a kill tore the last line: it will be removed
    InterimLooks("top").at([tmp_path / "c"])
    assert recorded_looks(tmp_path) == [expected, expected | {"by": "top"}]
    assert (tmp_path / NAME).read_bytes().endswith(b"}\n")
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    InterimLooks("status", said.append).at([tmp_path / "c"])
    assert len(said) == 1


@pytest.mark.parametrize("steps", [0, 4])
def test_a_campaign_that_is_done_or_has_no_step_is_no_interim_look(tmp_path, steps):
    folder = write_campaign(tmp_path / "c", {"a+none": 0.0}, seeds=[1], steps=4)
    if not steps:
        (run,) = (folder / "runs").iterdir()
        (run / "metrics.jsonl").write_text("")
        (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"status": "failed"}))
    InterimLooks("status").at([folder])
    assert recorded_looks(tmp_path) == []


def test_a_path_up_to_a_file_of_a_checkpoint_is_its_campaigns(tmp_path):
    folder = write_campaign(tmp_path / "c", {"a+none": 0.0}, seeds=[1], steps=1)
    assert campaign_of(folder) == folder
    assert campaign_of(folder / "runs/r/adapter/checkpoint/file") == folder
    assert campaign_of(folder / "runs/r/adapter/checkpoint/folder/file") is None
    assert campaign_of(tmp_path) is None
    run = write_run(folder / "runs/own", MadeRun(steps=1))
    (run / "manifest.json").write_text("{}")
    assert campaign_of(run) == folder, "a run with such a file is no campaign"
