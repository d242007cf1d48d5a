"""A run killed at any instant and resumed is, byte for byte, the run that was never interrupted."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    arguments_for,
    check_nothing_is_half_written,
    check_same,
    contents,
    finish,
    left_alone,
    start,
    wait_for,
)
from tests.end_to_end.running import records
from tests.kit.shared import slow_or_long

pytestmark = pytest.mark.timeout(900)

KILLS, SEED, AT_ONCE = 25, 20240, 2
SOURCE_OF_PATCHES = {
    # half of the adapter's bytes of the third checkpoint are written
    "mid-write of a checkpoint": """
import safetensors.torch
original, calls = safetensors.torch.save_file, []
def half(tensors, file, **more):
    original(tensors, file, **more)
    calls.append(file)
    if len(calls) == 5:
        os.truncate(file, os.path.getsize(file) // 2)
        kill()
safetensors.torch.save_file = half
""",
    # adapter and optimizer are there, checkpoint.json is not
    "between adapter and state": """
original, calls = Path.write_text, []
def write(self, text, **more):
    if self.name == "checkpoint.json":
        calls.append(self)
        if len(calls) == 3:
            kill()
    return original(self, text, **more)
Path.write_text = write
""",
    # all is there but the name
    "before the checkpoint's rename": """
original, calls = Path.rename, []
def rename(self, target):
    if self.name.endswith(".tmp"):
        calls.append(self)
        if len(calls) == 3:
            kill()
    return original(self, target)
Path.rename = rename
""",
    # the name is there, trainer_state.json is the old one
    "after the checkpoint's rename": """
original, calls = Path.rename, []
def rename(self, target):
    done = original(self, target)
    if self.name.endswith(".tmp"):
        calls.append(self)
        if len(calls) == 3:
            kill()
    return done
Path.rename = rename
""",
    "mid-metrics line": """
import retrain.records.files as files
original, calls = files.JsonLines.write, []
def write(self, batch):
    batch = list(batch)
    if self._path.name == "metrics.jsonl":
        calls.append(1)
        if len(calls) == 4:
            with open(self._path, "ab", buffering=0) as stream:
                stream.write(b'{"step": 2, "condition": "maxrl')
            kill()
    original(self, batch)
files.JsonLines.write = write
""",
    "mid-generations": """
import retrain.records.files as files
original, calls = files.JsonLines.write, []
def write(self, batch):
    batch = list(batch)
    if self._path.name == "generations.jsonl":
        calls.append(1)
        if len(calls) == 4:
            original(self, batch[:3])
            kill()
    original(self, batch)
files.JsonLines.write = write
""",
    "between generations and metrics": """
import retrain.records.folder as folder
original, calls = folder.RunFolder.write_metrics, []
def write(self, metrics):
    calls.append(1)
    if len(calls) == 4:
        kill()
    original(self, metrics)
folder.RunFolder.write_metrics = write
""",
    "mid-tokens": """
original, calls = Path.replace, []
def replace(self, target):
    if self.name.endswith(".safetensors.tmp"):
        calls.append(self)
        if len(calls) == 3:
            kill()
    return original(self, target)
Path.replace = replace
""",
    "mid-manifest, before anything else": """
original = Path.replace
def replace(self, target):
    if self.name == ".run.json.tmp":
        kill()
    return original(self, target)
Path.replace = replace
""",
    "after the final checkpoint, before the end is written down": """
original = Path.replace
def replace(self, target):
    if self.name == ".trainer_state.json.tmp" and b"final" in self.read_bytes():
        kill()
    return original(self, target)
Path.replace = replace
""",
}
BETWEEN_RENAMES = """
original, calls = Path.rename, []
def rename(self, target):
    if self.name == ".final.tmp":
        kill()
    return original(self, target)
Path.rename = rename
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and `never`, the run that is left alone."""
    return left_alone(tmp_path_factory, "six-steps", *BASE)


def complete(work: Path, run: Path) -> None:
    """Continue to the end; then it must be the run that was left alone."""
    code, _, err = finish(start(*arguments_for(run, BASE), cwd=work))
    assert code == 0, err
    check_same(run, work / "never")


@pytest.mark.long
def test_killed_at_random_instants_again_and_again(work: Path) -> None:
    """25 kills in chains: each resumed run is killed again, until one gets through and is compared."""
    stepping_s = sum(line.get("step_time_s", 0.0) + line.get("eval_time_s", 0.0) for line in metrics(work / "never"))

    def chain(worker: int) -> tuple[int, int]:
        chooser, kills, ends = random.Random(SEED + worker), 0, 0
        while kills < -(-KILLS // AT_ONCE):
            run = work / f"killed-{worker}-{ends}"
            for _ in range(5):
                kills += is_killed(work, run, chooser, 0.7 * stepping_s)
                check_nothing_is_half_written(run)
            complete(work, run)
            ends += 1
        return kills, ends

    with ThreadPoolExecutor(AT_ONCE) as pool:
        counts = list(pool.map(chain, range(AT_ONCE)))
    assert sum(kills for kills, _ in counts) >= KILLS


def is_killed(work: Path, run: Path, chooser: random.Random, within_s: float) -> bool:
    """Kill at a random instant after the start of the process or, mostly, of the stepping; False if it was faster."""
    process = start(*arguments_for(run, BASE), cwd=work)
    if chooser.random() < 0.85:
        wait_for(process, run / "run.json")
        time.sleep(chooser.uniform(0.0, within_s))
    else:
        time.sleep(chooser.uniform(0.0, 5.0))
    process.kill()
    finish(process)
    return process.returncode < 0


def metrics(run: Path) -> list[dict[str, float]]:
    return records(run / "metrics.jsonl")


@pytest.mark.parametrize("place", slow_or_long(SOURCE_OF_PATCHES, "mid-write of a checkpoint"))
def test_killed_at_the_worst_places(place: str, work: Path) -> None:
    run = work / place.replace(" ", "-").replace(",", "")
    code, _, _ = finish(start(*BASE, "--log-dir", str(run), cwd=work, patch=SOURCE_OF_PATCHES[place]))
    assert code == -9, place
    check_nothing_is_half_written(run)
    complete(work, run)


@pytest.mark.long
def test_killed_between_the_two_renames_that_replace_a_checkpoint(work: Path) -> None:
    run = work / "renames"
    assert finish(start(*BASE, "--max-steps", "4", "--log-dir", str(run), "--keep-last", "1", cwd=work))[0] == 0
    patched = BETWEEN_RENAMES.replace('".final.tmp"', '".final.tmp" and target.name == "final"')
    more = ("--resume", str(run), "--max-steps", "6", "--save-every", "0")
    assert finish(start(*more, cwd=work, patch=patched))[0] == -9
    assert not (run / "adapter/final").exists()
    assert (run / "adapter/.final.old").exists()
    code, out, err = finish(start(*more, cwd=work))
    assert code == 0, err
    assert "at step 4 from" in out  # not at step 3, which the checkpoint before has
    assert (
        contents(run / "adapter/final")["adapter_model.safetensors"]
        == (work / "never/adapter/final/adapter_model.safetensors").read_bytes()
    )


@pytest.mark.long
def test_a_finished_run_can_be_extended_and_else_stays_as_it_is(work: Path) -> None:
    run = work / "extended"
    assert finish(start(*BASE, "--max-steps", "4", "--log-dir", str(run), cwd=work))[0] == 0
    before = contents(run)
    code, out, err = finish(start("--resume", str(run), cwd=work))
    assert (code, err) == (0, "")
    assert "Already complete" in out
    assert {n: c for n, c in contents(run).items() if n != ".lock"} == {n: c for n, c in before.items() if n != ".lock"}
    code, _, err = finish(start("--resume", str(run), "--max-steps", "6", cwd=work))
    assert code == 0, err
    check_same(run, work / "never")
