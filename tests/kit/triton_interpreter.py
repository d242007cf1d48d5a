"""Triton's interpreter: kernels on a CPU. It is chosen when triton is imported, so it needs a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

INTERPRETER = "TRITON_INTERPRET"
HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_CUDA else [])]
kernels_run = pytest.mark.skipif(
    find_spec("triton") is None or not (HAS_CUDA or os.environ.get(INTERPRETER) == "1"),
    reason=f"needs triton, and CUDA or {INTERPRETER}=1",
)


def in_the_interpreter(test: Callable[[], None]) -> Callable[[], None]:
    """Mark the test of a file that runs the others there."""
    needed = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
    is_there = HAS_CUDA or INTERPRETER in os.environ
    return needed(pytest.mark.skipif(is_there, reason="the other tests of this file run as they are")(test))


def run_interpreted(tests: Path) -> None:
    """Run the tests of a file there, and fail with what they say."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--override-ini=addopts="]
    command += ["--import-mode=importlib", str(tests)]
    environment = os.environ | {INTERPRETER: "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stdout:
        pytest.skip("this version of triton's interpreter does not know this version of numpy")
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
