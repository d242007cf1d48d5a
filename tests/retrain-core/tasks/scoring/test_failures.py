"""What failed is kept whole, once, and not without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example
from retrain.tasks.scoring import failures
from retrain.tasks.scoring.failures import FailureRecord, read_failures, write_failures
from tests.kit.problems import codes_in


def record(text: str = "x", **more: Any) -> FailureRecord:
    example = Example(id="e", prompt=[{"role": "user", "content": "p"}], reference="7", **more)
    return FailureRecord(
        reward="math", weight=1.0, example=example, text=text, detail="d", attempts=2, seconds=0.1, report="r"
    )


@pytest.mark.parametrize("text", ["", "\ud800\0\x1b[2J", "x" * 1_000_000, "漢字"])
def test_a_record_comes_back_as_it_was(text: str, tmp_path: Path) -> None:
    own = record(text, task="t", info={"a": [1, (2,)], "b": {3: float("inf")}})
    assert write_failures(tmp_path / "failures", "step_1", [own])
    (file, back) = read_failures(tmp_path / "failures" / "step_1_0.json")[0]
    assert json.loads(file.read_bytes())["reward"] == "math"
    assert (back.text, back.example.info, back.example.prompt) == (text, own.example.info, own.example.prompt)
    assert (back.reward, back.detail, back.attempts, back.report) == ("math", "d", 2, "r")
    write_failures(tmp_path, "s", [record(info={"a": {1}, "b": 2})])
    assert read_failures(tmp_path)[0][1].example.info == {"a": "{1}", "b": 2}, "what cannot be sent is kept as text"


def test_a_step_that_is_tried_again_replaces_its_own(tmp_path: Path) -> None:
    write_failures(tmp_path, "step_1", [record("a"), record("b"), record("c")])
    write_failures(tmp_path, "step_10", [record("d")])
    write_failures(tmp_path, "step_1", [record("e")])
    assert [(file.name, each.text) for file, each in read_failures(tmp_path)] == [
        ("step_1_0.json", "e"),
        ("step_10_0.json", "d"),
    ]
    write_failures(tmp_path, "step_1", [])
    assert [file.name for file, _ in read_failures(tmp_path)] == ["step_10_0.json"]


def test_a_full_folder_takes_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "MAX_FILES", 3)
    assert write_failures(tmp_path, "a", [record()] * 2)
    assert not write_failures(tmp_path, "b", [record()] * 2)
    assert not write_failures(tmp_path, "c", [record()])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_0.json", "a_1.json", "b_0.json"]


def test_no_failures_make_no_folder_and_a_label_is_only_a_name(tmp_path: Path) -> None:
    write_failures(tmp_path / "failures", "s", [])
    assert not (tmp_path / "failures").exists()
    write_failures(tmp_path / "failures", "../../x", [record()])
    assert [file.name for file in (tmp_path / "failures").iterdir()] == [".._.._x_0.json"]


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "failures").write_text("a file")
    assert write_failures(tmp_path / "failures", "s", [record()])
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"reward": "r"}', "\x00", '{"example": 3}', "[" * 100_000])
def test_what_is_no_record_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "empty").mkdir()
    places = {"": "replay.unreadable", "empty": "replay.empty-folder", "nowhere": "replay.missing"}
    for place, code in places.items():
        with pytest.raises(ConfigError) as caught:
            read_failures(tmp_path / place)
        assert codes_in(caught) == [code]
        assert (place or "a.json") in caught.value.problems[0].where
