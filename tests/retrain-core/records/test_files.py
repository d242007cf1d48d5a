"""Writes are atomic, and numbers that JSON cannot represent are refused before anything is written."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import RecordError
from retrain.records.files import JsonLines, write_folder, write_json, write_text
from tests.kit.problems import codes_in

BAD = [math.nan, math.inf, -math.inf]
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
RECORDS = st.dictionaries(st.text(), st.one_of(LEAVES, st.lists(LEAVES), st.dictionaries(st.text(), LEAVES)))


@pytest.mark.parametrize("bad", BAD)
def test_a_file_is_replaced_as_a_whole_or_stays(bad: float, tmp_path: Path) -> None:
    text, data = tmp_path / "a.txt", tmp_path / "a.json"
    write_text(text, "one")
    write_text(text, "zwei ü\n")
    write_json(data, {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(data, {"x": [{"y": bad}]})
    with pytest.raises(UnicodeEncodeError):
        write_text(text, "\ud800")
    assert (text.read_text(encoding="utf-8"), json.loads(data.read_text())) == ("zwei ü\n", {"x": 1})
    assert sorted(tmp_path.iterdir()) == [data, text]  # no temporary file stays


def test_a_folder_appears_complete_and_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "final"

    def first(folder: Path) -> None:
        assert not target.exists()
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("1")

    def second(folder: Path) -> None:
        assert (target / "inner" / "a").read_text() == "1"
        assert list(folder.iterdir()) == []
        (folder / "b").write_text("2")

    write_folder(target, first)
    write_folder(target, second)
    assert [path.name for path in target.iterdir()] == ["b"]
    assert [path.name for path in target.parent.iterdir()] == ["final"]


def test_a_folder_whose_filling_breaks_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "final"
    write_folder(target, lambda folder: (folder / "a").touch())

    def broken(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(target, broken)
    assert [path.name for path in target.iterdir()] == ["a"]
    write_folder(target, lambda folder: (folder / "b").touch())
    assert [path.name for path in target.iterdir()] == ["b"]


@settings(max_examples=30)
@given(st.lists(RECORDS, max_size=5))
def test_lines_come_back_as_they_went_in(tmp_path_factory: pytest.TempPathFactory, records: list[dict]) -> None:
    file = tmp_path_factory.mktemp("lines") / "deep" / "a.jsonl"
    try:
        json.dumps(records, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return  # text with lone surrogates is not text
    lines = JsonLines(file)
    lines.write(records)
    lines.close()
    lines.close()
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n")[:-1]] == records


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_record_keeps_its_whole_batch_out(bad: float, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = JsonLines(file)
    lines.write([{"n": 1}])
    with pytest.raises(ValueError, match="JSON"):
        lines.write([{"n": 2}, {"n": bad}])
    lines.write([{"n": 3}])
    assert file.read_text() == '{"n": 1}\n{"n": 3}\n'
    lines.close()


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()  # root may open everything else
    (tmp_path / "file").touch()
    for path in (tmp_path / "a.jsonl", tmp_path / "file" / "b.jsonl"):
        with pytest.raises(RecordError) as caught:
            JsonLines(path)
        assert (codes_in(caught), caught.value.problems[0].where) == (["record.unwritable"], str(path))


def test_a_file_grows_over_several_openings_and_is_on_disk_before_it_is_closed(tmp_path: Path) -> None:
    for n in range(2):
        lines = JsonLines(tmp_path / "a.jsonl")
        lines.write([{"n": n}])
        assert (tmp_path / "a.jsonl").read_text().count("\n") == n + 1
        lines.close()
    assert (tmp_path / "a.jsonl").read_text() == '{"n": 0}\n{"n": 1}\n'
