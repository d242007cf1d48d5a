"""Reading records: from the end as from the start, with damage named and a truncated last line skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.reading import BLOCK_BYTES, last_record, number, read_object, read_records, read_steps, read_toml
from tests.kit.problems import codes_in

RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=6)


@settings(max_examples=40)
@given(records=RECORDS, cut=st.integers(0, 40))
def test_the_last_record_is_the_last_of_all_wherever_the_file_was_cut(
    records: list[dict[str, str]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    file.write_bytes(content[: len(content) - cut])
    streamed = [record for _, record in read_records(file)]
    assert streamed == records[: len(streamed)]
    assert last_record(file) == (streamed[-1] if streamed else None)


@pytest.mark.parametrize("length", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_lines_may_be_longer_than_a_block(tmp_path: Path, length: int) -> None:
    file = tmp_path / "metrics.jsonl"
    for tail in ("", '{"step": 9, "x": "' + "y" * length):
        file.write_text('{"step": 1}\n' + json.dumps({"step": 2, "text": "é" * length}) + "\n" + tail)
        assert (last_record(file) or {})["step"] == 2


def test_only_the_end_of_the_file_is_looked_at(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_record(file) is None
    file.write_bytes(b"\xff\x00 not JSON\n" * 10_000 + b'{"step": 7}\n')
    assert last_record(file) == {"step": 7}


def where(read: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read()
    assert codes_in(caught) == ["record.unreadable"]
    return caught.value.problems[0].where


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": NaN}', '{"loss": 1e999}', "\x00\x00", "[" * 100_000])
def test_a_damaged_line_is_named_unless_it_is_a_cut_last_one(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    assert where(lambda: list(read_records(file))) == f"{file}:2"
    file.write_text('{"step": 0}\n' + line + "\n")
    assert where(lambda: last_record(file)) == f"{file} (last line)"
    file.write_text('{"step": 0}\n' + line)
    assert [record for _, record in read_records(file)] == [{"step": 0}]
    assert last_record(file) == {"step": 0}


@pytest.mark.parametrize(
    "text", ['{"step": 0}\n{"a": 1}\n', '{"step": 0}\n{"step": true}\n', '{"step": 3}\n{"step": 1}\n']
)
def test_steps_ascend(tmp_path: Path, text: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    assert where(lambda: list(read_steps(file))) == f"{file}:2"


def test_a_campaign_given_for_a_run_is_met_with_one_of_its_runs(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "grpo+none_s1"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        list(read_records(tmp_path / "metrics.jsonl"))
    assert codes_in(caught) == ["run.is-campaign"]
    assert str(run) in caught.value.problems[0].fix


def test_whole_files_are_refused_by_line(tmp_path: Path) -> None:
    file, toml, missing = (tmp_path / name for name in ("run.json", "config.toml", "missing"))
    file.write_text('{\n"a": 1,\n}')
    assert where(lambda: read_object(file)) in (f"{file}:2", f"{file}:3")
    toml.write_text("a = 1\nb = \n")
    assert where(lambda: read_toml(toml)).startswith(f"{toml}:2")
    for read in (read_object, read_toml, lambda path: list(read_records(path))):
        assert where(lambda read=read: read(missing)) == str(missing)


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [1]])
def test_anything_but_a_finite_number_is_none(value: object) -> None:
    assert number(value) is None
    assert number(0) == 0
