"""A process that begins with torch in it is, for a test, like any other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.preloaded import IS_POSSIBLE, Preloaded, popen

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="a fork is safe on Linux alone")
TELL = (
    "import os, sys; print(sys.argv, sys.path, os.getcwd(), sorted(os.environ.items()), __name__, sys.stdout.encoding)"
    "; print(repr(sys.stdin.read()), sys.stdout.errors, sys.stdout.isatty(), file=sys.stderr)"
)


@pytest.mark.parametrize(
    "code",
    [
        f"{TELL}; import atexit; atexit.register(print, 'in the end')",
        f"{TELL}; sys.exit('a message')",
        f"{TELL}; sys.exit(75)",
        f"{TELL}; 1 / 0",
        f"{TELL}; os.close(1)",
        f"{TELL}; os.kill(os.getpid(), 9)",
        f"{TELL}; os.kill(os.getpid(), 2)",
        f"{TELL}; os._exit(3)",
    ],
)
def test_it_says_and_returns_what_any_process_does(code: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", code, "--one", "two"]
    env = {**os.environ, "RETRAIN_LETTER": "x"}
    usual = subprocess.run(program, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    process = popen(program, cwd=tmp_path, env=env)
    out, err = process.communicate(timeout=60)
    assert isinstance(process, Preloaded)
    assert (process.returncode, out) == (usual.returncode, usual.stdout)
    assert err.splitlines()[:1] == usual.stderr.splitlines()[:1]
    assert err.splitlines()[-1:] == usual.stderr.splitlines()[-1:]


def test_it_can_be_waited_for_and_killed_and_has_torch_and_none_of_ours(tmp_path: Path) -> None:
    code = "import sys, time; print('torch' in sys.modules, 'retrain' in sys.modules, flush=True); time.sleep(60)"
    process = popen([sys.executable, "-c", code], cwd=tmp_path, env=dict(os.environ))
    assert process.stdout is not None
    assert process.stdout.readline() == "True False\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.wait(60) == -15
    assert process.communicate() == ("", "")


def test_two_in_a_row_hash_strings_differently(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "print(hash('a string'))"]
    said = [popen(program, cwd=tmp_path, env=dict(os.environ)).communicate()[0] for _ in range(2)]
    assert said[0] != said[1]


def test_where_a_library_could_read_another_environment_it_is_started_anew(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    process = popen(program, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert process.communicate()[0] == "2\n"
    assert not isinstance(process, Preloaded)
