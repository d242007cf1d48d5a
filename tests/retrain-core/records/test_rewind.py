"""Records are rewound to a checkpoint, and are never trusted when something else truncated them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.errors import ResumeError
from retrain.records.folder import check_sizes, record_sizes, rewind_records
from retrain.records.record_names import FILES, token_file
from retrain.records.run import Run


def write(run: Path, content: bytes) -> None:
    for name in FILES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(content)


@given(before=st.binary(max_size=200), after=st.binary(max_size=200))
def test_only_records_after_the_checkpoint_are_truncated(
    before: bytes, after: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = tmp_path_factory.mktemp("run")
    write(run, before)
    sizes = record_sizes(run)
    write(run, before + after)
    rewind_records(run, sizes, 0)
    rewind_records(run, sizes, 0)
    assert [(run / name).read_bytes() for name in FILES] == [before] * len(FILES)


def test_token_records_of_later_steps_and_torn_ones_go(tmp_path: Path) -> None:
    write(tmp_path, b"")
    for step in (0, 1, 2, 10):
        token_file(tmp_path, step).parent.mkdir(exist_ok=True)
        token_file(tmp_path, step).touch()
    torn = token_file(tmp_path, 1).with_name(".step_000001.safetensors.tmp")
    torn.touch()
    rewind_records(tmp_path, record_sizes(tmp_path), 2)
    assert sorted(file.name for file in torn.parent.iterdir()) == [token_file(tmp_path, s).name for s in (0, 1)]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_that_is_shorter_than_at_the_checkpoint_is_refused_before_anything_is_cut(
    name: str, is_gone: bool, tmp_path: Path
) -> None:
    write(tmp_path, b"12345")
    sizes = record_sizes(tmp_path)
    write(tmp_path, b"1234567")
    (tmp_path / name).unlink() if is_gone else (tmp_path / name).write_bytes(b"1234")
    for call in (check_sizes, lambda run, sizes: rewind_records(run, sizes, 0)):
        with pytest.raises(ResumeError, match="the checkpoint was made at 5") as caught:
            call(tmp_path, sizes)
        assert caught.value.problems[0].where == str(tmp_path / name)
    assert all((tmp_path / other).read_bytes() == b"1234567" for other in FILES if other != name)


def test_a_file_that_the_checkpoint_does_not_know_is_emptied(tmp_path: Path) -> None:
    write(tmp_path, b"later")
    rewind_records(tmp_path, {}, 0)
    assert record_sizes(tmp_path) == dict.fromkeys(FILES, 0)


@pytest.mark.parametrize("text", [None, "", "not json", "\x00", "[]", "null", "{}", '{"seed": null, "started": ""}'])
def test_a_folder_that_is_not_a_run_is_a_resume_error(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    with pytest.raises(ResumeError, match="cannot be read") as caught:
        Run(tmp_path).started_manifest()
    assert caught.value.exit_code == 2
