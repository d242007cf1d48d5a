"""A run killed at any instant, or stopped by a fault that is mended, is byte for byte the run that had neither."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    RUN,
    check_chains_of_kills,
    check_nothing_is_half_written,
    check_same,
    complete,
    contents,
    finish,
    left_alone,
    start,
)
from tests.end_to_end.running import records, untimed
from tests.kit.shared import made_once, slow_or_long

pytestmark = pytest.mark.timeout(900)

SOURCE_OF_PATCHES = {
    "mid-write of a checkpoint": """
import safetensors.torch
def halve(tensors, file):
    os.truncate(file, os.path.getsize(file) // 2)
    kill()
at(safetensors.torch, "save_file", halve, nth(5), after=True)
""",
    # adapter and optimizer are there
    "between adapter and state": """
at(Path, "write_text", kill, nth(3, lambda file, *_: file.name == "checkpoint.json"))
""",
    "before the checkpoint's rename": """
at(Path, "rename", kill, nth(3, lambda file, _: file.name.endswith(".tmp")))
""",
    # trainer_state.json is the old one
    "after the checkpoint's rename": """
at(Path, "rename", kill, nth(3, lambda file, _: file.name.endswith(".tmp")), after=True)
""",
    "mid-metrics line": """
from retrain.records.files import JsonLines
def begin_a_line(lines, _):
    with open(lines._path, "ab", buffering=0) as stream:
        stream.write(b'{"step": 2, "condition": "maxrl')
    kill()
at(JsonLines, "write", begin_a_line, nth(4, lambda lines, _: lines._path.name == "metrics.jsonl"))
""",
    "mid-generations": """
from retrain.records.files import JsonLines
def write_some(lines, batch):
    lines.write(list(batch)[:3])
    kill()
at(JsonLines, "write", write_some, nth(4, lambda lines, _: lines._path.name == "generations.jsonl"))
""",
    "between generations and metrics": """
from retrain.records.folder import RunFolder
at(RunFolder, "write_metrics", kill, nth(4))
""",
    "mid-tokens": """
at(Path, "replace", kill, nth(3, lambda file, _: file.name.endswith(".safetensors.tmp")))
""",
    "mid-manifest, before anything else": """
at(Path, "replace", kill, lambda file, _: file.name == ".run.json.tmp")
""",
    "after the final checkpoint, before the end is written down": """
at(Path, "replace", kill, lambda file, _: file.name == ".trainer_state.json.tmp" and b"final" in file.read_bytes())
""",
}
BETWEEN_RENAMES = """
at(Path, "rename", kill, lambda file, target: (file.name, target.name) == (".final.tmp", "final"))
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = left_alone(tmp_path_factory, "six-steps", *BASE)
    (folder / "own_parts.py").write_text(OWN_PARTS, encoding="utf-8")
    return folder


@pytest.mark.long
def test_killed_at_random_instants_again_and_again(work: Path) -> None:
    """25 kills in chains: each resumed run is killed again, until one gets through and is compared."""
    check_chains_of_kills(work, BASE, seed=20240, most=25, in_a_row=5)


@pytest.mark.parametrize("place", slow_or_long(SOURCE_OF_PATCHES, "mid-write of a checkpoint"))
def test_killed_at_the_worst_places(place: str, work: Path) -> None:
    run = work / place.replace(" ", "-").replace(",", "")
    code, _, _ = finish(start(*BASE, "--log-dir", str(run), cwd=work, patch=SOURCE_OF_PATCHES[place]))
    assert code == -9, place
    check_nothing_is_half_written(run)
    complete(work, run, BASE)


@pytest.mark.long
def test_killed_between_the_two_renames_that_replace_a_checkpoint(work: Path) -> None:
    run = work / "renames"
    assert finish(start(*BASE, "--max-steps", "4", "--log-dir", str(run), "--keep-last", "1", cwd=work))[0] == 0
    more = ("--resume", str(run), "--max-steps", "6", "--save-every", "0")
    assert finish(start(*more, cwd=work, patch=BETWEEN_RENAMES))[0] == -9
    assert (run / "adapter/.final.old").exists() > (run / "adapter/final").exists()
    code, out, err = finish(start(*more, cwd=work))
    assert code == 0, err
    assert "at step 4 from" in out  # not at step 3, which the checkpoint before has
    name = "adapter/final/adapter_model.safetensors"
    assert (run / name).read_bytes() == (work / "never" / name).read_bytes()


@pytest.mark.long
def test_a_finished_run_can_be_extended_and_else_stays_as_it_is(work: Path) -> None:
    run = work / "extended"
    assert finish(start(*BASE, "--max-steps", "4", "--log-dir", str(run), cwd=work))[0] == 0
    before = contents(run)
    code, out, err = finish(start("--resume", str(run), cwd=work))
    assert (code, err, "Already complete" in out) == (0, "", True)
    assert contents(run) | {".lock": b""} == before | {".lock": b""}
    code, _, err = finish(start("--resume", str(run), "--max-steps", "6", cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


SMALL_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
"""
# From the second checkpoint on, the folder is read-only; root would not notice, so its right to ignore that goes too.
READ_ONLY = """
import ctypes
from retrain.run.run_records import RunRecords

def obey_permissions():
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << 1)  # CAP_DAC_OVERRIDE, effective
    assert libc.capset(header, sets) == 0

def lock(*_):
    os.chmod({folder!r}, 0o555)
    os.geteuid() == 0 and obey_permissions()
at(RunRecords, "save", lock, nth(3))
"""
OWN_PARTS = """
import math

class NaN:
    def score(self, example, text):
        return math.nan

class Broken:
    def start(self, manifest, folder): pass
    def step(self, metrics): raise RuntimeError("the board is down")
    def finish(self, error=None): raise RuntimeError("still down")

def nan_reward(context): return NaN()
def broken_recorder(context): return Broken()
"""


@pytest.fixture(scope="session")
def four_steps(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run after four of its six steps, where each of them left a checkpoint."""

    def make(folder: Path) -> None:
        code, _, err = finish(start(*BASE, "--max-steps", "4", "--log-dir", str(folder / "half"), cwd=work))
        assert code == 0, err

    return made_once(tmp_path_factory, "four-steps", make) / "half"


@pytest.fixture
def half(four_steps: Path, work: Path, request: pytest.FixtureRequest) -> Path:
    name = request.node.name.replace("[", "-").replace("]", "").replace(" ", "-")
    return Path(shutil.copytree(four_steps, work / name))


def go_on(half: Path, work: Path, patch: str = "") -> tuple[int, str, str]:
    return finish(start("--resume", str(half), "--max-steps", "6", cwd=work, patch=patch))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(name: str, half: Path, work: Path) -> None:
    file = half / "adapter/final" / name
    if name.startswith("adapter"):
        file.write_bytes(file.read_bytes()[:-100])
    else:
        flip(file)
    code, out, err = go_on(half, work)
    assert (code, err) == (0, "")
    assert f"Damaged checkpoint passed over: {file}: is damaged: its checksum differs" in out
    assert f"at step 3 from {half}/adapter/checkpoint_step_3" in out
    check_same(half, work / "never")
    check_nothing_is_half_written(half)


@pytest.mark.long
def test_without_any_whole_checkpoint_the_run_begins_again_with_its_seed(half: Path, work: Path) -> None:
    for folder in (half / "adapter").iterdir():
        flip(folder / "optimizer.safetensors")
    (half / "trainer_state.json").unlink()  # no loss
    code, out, _ = go_on(half, work)
    assert code == 0
    assert out.count("Damaged checkpoint passed over") == 4
    assert "from the beginning: there is no valid checkpoint" in out
    check_same(half, work / "never")


@pytest.mark.long
def test_a_checkpoint_that_the_disk_refuses_leaves_the_earlier_ones(half: Path, work: Path) -> None:
    before = contents(half / "adapter")
    code, _, err = go_on(half, work, SMALL_FILES.format(limit=600_000))
    assert code == 1
    assert err.startswith("retrain: checkpoint error")
    assert "could not be written" in err
    assert "File too large" in err
    assert "Traceback" not in err
    assert contents(half / "adapter") == before  # and no half checkpoint takes up room
    assert json.loads((half / "run.json").read_text())["status"] == "failed"
    assert go_on(half, work)[0] == 0
    check_same(half, work / "never")


@pytest.mark.long
def test_a_record_that_the_disk_refuses_leaves_whole_lines(half: Path, work: Path) -> None:
    file = half / "emergence/generations.jsonl"
    before = file.read_bytes()
    code, _, err = go_on(half, work, SMALL_FILES.format(limit=len(before) + 500))
    assert code == 1
    assert err.startswith("retrain: record error")
    assert f"{file}: cannot be written: File too large" in err
    assert "Traceback" not in err
    assert file.read_bytes() == before
    assert go_on(half, work)[0] == 0
    check_same(half, work / "never")


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_stops_the_run_with_its_checkpoints(work: Path) -> None:
    run = work / "read-only"
    patch = READ_ONLY.replace("{folder!r}", repr(str(run / "adapter")))
    code, _, err = finish(start(*BASE, "--log-dir", str(run), cwd=work, patch=patch))
    assert code == 1, err
    assert "checkpoint_step_3" in err
    assert "Permission denied" in err
    assert "Traceback" not in err
    check_nothing_is_half_written(run)
    (run / "adapter").chmod(0o755)
    code, out, _ = finish(start("--resume", str(run), cwd=work))
    assert code == 0
    assert "at step 2" in out
    check_same(run, work / "never")


def test_numbers_of_the_model_that_are_none_stop_the_run_and_reach_no_record(work: Path) -> None:
    run = work / "nan"
    code, out, err = finish(start(*RUN, "--lr", "1e30", "--eval-examples", "0", "--log-dir", str(run), cwd=work))
    assert code == 1, out
    assert "3 steps in a row were rejected" in err
    assert "lower [training] lr" in err
    assert "Traceback" not in err
    rejected = [line for line in records(run / "metrics.jsonl") if "rejected" in line]
    assert len(rejected) == 3
    assert all("finite" in line["rejected"] for line in rejected)
    check_nothing_is_half_written(run)


def test_a_reward_that_gives_nan_stops_the_run_and_no_completion_counts_as_wrong(work: Path) -> None:
    run = work / "nan-reward"
    reward = ("--reward-type", "own_parts.nan_reward", "--scoring-audit", "off")
    code, _, err = finish(start(*RUN, *reward, "--eval-examples", "0", "--log-dir", str(run), cwd=work))
    assert code == 1
    assert "failed on 32 of 32 completions" in err
    assert "nan" in err
    assert "Traceback" not in err
    assert records(run / "metrics.jsonl") == []
    assert json.loads((run / "run.json").read_text())["status"] == "failed"


@pytest.mark.long
def test_a_recorder_that_raises_is_told_once_and_the_run_is_the_same(work: Path) -> None:
    run = work / "recorder"
    more = ("--recorders", "own_parts.broken_recorder", "--log-dir", str(run))
    code, out, err = finish(start(*BASE, *more, cwd=work))
    assert code == 0, err
    assert (out + err).count("the board is down") == 1
    assert "still down" not in out + err
    assert untimed(run / "metrics.jsonl") == untimed(work / "never/metrics.jsonl")
    check_same(run, work / "never")
