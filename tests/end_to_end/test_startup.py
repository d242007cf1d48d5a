"""What a plain run on the built-in model imports: every one of these once cost it a tenth of a second, or seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.running import SMALL, retrain

pytest.importorskip("retrain_local")
SLOW = {
    "transformers": "tokenizer and model of a plain folder are ours",
    "peft": "so is the adapter",
    "torch._dynamo": "the optimizer is ours: that of torch imports a compiler",
    "torch._inductor": "no compiler",
    "sympy": "only a compiler needs it",
    "datasets": "the arithmetic source makes its rows",
    "huggingface_hub": "nothing is fetched",
    "numpy.ma": "np.percentile and np.unique import it",
    "packaging.requirements": "only doctor and backends ask what is required",
    "scipy": "no statistics in a run",
    "pandas": "no tables in a run",
}
DUMP = (
    "import atexit, json, sys\n"
    "atexit.register(lambda: json.dump(sorted(sys.modules), open('modules.json', 'w')))\n"
    "from retrain.cli.command_line import main\n"
    "main(sys.argv[1:])\n"
)


@pytest.mark.long
def test_a_plain_run_imports_nothing_slow(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    command = [sys.executable, "-c", DUMP, "-q", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    imported = set(json.loads((tmp_path / "modules.json").read_text(encoding="utf-8")))
    assert "torch" in imported
    assert {name: why for name, why in SLOW.items() if name in imported} == {}
