"""The chain of hashes: whatever is changed is found, kills and parallel writers break nothing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.verdicts.ledger.chain import FIRST, NAME, append
from retrain.verdicts.ledger.history import read_chain, read_history

LINES = 5
WRITER = "import sys; from pathlib import Path; from retrain.verdicts.ledger.chain import append\n"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("ledger")
    for number in range(LINES):
        assert append(folder, "look", number=number, text="naïve | 'quoted' \"x\"") == ""
    return (folder / NAME).read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("changed")


def is_noticed(place: Path, content: bytes) -> bool:
    (place / NAME).write_bytes(content)
    entries = list(read_chain(place / NAME))
    return any(entry.fault or entry.is_torn for entry in entries)


def test_an_untouched_ledger_is_a_chain(content: bytes, place: Path) -> None:
    assert not is_noticed(place, content)
    entries = list(read_chain(place / NAME))
    assert [entry.record["number"] for entry in entries] == list(range(LINES))
    assert [entry.record["previous"] for entry in entries] == [FIRST, *(entry.sha256 for entry in entries[:-1])]
    assert read_history(place).head == entries[-1].sha256


@settings(max_examples=50)
@given(st.data())
def test_any_edited_byte_is_found(content: bytes, place: Path, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != content[position]))
    assert is_noticed(place, content[:position] + bytes([byte]) + content[position + 1 :])


@settings(max_examples=40)
@given(st.lists(st.integers(0, LINES - 1), max_size=2 * LINES))
def test_any_other_sequence_of_lines_is_found_unless_it_is_a_beginning(
    content: bytes, place: Path, order: list[int]
) -> None:
    lines = content.splitlines(keepends=True)
    is_beginning = order == list(range(len(order)))
    assert is_noticed(place, b"".join(lines[number] for number in order)) is not is_beginning


def test_a_cut_tail_is_found_by_who_knows_a_later_hash(content: bytes, place: Path) -> None:
    lines = content.splitlines(keepends=True)
    head = json.loads(lines[-1])["sha256"]
    (place / NAME).write_bytes(b"".join(lines[:-1]))
    history = read_history(place, known_head=head)
    assert (history.faults, history.has_known_head) == ([], False)
    (place / NAME).write_bytes(content)
    assert append(place, "look", number=LINES) == ""
    assert read_history(place, known_head=head).has_known_head


@settings(max_examples=20)
@given(st.data())
def test_a_line_torn_by_a_kill_is_healed_at_the_next_event(content: bytes, place: Path, data: st.DataObject) -> None:
    start = content[:-1].rindex(b"\n") + 1
    cut = data.draw(st.integers(start + 1, len(content) - 1))
    assert is_noticed(place, content[:cut])
    assert append(place, "look", number=-1) == ""
    *entries, last = read_chain(place / NAME)
    assert not any(entry.fault or entry.is_torn for entry in (*entries, last))
    assert [entry.record["number"] for entry in entries] == list(range(LINES - 1))
    assert last.record["healed"] == cut - start


def test_the_chain_continues_from_damage_that_stays_visible_and_after_long_lines(content: bytes, place: Path) -> None:
    (place / NAME).write_bytes(content + b"not a line\n")
    for size in (10, 30_000, 8192, 10):
        assert append(place, "look", text="x" * size) == ""
    faults = [entry.fault for entry in read_chain(place / NAME) if entry.fault]
    assert faults == ["is not a line that retrain writes"]


def test_parallel_writers_lose_nothing(tmp_path: Path) -> None:
    code = WRITER + "[append(Path(sys.argv[1]), 'look', writer=sys.argv[2], number=n) for n in range(15)]"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    entries = list(read_chain(tmp_path / NAME))
    assert not any(entry.fault or entry.is_torn for entry in entries)
    for name in "ab":
        assert [e.record["number"] for e in entries if e.record["writer"] == name] == list(range(15))


def test_what_cannot_be_written_is_told_and_raises_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    assert "not a regular file" in append(tmp_path, "look")
    assert "No such file" in append(tmp_path / "missing", "look")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / NAME).symlink_to("/dev/full")
    assert "not a regular file" in append(tmp_path / "full", "look")


def test_a_failed_write_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert append(tmp_path, "look", number=1) == ""
    before, write = (tmp_path / NAME).read_bytes(), os.write

    def full(descriptor: int, data: bytes) -> int:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr("retrain.verdicts.ledger.chain.os.write", full)
        assert "No space left" in append(tmp_path, "look", number=2)
    assert (tmp_path / NAME).read_bytes() == before


def test_numbers_that_json_lacks_are_null_and_secrets_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "planted-secret-123")
    fields = {"interval": (1.0, float("inf")), "api_key": "k", "note": "with planted-secret-123", "name": "a\udc80b"}
    assert append(tmp_path, "verdict", **fields) == ""
    text = (tmp_path / NAME).read_text()
    assert "planted" not in text
    record = next(read_chain(tmp_path / NAME)).record
    assert (record["interval"], record["api_key"]) == ([1.0, None], "(hidden)")
