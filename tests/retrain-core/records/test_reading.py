"""Reading records: from the end as from the start, with damage named and a truncated last line skipped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.reading import (
    BLOCK_BYTES,
    last_record,
    number,
    read_object,
    read_records,
    read_steps,
    read_toml,
)

RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=6)


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
    file.write_bytes(b"\xff\x00 not JSON\n" * 10_000 + b'{"step": 7}\n')
    assert last_record(file) == {"step": 7}


def test_no_file_and_an_empty_file_have_no_last_record(tmp_path: Path) -> None:
    assert last_record(tmp_path / "none.jsonl") is None
    (tmp_path / "empty.jsonl").write_text("")
    assert last_record(tmp_path / "empty.jsonl") is None


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": NaN}', '{"loss": 1e999}', "\x00\x00", "[" * 100_000])
def test_a_damaged_line_is_named_unless_it_is_a_cut_last_one(tmp_path: Path, line: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: cannot be read"):
        list(read_records(file))
    file.write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl \(last line\): cannot be read"):
        last_record(file)
    file.write_text('{"step": 0}\n' + line)
    assert [record for _, record in read_records(file)] == [{"step": 0}]
    assert last_record(file) == {"step": 0}


@pytest.mark.parametrize(
    ("text", "why"),
    [('{"a": 1}\n', "no step"), ('{"step": true}\n', "no step"), ('{"step": 3}\n{"step": 1}\n', "step 1 comes after")],
)
def test_steps_go_forward(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        list(read_steps(file))


def test_a_campaign_given_for_a_run_is_met_with_one_of_its_runs(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "grpo+none_s1"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="a campaign of 1 run, not a run") as caught:
        list(read_records(tmp_path / "metrics.jsonl"))
    assert str(run) in caught.value.problems[0].fix


def test_whole_files_are_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{\n"a": 1,\n}')
    with pytest.raises(ConfigError, match=r"run\.json:[23]: cannot be read"):
        read_object(file)
    toml = tmp_path / "config.toml"
    toml.write_text("a = 1\nb = \n")
    with pytest.raises(ConfigError, match=r"config\.toml:2: cannot be read"):
        read_toml(toml)
    for read in (read_object, read_toml, lambda missing: list(read_records(missing))):
        with pytest.raises(ConfigError, match="No such file"):
            read(tmp_path / "missing")


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [1]])
def test_anything_but_a_finite_number_is_none(value: object) -> None:
    assert number(value) is None
    assert number(0) == 0
