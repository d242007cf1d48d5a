"""The whole proof on a GPU: `python benchmarks/gpu.py [--minutes 9] [--json COPY] [--markdown PAGE]`.

Tests that need a GPU, decoding against the memory's bandwidth, training against the rate of products, whole steps
against the sum of both limits and TRL's where it is installed, `transformers`' generate, kernel tables, and the promise
of 16 GB; on random weights in the shape of Qwen3-4B and 0.6B. Each part is a process with a time limit. All figures are
in `gpu.json` of `--folder`, which is rewritten after each: the same command continues where the last call ended, also
after `--minutes`. `--json` names a copy; it is read where the folder has no figures, as on a fresh machine.

A machine without network is brought its missing packages: `python benchmarks/gpu.py --wheels DIR` gathers them (18 MB)
where there is one, and `python benchmarks/gpu.py --carried DIR ...` uses them. `--report` writes the page and measures
nothing. `--small` takes the built-in model and small sizes, which show that the parts work.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import signal
import site
import subprocess
import sys
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import report
from harness.gpu_page import PEER, SMALL, page
from harness.machine import ROOT, machine
from harness.proof import Part, Proof

WORKER = [sys.executable, str(Path(__file__).parent / "workers/gpu_part.py")]
# What a machine with PyTorch, transformers and PEFT lacks, for its Python; ours are built from the tree.
CARRIED = (
    *("plotly", "pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection", "datasets"),
    *("multiprocess", "dill", "tzdata", "latex2sympy2_extended", "antlr4_python3_runtime==4.13.2", "math_verify"),
    *("text_unidecode", "arrow", "tomlkit", "tomli_w", "cookiecutter", "python_dotenv", "python_slugify"),
    *("binaryornot", "importlib_metadata", "lazy_importer", "click", "starlette", "uvicorn"),
)
TRL = "trl==1.16.0"  # for the step beside ours
OURS = ("retrain-core", "retrain-sepa", "retrain-rewards", "retrain-local")
FOLDER = Path("/var/tmp/retrain-gpu")  # stays when the place of --json is emptied
STARTED = "GPU_PROOF_STARTED_S"  # variable: when the command started, before it installed the carried wheels
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


def main() -> None:
    """Gather wheels, or measure the figures that are missing and write the page."""
    started_s = float(os.environ.setdefault(STARTED, str(time.monotonic())))
    options = _options()
    if options.wheels:
        gather(options.wheels, options.python_version)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part in progress is ended too
    if not options.report:
        _need_device(options.device)
    if options.carried:
        _install(options.carried, (options.folder / "carried").absolute())
    missing, state = [], options.folder / "gpu.json"
    if options.report:
        proof = Proof.opened(options.json or state)
    else:
        proof = Proof.opened(state, {**machine(options.device), SMALL: options.small}, copy=options.json)
        left_s = 60 * options.minutes - (time.monotonic() - started_s)
        missing = proof.run(_chosen(options), options.folder, left_s, time.monotonic)
    found = page(proof.machine, proof.parts)
    print(found)
    if options.markdown:
        report.paste(options.markdown, "gpu", found)
    if missing:
        sys.exit(f"not done: {', '.join(missing)}; the same command continues")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a copy of all figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table into this page")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call, from its start")
    parser.add_argument("--parts", nargs="+", default=[], metavar="TEXT", help="those whose name holds one of these")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of figures, models and packages, between calls")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that it works")
    parser.add_argument("--small", action="store_true", help="small sizes, only to see that it works; always on a CPU")
    parser.add_argument("--list", action="store_true", help="name the parts and their limits")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the page from --json")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="gather what a machine without network lacks")
    parser.add_argument("--python-version", default="3.12", help="of that machine")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="install what --wheels gathered, without network")
    options = parser.parse_args()
    options.small |= options.device == "cpu"
    if options.list:
        for part in plan(options.device, is_small=options.small):
            print(f"{part.limit_s:5.0f} s  {part.name}")
        sys.exit()
    return options


def plan(device: str, *, is_small: bool = False) -> list[Part]:
    """All parts, the most telling first; small ones are the same with the built-in model."""
    if is_small:
        return _plan(device, {"tiny": "tiny"}, decode=[[2, 4, 32], [1, 1, 32]], new=16, step=[2, 4, 25, 16], row=160)
    decode = [[8, 16, 1024], [8, 16, 256], [1, 16, 1024], [1, 1, 1024]]
    return _plan(
        device, {"4B": "qwen3-4b", "0.6B": "qwen3-0.6b"}, decode=decode, new=72, step=[8, 16, 256, 1024], row=10_240
    )


def _plan(
    device: str, shapes: Mapping[str, str], *, decode: list[list[int]], new: int, step: list[int], row: int
) -> list[Part]:
    first, few = next(iter(shapes)), decode[:1]

    def part(name: str, kind: str, limit_s: float, shape: str = "", **settings: Any) -> Part:
        given = {"kind": kind, "device": device, "shape": shapes.get(shape, ""), **settings}
        return Part(name=name, command=WORKER, settings=given, limit_s=limit_s)

    kv8 = {"inference": {"kv_cache_dtype": "fp8" if device == "cuda" else "int8"}}
    found = [
        part("rates", "machine_rates", 60, bytes=2**31 if device == "cuda" else 2**26),
        part("tests", "tests", 330, files=gpu_tests()),
    ]
    for name in shapes:
        found += [
            part(f"decode {name}", "sampling", 240, name, sizes=decode, new=new),
            part(f"train {name}", "optimizing", 210, name, size=step, steps=2),
            part(f"step {name}", "whole_step", 240, name, size=step, steps=2),
            part(f"generate {name}", "generating", 150, name, sizes=decode[:2], new=new),
        ]
        if name == first:
            found += [
                part(f"decode {name}, 8-bit keys and values", "sampling", 120, name, sizes=few, new=new, tables=kv8),
                part(f"16 GB {name}", "memory", 420, name, size=[*step[:3], row]),
            ]
            if importlib.util.find_spec("trl"):
                found.append(part(f"step {name}{PEER}", "peer_step", 420, name, size=step, steps=1))
    return found


def gpu_tests() -> list[str]:
    """Test files that run on a GPU alone, or otherwise in Triton's interpreter."""
    files = sorted((ROOT / "tests/retrain-local").rglob("test_*.py"))
    marks = ("pytest.mark.gpu", "@kernels_run")
    return [str(file.relative_to(ROOT)) for file in files if any(mark in file.read_text("utf-8") for mark in marks)]


def _chosen(options: argparse.Namespace) -> list[Part]:
    parts = plan(options.device, is_small=options.small)
    chosen = [part for part in parts if not options.parts or any(text in part.name for text in options.parts)]
    return chosen or sys.exit(f"no part is named {' or '.join(options.parts)}: {', '.join(p.name for p in parts)}")


def _need_device(device: str) -> None:
    """End with the reason where PyTorch sees no GPU, before anything is made."""
    if device == "cpu":
        return
    question = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else f'PyTorch {torch.__version__}')"
    asked = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False)
    if asked.returncode:
        seen = asked.stderr.strip().splitlines()[-1:] or ["PyTorch"]
        sys.exit(f"no CUDA device: {seen[0]} sees none. --device cpu shows, with small sizes, that the parts work")


def gather(folder: Path, version: str) -> None:
    """Wheels for that Python on Linux, of what the machine lacks, and ours built from this tree."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    target = ["--python-version", version, "--implementation", "cp", *_each("--platform", PLATFORMS)]
    tested = ["--constraint", str(ROOT / "constraints.txt")]
    only = ["--no-deps", "--only-binary=:all:", *tested, "--dest", str(folder)]
    subprocess.run([*pip, "download", "--quiet", *only, *target, *CARRIED, TRL], check=True)
    paths = [str(ROOT / name) for name in OURS]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), *paths], check=True)
    size = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {size / 1e6:.1f} MB in {folder}")


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _install(wheels: Path, folder: Path) -> None:
    """Start again in a virtual environment over this one in which the wheels are installed.

    PYTHONPATH would not do: our tests remove what it names.
    """
    if Path(sys.prefix) == folder:
        return
    files = [str(file) for file in sorted(wheels.glob("*.whl"))]
    if not files:
        sys.exit(f"no wheels in {wheels}: `--wheels {wheels}` gathers them where there is a network")
    contents = "".join(f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}\n" for file in files)
    python, installed = folder / "bin/python", folder / "installed"
    if not installed.exists() or installed.read_text(encoding="utf-8") != contents:
        _make_environment(folder, files)
        installed.write_text(contents, encoding="utf-8")
    os.execv(python, [str(python), *sys.argv])


def _make_environment(folder: Path, files: Sequence[str]) -> None:
    venv.create(folder, clear=True, with_pip=False)
    (ours,) = folder.glob("lib/python*/site-packages")
    # not `system_site_packages`: those of a virtual environment are not the system's
    lines = [f"import site; site.addsitedir({theirs!r})" for theirs in site.getsitepackages()]
    (ours / "beneath.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", "--ignore-installed", *files], check=True)


if __name__ == "__main__":
    main()
