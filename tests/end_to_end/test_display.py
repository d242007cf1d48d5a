"""The live panel, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from pathlib import Path

from tests.end_to_end.running import SCRIPT, SMALL, retrain

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_a_terminal(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Run the script with a terminal of 100 x 40 as its stdout; returns exit code and all that it drew."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        [str(SCRIPT), *arguments], cwd=cwd, stdout=follower, stderr=follower, stdin=follower, env=environ
    )
    os.close(follower)
    drawn = bytearray()
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not chunk:
            break
        drawn += chunk
    os.close(leader)
    return process.wait(timeout=60), drawn.decode("utf-8", errors="replace")


def test_panel_shows_step_phase_sparkline_and_time_left(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    code, drawn = on_a_terminal(*SMALL, "--eval-examples", "8", "--max-tokens", "32", cwd=tmp_path)
    plain = ESCAPES.sub("", drawn)
    assert code == 0, plain
    assert re.search(r"step [1-3]/3", plain)
    assert re.search(r"  starting +━+ +for [\d.]+ m?s", plain), "while the model loads"
    assert re.search(r"\n  (sampling|scoring|training|recording|eval|checkpoint) +━+", plain)
    assert re.search(r"time left: [\d.]+ m?s", plain)
    assert re.search(r"correct +\d+\.\d%  [▁▂▃▄▅▆▇█]", plain)
    assert "held-out" in plain
    said = [line.strip() for line in plain.splitlines()]
    assert any(
        re.fullmatch(r"Held-out: \d+\.\d% \[.*\] before -> \d+\.\d% \[.*\] after 3 steps", line) for line in said
    )
    assert "Next:" in said
    lines = [line for line in said if line.startswith(("Step ", "Eval ", "Held-out"))]
    assert len(lines) == 3 + 2 + 1
    assert max(map(len, lines)) <= 100
    assert "Step 2 [maxrl+gtpo_sepa]" in plain
    assert "  group: " not in plain
