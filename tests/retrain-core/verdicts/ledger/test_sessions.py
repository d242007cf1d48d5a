"""What the ledger is told of runs and looks, and its chain: no edit goes unnoticed, no event is lost."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import retrain
from retrain.kernel.errors import StopRequested
from retrain.verdicts.ledger.chain import FIRST, NAME, append
from retrain.verdicts.ledger.disk import read_run
from retrain.verdicts.ledger.history import read_chain, read_history
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from tests.kit.ledgers import recorded
from tests.kit.made_runs import MadeRun, write_campaign, write_run
from tests.kit.problems import codes_in


def stepless(folder, seed):
    folder.mkdir(parents=True)
    manifest = {"condition": "a+b", "seed": seed, "started": f"2026-03-01T12:00:0{seed}+00:00", "status": "stopped"}
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").touch()
    return folder


def test_a_run_and_its_continuation_are_one_with_the_hashes_of_its_records(command, toy_arguments, tmp_path):
    logs = tmp_path / "logs"
    assert command(*toy_arguments, "--max-steps", "1", "--log-dir", "logs/a").code == 0
    assert command("--resume", "logs/a", "--max-steps", "2").code == 0
    history = read_history(logs)
    (run,) = history.runs.values()
    assert (run.name, run.state, run.first["resumed"], history.num_lines) == ("a", "done", False, 4)
    assert run.ended["steps"] == 2
    assert dict(run.hashes) == read_run(logs, logs / "a").hashes
    assert {"metrics.jsonl", "settings", "inputs"} <= run.hashes.keys()
    assert command("compare", "--ledger").code == 0


def test_a_run_continues_without_a_ledger_and_says_so_once(command, toy_arguments, tmp_path):
    (tmp_path / "logs" / NAME).mkdir(parents=True)
    result = command(*toy_arguments, "--max-steps", "1", "--log-dir", "logs/a")
    assert (result.code, (result.out + result.err).count("Not in the ledger")) == (0, 1)


def test_runs_that_ended_before_their_first_step_are_counted_and_no_copies(command, tmp_path):
    for seed, error in ((1, StopRequested("SIGTERM")), (2, StopRequested("SIGTERM"))):
        recorded(stepless(tmp_path / f"logs/r{seed}", seed), error)
    done = command("compare", "--ledger")
    assert done.code == 0, done.out
    assert "2 runs, 2 of them ended without a step" in done.out
    (tmp_path / "logs/r1/metrics.jsonl").write_text('{"step": 0}\n')
    done = command("compare", "--ledger")
    assert (done.code, "r1: changed since the run ended: metrics.jsonl" in done.out) == (1, True)


def test_a_run_that_was_killed_is_unknown_and_not_silently_intact(command, tmp_path):
    run = stepless(tmp_path / "logs/r1", 1)
    facts = {"started": json.loads((run / "run.json").read_text())["started"], "condition": "a+b", "seed": 1}
    append(run.parent, "run_started", run="r1", **facts, first_step=0, resumed=False, hashes={})
    done = command("compare", "--ledger", "--json")
    (found,) = json.loads(done.out)["findings"]
    assert (done.code, found["certain"], "no end of r1 is on record" in found["what"]) == (0, False, True)


@pytest.mark.parametrize("what", [(), ("--events",)])
def test_a_ledger_without_an_event_is_refused(command, tmp_path, what):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/ledger.jsonl").touch()
    done = command("compare", "--ledger", *what)
    assert (done.code, codes_in(done.err)) == (2, ["ledger.empty"])


A, B = "grpo+none", "maxrl+none"
EFFECTS = {A: 0.0, B: 0.1}
SEEDS = tuple(range(1, 9))
RUN = f"logs/c/runs/{B}_s1"
COMMANDS = {
    "status": ("status", "logs", "--all", "--json"),
    "status inside": ("status", "logs/c", "--json"),
    "top": ("status", "logs", "--all"),
    "signal": ("signal", "logs/c"),
    "signal of a run": ("signal", RUN),
    "forecast": ("status", RUN, "--forecast"),
    "compare --variance": ("compare", "logs/c", "--variance"),
    "diff": ("diff", RUN, f"logs/c/runs/{A}_s1"),
}


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """`unfinished(4)`: a campaign in `logs/c` of eight seeds, of which so many are done and the others not begun."""
    monkeypatch.chdir(tmp_path)

    def build(num_done):
        folder = write_campaign(Path("logs/c"), EFFECTS, seeds=SEEDS, steps=10, eval_every=5)
        for seed in SEEDS[num_done:]:
            for label in (A, B):
                shutil.rmtree(folder / f"runs/{label}_s{seed}")
        return folder

    return build


def finish(folder, num_done):
    for seed in SEEDS[:num_done]:
        for label, effect in EFFECTS.items():
            if not (run := folder / f"runs/{label}_s{seed}").exists():
                write_run(run, MadeRun(condition=label, seed=seed, steps=10, eval_every=5, effect=effect))


def looks():
    return [entry.record for entry in read_chain(Path("logs") / NAME) if entry.record["kind"] == "look"]


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_command_records_its_look_once(arguments, unfinished, command):
    folder = unfinished(4)
    for _ in range(3):
        assert command(*arguments).code in (0, 2)  # a forecast of a run that has ended, or from too few
    (look,) = looks()
    assert look["campaign"] == "c"
    assert look["seeds"] == {A: [1, 2, 3, 4], B: [1, 2, 3, 4]}
    finish(folder, 5)
    command(*arguments)
    assert [len(each["seeds"][A]) for each in looks()] == [4, 5]
    assert command("compare", "--ledger").code == 0


def test_a_finished_campaign_and_one_that_has_no_step_are_not_recorded(unfinished, command):
    unfinished(8)
    for arguments in COMMANDS.values():
        command(*arguments)
    assert looks() == []
    shutil.rmtree("logs/c")
    unfinished(0)
    assert command("status", "logs", "--all").code == 0
    assert looks() == []


@pytest.mark.parametrize(("num_done", "design"), [(6, "anytime"), (8, "fixed")])
def test_a_look_counts_unless_all_seeds_ran(num_done, design, unfinished, command):
    folder = unfinished(4)
    found = json.loads(command("status", "logs", "--all", "--json").out)
    assert found["campaigns"][0]["completed"] == 8
    finish(folder, num_done)
    study = comparison_with_ledger([folder], Options())
    assert (study.comparisons[0].looks.design, len(study.looks.looks)) == (design, 2)
    runs = [run for run in sorted((folder / "runs").iterdir()) if not run.name.endswith("_s8")]
    assert len(comparison_with_ledger(runs, Options()).comparisons[0].seeds) == min(num_done, 7)


def test_a_look_from_python_is_recorded_or_only_warned_of(unfinished, command):
    unfinished(4)
    for what in ("rows", "metrics", "completions", "rows"):
        getattr(retrain.load(RUN), what)
    assert [look["by"] for look in looks()] == ["retrain.load"]
    (Path("logs") / NAME).unlink()
    (Path("logs") / NAME).mkdir()
    result = command("status", "logs", "--all", "--json")
    assert (result.code, "this look is not on record" in result.err) == (0, True)
    assert json.loads(result.out)["campaigns"]
    assert retrain.load(RUN).rows


LINES = 5
WRITER = "import sys; from pathlib import Path; from retrain.verdicts.ledger.chain import append\n"


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ledger")
    for number in range(LINES):
        assert append(folder, "look", number=number, text="naïve | 'quoted' \"x\"") == ""
    return (folder / NAME).read_bytes()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("changed")


def is_noticed(place, content):
    (place / NAME).write_bytes(content)
    entries = list(read_chain(place / NAME))
    return any(entry.fault or entry.is_torn for entry in entries)


def test_an_untouched_ledger_is_a_chain_and_a_cut_tail_is_found_by_a_later_hash(content, place):
    assert not is_noticed(place, content)
    entries = list(read_chain(place / NAME))
    assert [entry.record["number"] for entry in entries] == list(range(LINES))
    assert [entry.record["previous"] for entry in entries] == [FIRST, *(entry.sha256 for entry in entries[:-1])]
    assert read_history(place).head == entries[-1].sha256
    lines = content.splitlines(keepends=True)
    head = json.loads(lines[-1])["sha256"]
    (place / NAME).write_bytes(b"".join(lines[:-1]))
    history = read_history(place, known_head=head)
    assert (history.faults, history.has_known_head) == ([], False)
    (place / NAME).write_bytes(content)
    assert append(place, "look", number=LINES) == ""
    assert read_history(place, known_head=head).has_known_head


@settings(max_examples=50)
@given(st.data())
def test_any_edited_byte_is_found(content, place, data):
    position = data.draw(st.integers(0, len(content) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != content[position]))
    assert is_noticed(place, content[:position] + bytes([byte]) + content[position + 1 :])


@settings(max_examples=40)
@given(st.lists(st.integers(0, LINES - 1), max_size=2 * LINES))
def test_any_other_sequence_of_lines_is_found_unless_it_is_a_beginning(content, place, order):
    lines = content.splitlines(keepends=True)
    is_beginning = order == list(range(len(order)))
    assert is_noticed(place, b"".join(lines[number] for number in order)) is not is_beginning


@settings(max_examples=20)
@given(st.data())
def test_a_line_torn_by_a_kill_is_healed_at_the_next_event(content, place, data):
    start = content[:-1].rindex(b"\n") + 1
    cut = data.draw(st.integers(start + 1, len(content) - 1))
    assert is_noticed(place, content[:cut])
    assert append(place, "look", number=-1) == ""
    *entries, last = read_chain(place / NAME)
    assert not any(entry.fault or entry.is_torn for entry in (*entries, last))
    assert [entry.record["number"] for entry in entries] == list(range(LINES - 1))
    assert last.record["healed"] == cut - start


def test_the_chain_continues_from_damage_that_stays_visible_and_after_long_lines(content, place):
    (place / NAME).write_bytes(content + b"not a line\n")
    for size in (10, 30_000, 8192, 10):
        assert append(place, "look", text="x" * size) == ""
    faults = [entry.fault for entry in read_chain(place / NAME) if entry.fault]
    assert faults == ["is not a line that retrain writes"]


def test_parallel_writers_lose_nothing(tmp_path):
    code = WRITER + "[append(Path(sys.argv[1]), 'look', writer=sys.argv[2], number=n) for n in range(15)]"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    entries = list(read_chain(tmp_path / NAME))
    assert not any(entry.fault or entry.is_torn for entry in entries)
    for name in "ab":
        assert [e.record["number"] for e in entries if e.record["writer"] == name] == list(range(15))


def test_what_cannot_be_written_is_told_and_raises_nothing(tmp_path):
    os.mkfifo(tmp_path / NAME)
    assert "not a regular file" in append(tmp_path, "look")
    assert "No such file" in append(tmp_path / "missing", "look")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / NAME).symlink_to("/dev/full")
    assert "not a regular file" in append(tmp_path / "full", "look")


def test_a_failed_write_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    assert append(tmp_path, "look", number=1) == ""
    before, write = (tmp_path / NAME).read_bytes(), os.write

    def full(descriptor, data):
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    with monkeypatch.context() as patched:
        patched.setattr("retrain.verdicts.ledger.chain.os.write", full)
        assert "No space left" in append(tmp_path, "look", number=2)
    assert (tmp_path / NAME).read_bytes() == before


def test_numbers_that_json_lacks_are_null_and_secrets_are_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "planted-secret-123")
    fields = {"interval": (1.0, float("inf")), "api_key": "k", "note": "with planted-secret-123", "name": "a\udc80b"}
    assert append(tmp_path, "verdict", **fields) == ""
    text = (tmp_path / NAME).read_text()
    assert "planted" not in text
    record = next(read_chain(tmp_path / NAME)).record
    assert (record["interval"], record["api_key"]) == ([1.0, None], "(hidden)")
