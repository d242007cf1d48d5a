"""What a look reads: all that is new, nothing twice, and nothing of a record that was rewound."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.report import watched as module
from retrain.report.watched import Tail


def line(step: int, **fields: object) -> str:
    return json.dumps({"step": step, "correct_rate": step / 100} | fields) + "\n"


def steps(tail: Tail) -> list[float]:
    return [row["step"] for row in tail.since(0, 0)[2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(cuts=st.lists(st.integers(1, 700), max_size=12))
def test_however_the_file_grows_each_row_is_given_once(tmp_path: Path, cuts: list[int]) -> None:
    whole = "".join(line(step) for step in range(20)).encode()
    file = tmp_path / "metrics.jsonl"
    file.unlink(missing_ok=True)
    tail = Tail(file)
    have: list[float] = []
    generation = at = 0
    for cut in [*cuts, len(whole)]:
        with file.open("ab") as stream:
            stream.write(whole[at : at + cut])
        at += cut
        generation, first, rows = tail.since(generation, len(have))
        have = have[:first] + [row["step"] for row in rows]
    assert have == list(range(20))
    assert tail.since(generation, len(have)) == (generation, 20, [])


def test_a_look_reads_what_is_new_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(line(step) for step in range(1000)))
    tail = Tail(file)
    assert steps(tail) == list(range(1000))
    parsed: list[bytes] = []
    parse = module.parse_record
    monkeypatch.setattr(module, "parse_record", lambda raw, **how: (parsed.append(raw), parse(raw, **how))[1])
    with file.open("a") as stream:
        stream.write(line(1000))
    assert steps(tail)[-1] == 1000
    assert len(parsed) == 1


def test_a_record_that_was_rewound_or_replaced_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    before = [line(step) for step in range(6)]
    file.write_text("".join(before))
    tail = Tail(file)
    generation, _, rows = tail.since(0, 0)
    assert len(rows) == 6
    os.truncate(file, len("".join(before[:3])))
    with file.open("a") as stream:  # grown past where it had been: its size says nothing
        stream.write("".join(line(step, loss=1.0) for step in range(3, 12)))
    again, first, rows = tail.since(generation, 6)
    assert (again, first, len(rows)) == (generation + 1, 0, 12)
    assert rows[3] == {"step": 3, "correct_rate": 0.03, "loss": 1.0}
    other = tmp_path / "other"
    other.write_text(line(0))
    other.replace(file)
    assert steps(tail) == [0]
    file.unlink()
    assert steps(tail) == [0], "what was read stays"


def test_damaged_lines_are_passed_over_and_counts_become_the_shares_that_charts_show(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    good = {"step": 1, "loss": 2, "eval_pass_at_4": 0.5, "reward_math_mean": 1}
    counts = {"useful_groups": 3, "all_wrong_groups": 1, "sampled_tokens": 200, "trained_tokens": 50}
    file.write_text(
        '{"step": 0, "loss": NaN, "correct_rate": "x", "lr": 1e999, "grad_norm": null, "mean_reward": true}\n'
        f'[1]\nno\n{{"loss": 1}}\n{{"step": "1"}}\n\n{json.dumps(good)}\n'
        + line(2, **counts, sample_time_s=4)
        + line(3, useful_groups=0, sampled_tokens=7)
    )
    none, whole, counted, uncounted = Tail(file).since(0, 0)[2]
    assert (none, whole, set(uncounted)) == ({"step": 0}, good, {"step", "correct_rate"})
    shares = {"useful_groups": 0.75, "trained_tokens": 0.25, "sampled_tokens": 50}
    assert {name: counted[name] for name in shares} == shares, "of groups and tokens, and per second"


def test_a_long_record_is_thinned_and_keeps_its_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 100)
    monkeypatch.setattr(module, "LOOK_BYTES", 4096)
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        "".join(line(step, **({"eval_correct_rate": 0.5} if step % 333 == 7 else {})) for step in range(3000))
    )
    tail = Tail(file)
    seen = -1
    while (now := len(steps(tail)) + tail.generation * 1000) != seen:
        seen = now
    kept = tail.since(0, 0)[2]
    assert len(kept) <= 100
    assert [row["step"] for row in kept if "eval_correct_rate" in row] == [7 + 333 * n for n in range(9)]
    assert kept == sorted(kept, key=lambda row: row["step"])
    assert kept[-1]["step"] > 2900
