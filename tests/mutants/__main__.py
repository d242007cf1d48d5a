"""`python -m tests.mutants`: draw mutants, run the tests that reach their lines, print the survivors.

The score is the share of mutants that a test noticed (failed, or did not end), with the Wilson interval of 95 %. A
mutant whose tests take longer than `--limit-s` is undecided: a survivor in the first of two scores, left out of the
second. Mutants in `accepted.toml` are not drawn.
"""

from __future__ import annotations

import argparse
import ast
import json
import multiprocessing
import os
import random
import signal
import sysconfig
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

from scipy.stats import binomtest

from tests.kit.clean_environment import cleaned
from tests.mutants.forked import run_pytest
from tests.mutants.mutations import Mutant, mutant, sites
from tests.mutants.reached import Reached, measure

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("accepted.toml")
CORE = "retrain-core/src/retrain"
# Where a fault would be silent: the run finishes, and its numbers are wrong.
MUTATED = (
    f"{CORE}/credit/**/*.py",
    f"{CORE}/kernel/step.py",
    f"{CORE}/kernel/seeding.py",
    f"{CORE}/kernel/config/*.py",
    f"{CORE}/run/samplers/*.py",
    f"{CORE}/run/steps/*.py",
    f"{CORE}/run/re*.py",
    f"{CORE}/records/checkpoints.py",
    f"{CORE}/records/identity/*.py",
    f"{CORE}/tasks/scoring/*.py",
    f"{CORE}/verdicts/stats/*.py",
    f"{CORE}/verdicts/study/*.py",
    f"{CORE}/verdicts/ledger/*.py",
    "retrain-sepa/src/**/*.py",
    "retrain-local/src/retrain_local/training/*.py",
    "retrain-local/src/retrain_local/sampling/draw.py",
    "retrain-rewards/src/retrain_rewards/answers/*.py",
    "retrain-rewards/src/retrain_rewards/verifiers/*.py",
)
HERE = "not slow and not long and not gpu and not fake_gpu and not server and not client"
TEST_LIMIT_S = 60  # no quick test takes as long: a mutant that does not end is noticed
LIMIT_S = 150  # of one mutant
UNDECIDED = "undecided"
# Each of them takes a second or more to import, and holds nothing of ours.
LIBRARIES = ("torch", "transformers.models.llama.modeling_llama", "scipy.stats", "math_verify", "pydantic", "peft")
FORKS = multiprocessing.get_context("forkserver")
FILES_AT_ONCE = 40  # of the tests that reach a module only through another
MOST_TESTS = 300  # of those that reach a line, beside the tests of the module's own folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A mutant and its module."""

    file: Path
    module: str
    mutant: Mutant

    def __str__(self) -> str:
        place = f"{self.file.relative_to(ROOT)}:{self.mutant.line}"
        return f"{place}: {self.mutant.before}  ->  {self.mutant.after}"


def module_of(file: Path) -> str:
    """Return the dotted name of a source file."""
    parts = file.relative_to(ROOT).with_suffix("").parts[2:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def mutated_files() -> list[Path]:
    """Return the modules whose mutants are drawn. Kernels are run by the session `proofs`, which interprets them."""
    found = {file for pattern in MUTATED for file in ROOT.glob(pattern)}
    return sorted(file for file in found if not file.stem.endswith("_triton"))


def drawn(sample: int, seed: int) -> list[Drawn]:
    """Draw mutants without replacement, each one as likely as any other."""
    accepted = tomllib.loads(ACCEPTED.read_text(encoding="utf-8"))["mutant"]
    left_out = {(each["file"], each["before"], each["after"]) for each in accepted}
    places = [(file, site) for file in mutated_files() for site in sites(file.read_text(encoding="utf-8"))]
    random.Random(seed).shuffle(places)
    found: list[Drawn] = []
    for file, site in places:
        if len(found) == sample:
            break
        each = mutant(file.read_text(encoding="utf-8"), *site)
        name = str(file.relative_to(ROOT))
        if each.before != each.after and (name, each.before, each.after) not in left_out:
            found.append(Drawn(file=file, module=module_of(file), mutant=each))
    return found


@cache
def imports_of(file: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, of modules and of what stands in them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return frozenset(found)


@cache
def _tests() -> tuple[Path, ...]:
    return tuple(sorted(ROOT.glob("tests/**/test_*.py")))


@cache
def _sources() -> dict[str, Path]:
    return {module_of(file): file for file in sorted(ROOT.glob("retrain-*/src/**/*.py"))}


def own_folder(module: str) -> Path:
    """Return the folder of a module's own tests. Commands and hooks are found by their names, not by an import."""
    source = _sources()[module].relative_to(ROOT)
    return ROOT / "tests" / source.parts[0] / Path(*source.parts[3:-1])


def rings(module: str) -> Iterator[list[Path]]:
    """Yield the tests of a module's folder or that import it, then those that import what imports it, and so on."""
    reached, ran, folder = {module}, set[Path](), own_folder(module)
    for step in range(3):
        ring = [
            test
            for test in _tests()
            if test not in ran and (reached & imports_of(test) or (test.parent == folder and not step))
        ]
        ran |= set(ring)
        yield from (ring[start : start + FILES_AT_ONCE] for start in range(0, len(ring), FILES_AT_ONCE))
        reached |= {name for name, file in _sources().items() if reached & imports_of(file)}


def attempts(each: Drawn, reached: Reached) -> Iterator[tuple[list[Path], frozenset[str]]]:
    """Yield files of tests, and which of their tests to run: none named means all.

    First come the tests that run the mutant's line in their own process. A line that none of them runs may be run by
    a child, or while a module is imported: then all rings are tried, and otherwise the first of them.
    """
    folder = str(own_folder(each.module).relative_to(ROOT))
    is_known = not each.mutant.is_at_import
    names = reached.tests(each.file, each.mutant.line, folder=folder, most=MOST_TESTS) if is_known else []
    if names:
        files = dict.fromkeys(ROOT / name.partition("::")[0] for name in names)
        yield list(files), frozenset(names)
    for ring in rings(each.module):
        yield ring, frozenset()
        if names:
            return


def notices(each: Drawn, folder: Path, limit_s: float, reached: Reached) -> str:
    """Return which tests noticed a mutant, empty if none did, or `UNDECIDED` if they take longer than the limit."""
    mutated = folder / f"{abs(hash(str(each)))}.json"
    output = mutated.with_suffix(".txt")
    mutated.write_text(json.dumps({"module": each.module, "source": each.mutant.source}), encoding="utf-8")
    end = time.monotonic() + limit_s
    for files, names in attempts(each, reached):
        plugins = ("-p", "no:cacheprovider", "-p", "no:randomly")  # near tests first
        options = ("-x", "-q", *plugins, "--timeout", str(TEST_LIMIT_S), "-m", HERE, *map(str, files))
        process = FORKS.Process(target=run_pytest, args=(options, names, mutated, output))
        process.start()
        process.join(max(10, end - time.monotonic()))
        if process.exitcode is None:
            with suppress(ProcessLookupError):  # it has not begun
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
            return UNDECIDED
        if process.exitcode not in (0, 5):  # 5: no test has the mark
            lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
            failed = [text for text in lines if text.startswith(("FAILED tests", "ERROR tests"))]
            return failed[0] if failed else "pytest did not start"
    return ""


def run(chosen: Sequence[Drawn], jobs: int, limit_s: float, reached: Reached) -> tuple[list[Drawn], list[Drawn]]:
    """Try each mutant, print it as it is settled, and return the survivors and the undecided."""
    FORKS.set_forkserver_preload(list(LIBRARIES))
    packages = Path(sysconfig.get_path("purelib"))
    hook, path = packages / "retrain_mutant_hook.py", packages / "retrain_mutant_hook.pth"
    hook.write_text(Path(__file__).with_name("hook.py").read_text(encoding="utf-8"), encoding="utf-8")
    path.write_text("import retrain_mutant_hook\n", encoding="utf-8")
    survivors, undecided, settled, lock = list[Drawn](), list[Drawn](), 0, Lock()

    def settle(each: Drawn) -> None:
        nonlocal settled
        by = notices(each, Path(folder), limit_s, reached)
        with lock:
            settled += 1
            if by == UNDECIDED:
                undecided.append(each)
            elif not by:
                survivors.append(each)
            outcome = by if by == UNDECIDED else "noticed" if by else "SURVIVED"
            print(f"{settled:4}/{len(chosen)} {outcome:9} {each}  {by}", flush=True)

    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
            list(pool.map(settle, chosen))
    finally:
        hook.unlink()
        path.unlink()
    return survivors, undecided


def main() -> None:
    """Draw, run, print the survivors and the score."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of one mutant; more on a slow machine")
    parser.add_argument("--reached", type=Path, help="Which tests reach which line; measured if there is no such file.")
    given = parser.parse_args()
    begin = time.monotonic()
    environ = cleaned(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    chosen = drawn(given.sample, given.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = given.reached or Path(folder) / "reached"
        if not file.exists():
            measure(file, mutated_files(), options=("-m", HERE, "-n", str(given.jobs)))
        survivors, undecided = run(chosen, given.jobs, given.limit_s, Reached(file))
    noticed = len(chosen) - len(survivors) - len(undecided)
    for title, found in (("survivors", survivors), ("undecided", undecided)):
        print(f"\n{title}:", *(f"  {each}" for each in sorted(found, key=str)), sep="\n")
    for of, count in (("drawn", len(chosen)), ("decided", len(chosen) - len(undecided))):
        low, high = binomtest(noticed, count).proportion_ci(method="wilson") if count else (0.0, 1.0)
        print(f"{noticed} of {count} {of} noticed: {noticed / max(1, count):.1%} [{low:.1%}, {high:.1%}]")
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes, seed {given.seed}")


if __name__ == "__main__":
    main()
