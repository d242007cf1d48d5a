"""The GPU proof from end to end on a GPU that is not there: calls that are cut off, state kept, output folder emptied.

transformers' generate and TRL do not run on the fake, and tests that need a GPU are skipped there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.kit.carried_wheel import write_wheel
from tests.kit.fake_gpu.card import H100

pytestmark = [pytest.mark.fake_gpu, pytest.mark.slow, pytest.mark.timeout(540)]
ROOT = Path(__file__).parents[2]
OURS = ("rates", "decode", "16 GB", "train", "step")
SITE = f"import sys; sys.path.append({str(ROOT)!r})\nfrom tests.kit.fake_gpu.processes import enter\nenter()\n"
NVIDIA_SMI = f'#!/bin/sh\ncase "$*" in *memory.used*) echo 1000;; *) echo "{H100.name}";; esac\n'


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with a card, without a network and without nox."""
    site, programs = tmp_path / "site", tmp_path / "programs"
    site.mkdir()
    programs.mkdir()
    (site / "sitecustomize.py").write_text(SITE, encoding="utf-8")
    (programs / "nvidia-smi").write_text(NVIDIA_SMI, encoding="utf-8")
    (programs / "nvidia-smi").chmod(0o755)
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    return os.environ | nowhere | {"PYTHONPATH": str(site), "PATH": f"{programs}:/usr/bin:/bin"}


def test_three_calls_end_in_one_page(tmp_path: Path, environ: dict[str, str]) -> None:
    out, kept = tmp_path / "out", tmp_path / "kept"
    command = [sys.executable, str(ROOT / "benchmarks/gpu.py"), "--small", "--minutes", "9", "--folder", str(kept)]
    command += ["--carried", str(write_wheel(tmp_path / "wheels"))]
    command += ["--json", str(out / "gpu.json"), "--markdown", str(tmp_path / "gpu.md"), "--parts"]

    def parts() -> dict[str, Any]:
        return dict(json.loads((kept / "gpu.json").read_text(encoding="utf-8"))["parts"])

    def cut_off_after(part: str, figure: str) -> dict[str, Any]:
        process = subprocess.Popen([*command, *OURS], env=environ)
        while figure not in _figures(out / "gpu.json", part):
            assert process.poll() is None
            time.sleep(0.2)
        process.terminate()
        assert process.wait() == 143
        found = parts()
        shutil.rmtree(out)
        return found

    first = cut_off_after("decode tiny", "8 x 32")
    assert first["decode tiny"]["status"] == "cut off"
    second = cut_off_after("train tiny", "step")
    for part, figure in (("rates", "measured"), ("decode tiny", "8 x 32")):
        assert second[part]["figures"][figure] == first[part]["figures"][figure], "it is measured once"
    done = subprocess.run([*command, *OURS, "tests"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "not done: tests;" in done.stderr
    assert (out / "gpu.json").read_bytes() == (kept / "gpu.json").read_bytes()
    third = parts()
    assert {name: part["status"] for name, part in third.items() if name != "tests"} == dict.fromkeys(
        ("rates", "decode tiny", "decode tiny, 8-bit keys and values", "16 GB tiny", "train tiny", "step tiny"), "done"
    )
    _check_page((tmp_path / "gpu.md").read_text(encoding="utf-8"))


def _figures(file: Path, part: str) -> dict[str, Any]:
    document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"parts": {}}
    return dict(document["parts"].get(part, {}).get("figures", {}))


def _check_page(page: str) -> None:
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for of, reached in (
        ("decode tiny | 8 x 32 |", "% of bandwidth"),
        ("train tiny | step |", "% MFU"),
        ("step tiny | step |", " x | 1.6 x"),
        ("decode tiny | all kernels |", "launches"),
        ("train tiny | `", "launches"),
        ("tests |", "skipped"),
    ):
        assert any(row.startswith(f"| {of}") and reached in row for row in rows), of
    assert "skipped: PyTorch sees no CUDA device" in page
    assert all(f"\n{number}. " in page for number in (1, 2, 3))
    text = " ".join(page.split())
    assert "their times mean nothing" in text
    assert "No step of TRL was measured." in text
    assert len(page.splitlines()) < 70
