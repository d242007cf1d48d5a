"""Reading records and runs: from the end as from the start, with damage named and a truncated last line skipped."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records import record_names
from retrain.records.reading import BLOCK_BYTES, last_record, number, read_object, read_records, read_steps, read_toml
from retrain.records.run import Run, is_run
from tests.kit.problems import codes_in, refused

RECORDS = st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=30), max_size=3), max_size=6)


@settings(max_examples=40)
@given(records=RECORDS, cut=st.integers(0, 40))
def test_the_last_record_is_the_last_of_all_wherever_the_file_was_cut(records, cut, tmp_path_factory):
    file = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    file.write_bytes(content[: len(content) - cut])
    streamed = [record for _, record in read_records(file)]
    assert streamed == records[: len(streamed)]
    assert last_record(file) == (streamed[-1] if streamed else None)


@pytest.mark.parametrize("length", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES])
def test_lines_may_be_longer_than_a_block(tmp_path, length):
    file = tmp_path / "metrics.jsonl"
    for tail in ("", '{"step": 9, "x": "' + "y" * length):
        file.write_text('{"step": 1}\n' + json.dumps({"step": 2, "text": "é" * length}) + "\n" + tail)
        assert (last_record(file) or {})["step"] == 2


def test_only_the_end_is_looked_at_and_whole_files_are_refused_by_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert last_record(file) is None
    file.write_bytes(b"\xff\x00 not JSON\n" * 10_000 + b'{"step": 7}\n')
    assert last_record(file) == {"step": 7}
    file, toml, missing = (tmp_path / name for name in ("run.json", "config.toml", "missing"))
    file.write_text('{\n"a": 1,\n}')
    assert where(lambda: read_object(file)) in (f"{file}:2", f"{file}:3")
    toml.write_text("a = 1\nb = \n")
    assert where(lambda: read_toml(toml)).startswith(f"{toml}:2")
    for read in (read_object, read_toml, lambda path: list(read_records(path))):
        assert where(lambda read=read: read(missing)) == str(missing)


def where(read):
    with pytest.raises(ConfigError) as caught:
        read()
    assert codes_in(caught) == ["record.unreadable"]
    return caught.value.problems[0].where


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": NaN}', '{"loss": 1e999}', "\x00\x00", "[" * 100_000])
def test_a_damaged_line_is_named_unless_it_is_a_cut_last_one(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0}\n' + line + '\n{"step": 2}\n')
    assert where(lambda: list(read_records(file))) == f"{file}:2"
    file.write_text('{"step": 0}\n' + line + "\n")
    assert where(lambda: last_record(file)) == f"{file} (last line)"
    file.write_text('{"step": 0}\n' + line)
    assert [record for _, record in read_records(file)] == [{"step": 0}]
    assert last_record(file) == {"step": 0}


@pytest.mark.parametrize("line", ['{"a": 1}', '{"step": true}', '{"step": 1}'])
def test_steps_ascend(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 3}}\n{line}\n')
    assert where(lambda: list(read_steps(file))) == f"{file}:2"


def test_a_campaign_given_for_a_run_is_met_with_one_of_its_runs(tmp_path):
    run = tmp_path / "runs" / "grpo+none_s1"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        list(read_records(tmp_path / "metrics.jsonl"))
    assert codes_in(caught) == ["run.is-campaign"]
    assert str(run) in caught.value.problems[0].fix


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [1]])
def test_anything_but_a_finite_number_is_none(value):
    assert number(value) is None
    assert number(0) == 0


def made(folder, *lines, manifest=""):
    folder.mkdir(exist_ok=True)
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / record_names.RUN_FILE).write_text(text or '{"config": {"training": {"max_steps": 3}}}')
    (folder / record_names.METRICS).write_text("".join(lines))
    return Run(folder)


def test_a_run_that_has_not_begun_is_empty(tmp_path):
    run = Run(tmp_path)
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / ("long" * 100))
    assert (run.record, run.table("training"), run.identity, run.last_step(), run.num_steps) == ({}, {}, {}, {}, 0)
    assert [*run.steps(), *run.completions(), *run.evaluations(), *run.token_steps(), *run.checkpoints()] == []
    assert run.token_arrays(0, ("tokens",)) is None
    assert run.held_out() == {}


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path):
    lines = ['{"step": -1, "eval_correct_rate": 0.25}\n', '{"step": 0, "loss": 1.0}\n', '{"step": 1, "lo']
    run = made(tmp_path, *lines)
    assert is_run(tmp_path)
    assert [step for step, _ in run.steps()] == [-1, 0]
    assert (run.last_step(), run.num_steps) == ({"step": 0, "loss": 1.0}, 1)
    assert run.held_out() == {-1: 0.25}
    (tmp_path / record_names.METRICS).write_text("".join([*lines[:2], '{"step": 1, "loss": 2.0}\n']))
    assert (run.last_step(), run.num_steps) == ({"step": 1, "loss": 2.0}, 2)
    assert run.curves({"loss"}).column("loss").tolist()[1:] == [1.0, 2.0]
    assert run.table("training") == {"max_steps": 3}


def test_what_is_damaged_fails_who_needs_it(tmp_path):
    run = made(tmp_path, '{"step": 0}\nnonsense\n{"step": 1}\n', manifest="{")
    assert run.record == {}
    with pytest.raises(ConfigError, match=r"run\.json:1"):
        assert run.manifest
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        list(run.steps())
    assert run.last_step() == {"step": 1}
    for read in (run.completions, run.evaluations):
        assert refused(list, read(required=True)) == ["record.unreadable"]
