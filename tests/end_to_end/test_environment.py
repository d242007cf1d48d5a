"""Nothing that the person who runs the tests has set for themselves reaches what a test starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kit.clean_environment import cleaned, is_personal

PERSONAL = {
    "PS1": "(x) evil> ",
    "VIRTUAL_ENV": "/x",
    "PYTHONPATH": "/x",
    "PYTHONWARNINGS": "error",
    "PYTEST_ADDOPTS": "--boxed",
    "RETRAIN_BLOCK": "retrain-sepa",
    "RETRAIN__TRAINING__LR": "9",
    "WANDB_MODE": "online",
    "HF_HOME": "/x",
    "OMP_NUM_THREADS": "64",
    "LANG": "tr_TR.UTF-8",
    "LC_ALL": "C",
    "FORCE_COLOR": "1",
    "NO_COLOR": "1",
    "COLUMNS": "20",
    "CI": "true",
}


@pytest.mark.parametrize("name", PERSONAL)
def test_what_is_personal_is_left_out(name: str) -> None:
    kept = {"PATH": "/bin", "HOME": "/home/x", "TERM": "xterm", "RETRAIN_VLLM_PYTHON": "/vllm/python"}
    assert cleaned({**kept, name: PERSONAL[name]}) == {**kept, "OMP_NUM_THREADS": "1"}


def test_a_process_that_a_test_starts_has_none_of_it() -> None:
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = {name: value for name, value in json.loads(done.stdout).items() if is_personal(name)}
    for added in ("LC_CTYPE", "COLUMNS", "LINES"):  # by Python where no locale is set (PEP 538), and by GNU readline
        found.pop(added, None)
    assert found == {"OMP_NUM_THREADS": "1"}
    assert os.environ["OMP_NUM_THREADS"] == "1"
