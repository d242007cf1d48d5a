"""How long `retrain --help`, `--version` and completion take, and which imports that time goes to.

    python benchmarks/help_time.py [--repeat 15]

Each figure is the fastest of the repeats, in a fresh process, with bytecode already compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(sys.executable).with_name("retrain")
ASKED = {"_RETRAIN_COMPLETE": "bash_complete", "COMP_CWORD": "1"}
COMMANDS = {
    "retrain --help": (["--help"], {}),
    "retrain --version": (["--version"], {}),
    "retrain init --help": (["init", "--help"], {}),
    "retrain explain --help": (["explain", "--help"], {}),
    "retrain dif<TAB>": ([], ASKED | {"COMP_WORDS": "retrain\ndif"}),
    "retrain --trans<TAB>": ([], ASKED | {"COMP_WORDS": "retrain\n--trans"}),
}
SHOWN_IMPORTS = 8


def fastest_s(arguments: list[str], environ: dict[str, str], repeat: int) -> float:
    """The fastest of `repeat` runs, in seconds."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run([str(SCRIPT), *arguments], env={**os.environ, **environ}, capture_output=True, check=True)
        times.append(time.perf_counter() - began)
    return min(times)


def costly_imports() -> list[tuple[float, str]]:
    """Modules by the milliseconds that their own code takes on import, of `retrain --help`."""
    argv = [sys.executable, "-X", "importtime", "-m", "retrain", "--help"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stderr.splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    found = [(int(own) / 1000, name.strip()) for own, _, name in rows if own.strip().isdigit()]
    return sorted(found, reverse=True)[:SHOWN_IMPORTS]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    for name, (arguments, environ) in COMMANDS.items():
        print(f"{name:<24} {1000 * fastest_s(arguments, environ, repeat):6.0f} ms")
    bare_s, imported_s = (_python_s(code, repeat) for code in ("pass", "import click, rich.console, pydantic"))
    print(f"{'python -c pass':<24} {1000 * bare_s:6.0f} ms")
    ratio = fastest_s(["--help"], {}, repeat) / imported_s
    print(
        f"{'click, rich, pydantic':<24} {1000 * imported_s:6.0f} ms; `retrain --help` takes {ratio:.2f} times as long"
    )
    print("\nown time of the imports of `retrain --help`:")
    for own_ms, name in costly_imports():
        print(f"  {own_ms:6.1f} ms  {name}")


def _python_s(code: str, repeat: int) -> float:
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
