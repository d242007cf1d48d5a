"""Any change to a record from before a checkpoint is noticed and named; what came later is nobody's promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.records.completions import TokenRecord
from retrain.records.folder import RunFolder
from retrain.records.integrity import check_records
from retrain.records.record_names import FILES, token_file

TOKENS = TokenRecord(tokens_T=np.array([3, 4]), logprobs_T=np.array([-0.5, -1]), advantages_T=np.array([1.0, 1.0]))


def write_steps(folder: RunFolder, first: int, last: int) -> None:
    for step in range(first, last):
        folder.write_completions(step, {"step": step}, [{"step": step, "completion": "x" * 20}], [TOKENS])
        folder.write_evaluation([{"step": step, "set": "held_out", "scores": [1.0, 0.0]}])
        folder.write_metrics({"step": step, "loss": 0.5})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of twelve steps and the state of its checkpoint after ten."""
    run = tmp_path_factory.mktemp("made")
    with RunFolder(run, run / "adapter") as folder:
        write_steps(folder, 0, 10)
        state = folder.sync()
        write_steps(folder, 10, 12)
    return run, state


def changed(file: Path, place: int, bit: int) -> bytes:
    """Flip one bit of a file; returns what it was."""
    before = file.read_bytes()
    after = bytearray(before)
    after[place] ^= 1 << bit
    file.write_bytes(after)
    return before


@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_is_noticed(made: tuple[Path, dict[str, Any]], name: str, where: float, bit: int) -> None:
    run, state = made
    assert check_records(run, state).damaged == ()
    for is_later in (False, True):
        size, whole = state["record_sizes"][name], (run / name).stat().st_size
        place = size + int(where * (whole - size)) if is_later else int(where * size)
        before = changed(run / name, place, bit)
        try:
            found = check_records(run, state)
        finally:
            (run / name).write_bytes(before)
        assert len(found.damaged) == (0 if is_later else 1)
        assert is_later or found.damaged[0].startswith(str(run / name))


def test_a_line_that_cannot_be_read_is_named(made: tuple[Path, dict[str, Any]]) -> None:
    run, state = made
    file = run / "metrics.jsonl"
    before = changed(file, file.read_bytes().index(b'{"step": 4'), 0)
    assert check_records(run, state).damaged[0].startswith(f"{file}:5 is damaged: cannot be read")
    file.write_bytes(before)
    before = changed(file, file.read_bytes().index(b"0.5"), 0)
    told = "its checksum differs, yet every line can be read"
    assert check_records(run, state).damaged == (f"{file} is damaged: {told}",)
    file.write_bytes(before)


def test_token_files_are_named_too(made: tuple[Path, dict[str, Any]]) -> None:
    run, state = made
    files = [token_file(run, step) for step in range(12)]
    before = {file: changed(file, -1, 3) for file in files}
    found = check_records(run, state)
    assert found.damaged == (
        *(f"{file} is damaged: its checksum differs" for file in files[:5]),
        "5 more token files are damaged",
    )
    for file, content in before.items():
        file.write_bytes(content)
    for file in files[3:5]:
        file.unlink()
    found = check_records(run, state)
    assert found.damaged == ()
    assert found.notices[0].startswith(f"2 token files are missing, first {files[3]}: ")
    for file in files[3:5]:
        file.write_bytes(before[file])


def test_checksums_go_on_after_a_rewind(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """A run that was cut back and went on has the checksums of one that was never interrupted."""
    _, state = made
    with RunFolder(tmp_path, tmp_path / "adapter") as folder:
        write_steps(folder, 0, 7)
        at_seven = folder.sync()
        write_steps(folder, 7, 9)
    with RunFolder(tmp_path, tmp_path / "adapter") as folder:
        folder.rewind(at_seven["record_sizes"], 7, check_records(tmp_path, at_seven).digests)
        write_steps(folder, 7, 10)
        assert folder.sync() == state
