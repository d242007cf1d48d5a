"""A run is packed and run again as a user does it: identical, or the first difference named with its cause."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.end_to_end.running import Outcome, records, retrain, tiny
from tests.kit.problems import codes_in

REWARD = '''"""A reward of our own."""


def credit(rewards):
    mean = sum(rewards) / len(rewards)
    return [(reward - mean) / 2 for reward in rewards]
'''
SHORT = ("--max-steps", "2", "--batch-size", "4", "--group-size", "8", "--eval-examples", "4", "-q")
OWN = ("--data-source", "files", "--data-path", "sums.jsonl", "--advantage-mode", "halved.credit")
VALUE = "correct-horse-battery-1"


def rows() -> list[str]:
    pairs = ((number, number % 5 + 2) for number in range(11, 41))
    return [json.dumps({"prompt": f"What is {a} + {b}?", "answer": str(a + b)}) for a, b in pairs]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of its own code and data, in an environment that holds a secret, and its pack."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "plugins").mkdir()
    (folder / "plugins/halved.py").write_text(REWARD)
    (folder / "sums.jsonl").write_text("\n".join(rows()) + "\n")
    (folder / ".env").write_text(f"MY_SERVICE_TOKEN={VALUE}\n")
    tiny(*SHORT, *OWN, "--log-dir", "logs/run", "--set", f"logging.project=of {VALUE}", cwd=folder)
    outcome = retrain("pack", "logs/run", "-o", "run.rtpack", "--html", "run.html", cwd=folder)
    assert outcome.code == 0, outcome.err
    return folder


def again(packed: Path, into: Path, *arguments: str, file: str = "run.rtpack") -> Outcome:
    return retrain("rerun", file, "--here", "--into", str(into), *arguments, cwd=packed)


@pytest.mark.slow
def test_a_pack_holds_no_secret_and_the_same_bytes_each_time(packed: Path) -> None:
    with zipfile.ZipFile(packed / "run.rtpack") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert members["inputs/code/plugins/halved.py"].decode() == REWARD
    assert not [name for name, content in members.items() if VALUE.encode() in content]
    page = (packed / "run.html").read_text()
    assert VALUE not in page
    assert "<script" not in page
    assert retrain("pack", "logs/run", "-o", "other.rtpack", cwd=packed).code == 0
    assert (packed / "other.rtpack").read_bytes() == (packed / "run.rtpack").read_bytes()
    refused = retrain("pack", "logs/run", "-o", "other.rtpack", cwd=packed)
    assert (refused.code, codes_in(refused.err)) == (2, ["pack.file-exists"])


@pytest.mark.slow
def test_code_that_has_changed_or_holds_a_key_is_refused_by_file_and_line(packed: Path, tmp_path: Path) -> None:
    own = packed / "plugins/halved.py"
    copy = packed / "logs/run/inputs/code/plugins/halved.py"
    kept = copy.read_text()
    try:
        own.write_text(REWARD.replace("/ 2", "/ 3"))
        copy.unlink()
        outcome = retrain("pack", "logs/run", "-o", str(tmp_path / "p"), cwd=packed)
        assert (outcome.code, codes_in(outcome.err)) == (2, ["pack.file-changed"])
    finally:
        own.write_text(REWARD)
        copy.write_text(kept)
    assert not (tmp_path / "p").exists()


@pytest.mark.slow
def test_the_rerun_is_identical(packed: Path, tmp_path: Path) -> None:
    same = again(packed, tmp_path / "same", "--yes", "--json")
    assert same.code == 0, same.out + same.err
    (run,) = json.loads(same.out)["runs"]
    assert (run["verdict"], run["same_lines"], run["causes"]) == ("identical", 3, [])


@pytest.mark.long
def test_a_changed_row_is_named_at_the_first_line_that_differs(packed: Path, tmp_path: Path) -> None:
    seen = records(packed / "logs/run/emergence/generations.jsonl")[-1]["prompt"]  # of the second step
    other = rows()
    number = next(number for number, row in enumerate(other) if json.loads(row)["prompt"] in seen)
    other[number] = json.dumps({"prompt": "What is 10 + 10?", "answer": "20"})
    (tmp_path / "other.jsonl").write_text("\n".join(other) + "\n")
    changed = again(packed, tmp_path / "row", "--yes", "--json", "--data", f"sums.jsonl={tmp_path / 'other.jsonl'}")
    (run,) = json.loads(changed.out)["runs"]
    assert changed.code == 1
    assert run["causes"][0]["kind"] == "data"
    assert f"sums.jsonl:{number + 1} changed" in run["causes"][0]["what"]
    assert (run["same_lines"], run["first_divergence"]["step"]) == (2, 1)


@pytest.mark.long
def test_another_seed_and_other_code_are_named_and_a_declared_test_decides(packed: Path, tmp_path: Path) -> None:
    wide = tmp_path / "wide.rtpack"
    assert retrain("pack", "logs/run", "-o", str(wide), "--equivalence", "0.9", cwd=packed).code == 0
    seed = again(packed, tmp_path / "seed", "--yes", "--json", "--set", "training.seed=7", file=str(wide))
    (run,) = json.loads(seed.out)["runs"]
    assert run["causes"] == [{"kind": "seed", "what": "was 1 and is now 7"}]
    assert (seed.code, run["verdict"], run["equivalence"]["equivalent"]) == (0, "equivalent", True)
    (tmp_path / "halved.py").write_text(REWARD.replace("/ 2", "/ 3"))
    code = again(packed, tmp_path / "code", "--yes", "--json", "--data", f"plugins/halved.py={tmp_path / 'halved.py'}")
    (run,) = json.loads(code.out)["runs"]
    assert (code.code, run["verdict"], run["causes"][0]["kind"]) == (1, "different", "code")
    assert "halved.py:6 changed" in run["causes"][0]["what"]


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_clean_environment_repeats_the_run_and_another_package_in_it_is_named(packed: Path, tmp_path: Path) -> None:
    def rerun(script: Path, *options: str) -> subprocess.CompletedProcess[str]:
        command = [str(script), "rerun", "run.rtpack", "--yes", *options]
        return subprocess.run(command, cwd=packed, capture_output=True, text=True, timeout=5000, check=False)

    done = rerun(Path(sys.executable).with_name("retrain"), "--into", str(tmp_path / "x"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical: 3 of 3 lines are the same, and the weights" in done.stdout
    (site,) = (tmp_path / "x/environment").glob("lib/python*/site-packages")
    (metadata,) = site.glob("numpy-*.dist-info/METADATA")
    metadata.write_text(re.sub(r"^Version: .*", "Version: 99.1", metadata.read_text(), count=1, flags=re.MULTILINE))
    variance = site / "numpy/_core/_methods.py"
    exact = variance.read_text().replace("def _var(", "def _var_exact(", 1)
    variance.write_text(f"{exact}\n\ndef _var(*args, **named):\n    return _var_exact(*args, **named) * (1 + 1e-9)\n")
    second = rerun(tmp_path / "x/environment/bin/retrain", "--here", "--json", "--into", str(tmp_path / "y"))
    (run,) = json.loads(second.stdout)["runs"]
    assert run["causes"][0]["kind"] == "package"
    assert "numpy was" in run["causes"][0]["what"]
    assert run["first_divergence"]["step"] == 0
