"""Completions out of files too large to read: found by halving, picked in passing, the same at every call."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.report.completions import first_offset, last_step, lines_of, read_samples, shown_steps

MOST = 1 << 40
BLOCK_BYTES = 1 << 16


def record(step: int, index: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "step": step,
        "group": index // 4,
        "index": index,
        "completion": f"c{step}-{index}",
        "reward": 0.0,
        "num_tokens": 10,
        "trained": True,
    } | fields


def write(folder: Path, *records: dict[str, Any] | str) -> Path:
    file = folder / "generations.jsonl"
    lines = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in records]
    file.write_text("".join(f"{each}\n" for each in lines), encoding="utf-8")
    return file


class Counting(io.BytesIO):
    """A file that counts what is read of it."""

    num_bytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        found = super().readline(size)
        self.num_bytes += len(found)
        return found


@pytest.mark.long
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3 * BLOCK_BYTES // 2)), max_size=12), st.integers(0, 31))
def test_every_line_of_a_step_is_found_and_no_other(shape: list[tuple[int, int]], wanted: int) -> None:
    lines = [
        f'{{"step": {step}, "i": {i}, "x": "{"x" * size}"}}\n'.encode()
        for i, (step, size) in enumerate(sorted(shape, key=lambda each: each[0]))
    ]
    stream = io.BytesIO(b"".join(lines))
    expected = [line for line in lines if line.startswith(b'{"step": %d,' % wanted)]
    found = list(lines_of(stream, wanted, most_bytes=MOST))
    assert [line for _, line in found] == expected
    assert all(stream.getvalue()[offset:].startswith(line) for offset, line in found)


def test_a_large_file_is_read_at_a_few_places() -> None:
    stream = Counting(b"".join(b'{"step": %d, "x": "%s"}\n' % (step, b"y" * 1000) for step in range(20_000)))
    offset = first_offset(stream, 12_345)
    assert stream.getvalue()[offset:].startswith(b'{"step": 12345,')
    assert stream.num_bytes < 30 * BLOCK_BYTES < len(stream.getvalue()) / 10


def test_a_line_cut_by_a_kill_and_a_huge_one_do_no_harm(tmp_path: Path) -> None:
    file = write(tmp_path, record(0), record(1, completion="x" * (17 << 20)), record(1, 1, completion="small"))
    with file.open("ab") as stream:
        stream.write(b'{"step": 1, "completion": "cut')
    with file.open("rb") as stream:
        sizes = [len(line) for _, line in lines_of(stream, 1, most_bytes=MOST)]
        assert sizes[0] == 0
        assert len(sizes) == 2
    found = read_samples(file, 1, of_each=1, key="k")
    assert found is not None
    assert (found.num_completions, found.num_passed_over) == (1, 1)


def test_best_worst_and_random_are_different_ones(tmp_path: Path) -> None:
    rewards = [0.0, 0.25, 1.0, 2.0, -1.0, 0.5, 0.75, None]
    file = write(tmp_path, *(record(3, index, reward=reward) for index, reward in enumerate(rewards)))
    found = read_samples(file, 3, of_each=2, key="a")
    assert found is not None
    picked = {(each.kind, each.reward) for each in found.samples}
    assert {("best", 2.0), ("best", 1.0), ("worst", -1.0), ("worst", 0.0)} <= picked
    assert len(found.samples) == len({each.offset for each in found.samples}) == 6
    text = file.read_bytes()
    for each in found.samples:
        assert json.loads(text[each.offset :].split(b"\n")[0])["completion"] == each.completion.head
    again = read_samples(file, 3, of_each=2, key="a")
    assert again == found
    assert read_samples(file, 4, of_each=2, key="a") is None
    assert read_samples(tmp_path / "absent", 3, of_each=2, key="a") is None


@pytest.mark.parametrize("bad", ['{"step": 0, "completion": ', '{"step": 0, [1]}', '{"step": 0, "reward": "x"}'])
def test_lines_that_hold_no_completion(tmp_path: Path, bad: str) -> None:
    found = read_samples(write(tmp_path, bad, record(0, 1)), 0, of_each=1, key="k")
    assert found is not None
    assert found.num_completions + found.num_passed_over == 2


def test_steps_that_are_shown(tmp_path: Path) -> None:
    file = write(tmp_path, *(record(step) for step in range(100)))
    assert shown_steps(file, [-1, 19, 39, 59, 79, 99]) == [0, 39, 99]
    assert shown_steps(file, []) == [0, 50, 99]
    assert shown_steps(file, [-1, 19, 500]) == [0, 19]
    assert shown_steps(write(tmp_path, record(0)), [-1]) == [0]
    assert shown_steps(tmp_path / "absent", [0]) == []
    assert (last_step(file), last_step(tmp_path / "absent")) == (0, None)
