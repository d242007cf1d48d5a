"""Nothing that a person has set reaches what a test starts, and preloaded processes are like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.preloaded import IS_POSSIBLE, Preloaded, popen
from tests.kit.clean_environment import cleaned, is_personal

PERSONAL = (
    "PS1 VIRTUAL_ENV PYTHONPATH PYTHONWARNINGS PYTEST_ADDOPTS RETRAIN_BLOCK RETRAIN__TRAINING__LR WANDB_MODE HF_HOME "
    "OMP_NUM_THREADS LANG LC_ALL FORCE_COLOR NO_COLOR COLUMNS CI"
)
TELL = (
    "import os, sys; print(sys.argv, sys.path, os.getcwd(), sorted(os.environ.items()), __name__, sys.stdout.encoding)"
    "; print(repr(sys.stdin.read()), sys.stdout.errors, sys.stdout.isatty(), file=sys.stderr)"
)


def test_nothing_that_a_person_has_set_reaches_a_process_of_a_test() -> None:
    kept = {"PATH": "/bin", "HOME": "/home/x", "TERM": "xterm", "RETRAIN_VLLM_PYTHON": "/vllm/python"}
    assert cleaned({**kept, **dict.fromkeys(PERSONAL.split(), "x")}) == {**kept, "OMP_NUM_THREADS": "1"}
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = {name: value for name, value in json.loads(done.stdout).items() if is_personal(name)}
    for added in ("LC_CTYPE", "COLUMNS", "LINES"):  # by Python where no locale is set (PEP 538), and by GNU readline
        found.pop(added, None)
    assert found == {"OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(not IS_POSSIBLE, reason="a fork is safe on Linux alone")
@pytest.mark.parametrize(
    "ending",
    [
        *("import atexit; atexit.register(print, 'in the end')", "sys.exit('a message')", "sys.exit(75)", "1 / 0"),
        *("os.close(1)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 2)", "os._exit(3)"),
    ],
)
def test_a_preloaded_process_says_and_returns_what_any_process_does(ending: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    program = [sys.executable, "-c", f"{TELL}; {ending}", "--one", "two"]
    env = {**os.environ, "RETRAIN_LETTER": "x"}
    usual = subprocess.run(program, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    process = popen(program, cwd=tmp_path, env=env)
    out, err = process.communicate(timeout=60)
    assert isinstance(process, Preloaded)
    assert (process.returncode, out) == (usual.returncode, usual.stdout)
    for end in (slice(1), slice(-1, None)):
        assert err.splitlines()[end] == usual.stderr.splitlines()[end]


@pytest.mark.skipif(not IS_POSSIBLE, reason="a fork is safe on Linux alone")
def test_it_has_torch_and_none_of_ours_hashes_anew_and_can_be_waited_for_and_killed(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = "import sys, time; print('torch' in sys.modules, 'retrain' in sys.modules, hash('a'), flush=True)"
    said = []
    for _ in range(2):
        process = popen([sys.executable, "-c", f"{code}; time.sleep(60)"], cwd=tmp_path, env=dict(os.environ))
        assert process.stdout is not None
        said.append(process.stdout.readline().split())
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.terminate()
        assert process.wait(60) == -15
        assert process.communicate() == ("", "")
    assert said[0][:2] == said[1][:2] == ["True", "False"]
    assert said[0][2] != said[1][2]
    # a library could have read another environment: such a process is started anew
    program = [sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"]
    process = popen(program, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "2"})
    assert (process.communicate()[0], isinstance(process, Preloaded)) == ("2\n", False)
