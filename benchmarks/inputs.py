"""Processor time that a start spends on the inputs of a run: `python benchmarks/inputs.py [--files 200] [--repeat 15]`.

A project of many modules is written, of which the reward imports the first, and each module the next ones, with a data
file beside it. Hashing it all, installed plugins included, and keeping the copies are measured in this process, with
the files in the page cache. Exit code 1 when hashing takes 100 ms or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from retrain.kernel.plugins.discover import load_plugins
from retrain.records.identity.copies import write_inputs
from retrain.run.check import identity_of
from retrain.run.configure import load_checked

TARGET_MS = 100.0
BODY = '''
def score_{number}(response, reference, *, scale=1.0, shift=0.0):
    """Compare a response with its reference, in one of many ways."""
    words = [word.strip(".,;") for word in response.lower().split()]
    return scale * float(reference in words) + shift
'''
CONFIG = """[model]
model = "builtin:tiny"
[data]
source = "files"
path = "tasks.jsonl"
[reward]
type = "project.module_0.make"
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write(folder, options.files)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        plugins = load_plugins()
        checked = load_checked(["retrain.toml"], plugins)
        identity = identity_of(checked.config, plugins, checked.tables)
        (folder / "run").mkdir()
        hashing_ms = _times_ms(lambda: identity_of(checked.config, plugins, checked.tables), options.repeat)
        copying_ms = _times_ms(lambda: write_inputs(folder / "run", identity), options.repeat)
    counts = {"code": len(identity.code), "data": len(identity.data), "model": len(identity.model)}
    counts["plugins"] = sum(len(plugin.files) for plugin in identity.plugins.values())
    print(", ".join(f"{count} files of {kind}" for kind, count in counts.items()))
    for name, times in (("hashing", hashing_ms), ("copies", copying_ms)):
        print(f"{name:<8} {statistics.median(times):6.1f} ms (fastest {min(times):.1f})")
    sys.exit(statistics.median(hashing_ms) >= TARGET_MS)


def _write(folder: Path, files: int) -> None:
    (folder / "project").mkdir()
    (folder / "retrain.toml").write_text(CONFIG)
    (folder / "tasks.jsonl").write_text('{"prompt": "what is 1 plus 1 ?", "answer": "2"}\n' * 2000)
    for number in range(files - 1):
        later = [each for each in (2 * number + 1, 2 * number + 2) if each < files - 1]
        head = "".join(f"from project import module_{each}\nimport json, re, math\n" for each in later)
        (folder / f"project/module_{number}.py").write_text(
            f"import numpy as np\n{head}" + 15 * BODY.format(number=number)
        )
    (folder / "project/__init__.py").write_text("")


def _times_ms(work: Callable[[], object], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        times.append(1000 * (time.process_time() - began))
    return times


if __name__ == "__main__":
    main()
