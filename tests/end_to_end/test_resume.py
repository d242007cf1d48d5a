"""A run killed at any instant and resumed is, byte for byte, the run that was never interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.killing import (
    BASE,
    check_chains_of_kills,
    check_nothing_is_half_written,
    check_same,
    complete,
    contents,
    finish,
    left_alone,
    start,
)
from tests.kit.shared import slow_or_long

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
    return left_alone(tmp_path_factory, "six-steps", *BASE)


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
