"""Every line that the documentation says to type runs in a clean environment, or is listed with a reason."""

from __future__ import annotations

import ast
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.clean_environment import (
    CAMPAIGN,
    NAMES_THE_CLONE,
    OURS,
    SEEDED,
    Installed,
    make_environment,
    make_stage,
)
from tests.docs.command_plan import (
    EXIT_CODES,
    FULL_LENGTH,
    GIVEN,
    IN_ORDER,
    NOT_RUN,
    SHOWN,
    lines_to_run,
    pages_to_run,
    stands_for,
)
from tests.docs.reading import FENCE, PAGES, ROOT, SHELL, SITE, commands_of, name_of, text_of, typed_lines

# A command in an indented block would be typed by people and seen by no test.
INDENTED = re.compile(r"^ {4}(?:\$ )?(?:pip|retrain|python|nox|pytest|\. |source )\b.*", re.MULTILINE)
START = SITE / "try-it.md"
FOUR = {"retrain-core", "retrain-sepa", "retrain-rewards", "retrain-local"}
WORKERS = min(2, os.cpu_count() or 1)


def _extras(name: str) -> set[str]:
    project = tomllib.loads((ROOT / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"", *project.get("optional-dependencies", {})}


def _sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


def faults_of(words: list[str]) -> Iterator[str]:
    """What can be said against a command of pip, nox or Python without running it."""
    if words[:2] == ["python", "-m"]:
        words = words[2:]
    if words[:2] == ["pip", "install"]:
        for name, extras in re.findall(r"(?:^|[ /])(retrain-[\w-]+)(?:\[([^\]]*)\])?", " ".join(words[2:])):
            if name not in OURS:
                yield f"there is no distribution {name}"
            else:
                yield from (f"{name} has no extra {each}" for each in extras.split(",") if each not in _extras(name))
    elif words[:1] == ["nox"] and "-s" in words:
        named = words[words.index("-s") + 1 : words.index("--") if "--" in words else None]
        yield from (f"there is no session {each}" for each in named if each not in _sessions())
    elif words[:1] == ["python"] and len(words) > 1 and not (ROOT / words[1]).is_file():
        yield f"there is no file {words[1]}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_of_pip_nox_and_python_name_what_exists(page: Path) -> None:
    for line in typed_lines(page):
        assert not [fault for words in commands_of(line) for fault in faults_of(words)], line


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("pip install retrain-cor", "no distribution retrain-cor"),
        ('pip install -e "./retrain-core[rai]"', "no extra rai"),
        ("python -m pip install nox && python -m nox -s test", "no session test"),
        ("nox -s test -- --hours 1", "no session test"),
        ("python benchmarks/stepp.py", "no file benchmarks/stepp.py"),
    ],
)
def test_a_wrong_command_would_be_found(line: str, wanted: str) -> None:
    assert any(wanted in fault for words in commands_of(line) for fault in faults_of(words))


# A command in a block of text would be typed by people and seen by no test; verl's are not ours, generated ones parse.
TYPED = re.compile(r"^\s*(?:\$ )?(?:retrain (?!\.\.\.)|pip |nox |python3? -m (?!verl)).*", re.MULTILINE)
GENERATED = re.compile(r"<!-- generated: .*?<!-- end: ", re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_in_text_or_an_indented_block(page: Path) -> None:
    assert not INDENTED.findall(FENCE.sub("", text_of(page)))
    for match in FENCE.finditer(GENERATED.sub("", text_of(page))):
        assert match["language"] in SHELL or not TYPED.findall(match["body"]), match["body"]


def test_every_entry_of_the_lists_is_a_line_of_its_page() -> None:
    lines = {name_of(page): typed_lines(page) for page in PAGES}
    for page, entries in NOT_RUN.items():
        for entry, why in entries.items():
            assert sum(stands_for(entry, line) for line in lines[page]) == 1, (page, entry)
            assert why, (page, entry)
            assert all((ROOT / file).exists() for file in re.findall(r"(?:tests/[\w/.-]+|\.ci/run)", why)), why
    for page, codes in EXIT_CODES.items():
        assert set(codes) <= set(lines[page])
    assert {*IN_ORDER, *SHOWN, *GIVEN, FULL_LENGTH} <= set(lines)
    assert set(IN_ORDER) <= {name_of(page) for page in pages_to_run()}


# Files and runs that a line may read, the options before those that it writes, and what the templates lead to.
MAY_BE_READ = re.compile(r"[\w./-]+\.(?:toml|jsonl|csv|txt)|logs/[\w/.-]+")
WRITES = ("-o", "--log-dir", "--out")
FROM_TEMPLATES = {"init --template tiny": "logs/tiny", "init --template campaign-tiny": "campaign.toml"}


def test_a_line_finds_the_files_and_runs_that_it_names(tmp_path: Path) -> None:
    """Without typing anything: each is there from the start, or an earlier line makes it."""
    installed, missing = Installed(folder=tmp_path, clone=ROOT, stage=tmp_path / "stage"), []
    runs = ["logs/tiny", *(f"{CAMPAIGN}/{number}" for number in range(len(SEEDED)))]
    for name in ("retrain.toml", "campaign.toml", *(f"{run}/metrics.jsonl" for run in runs)):
        (installed.stage / name).parent.mkdir(parents=True, exist_ok=True)
        (installed.stage / name).touch()
    for page in pages_to_run():
        folder = installed.folder_for(page, typed_lines(page), tmp_path / name_of(page))
        made: set[str] = set()
        for line in lines_to_run(page):
            made |= {name for template, name in FROM_TEMPLATES.items() if template in line}
            words = [] if any(name in line for name in NAMES_THE_CLONE) else shlex.split(line)
            for before, name in pairwise(["", *(word.rpartition("=")[2] for word in words)]):
                if before in WRITES:
                    made.add(name)
                elif MAY_BE_READ.fullmatch(name) and not (folder / name).exists() and not name.startswith(tuple(made)):
                    missing.append(f"{name_of(page)}: {name} of: {line}")
    assert not missing, "\n".join(missing)


# ---------------------------------------------------------------- in a clean environment


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What README and Getting started say to install, typed as they say it, and nothing else."""
    environment = make_environment(tmp_path_factory.mktemp("documented"))
    (from_the_clone,) = [line for line in typed_lines(ROOT / "README.md") if line.endswith("./retrain-local")]
    environment.must(from_the_clone)
    assert environment.distributions() == FOUR
    environment.must("retrain --version")
    environment.must(f"pip uninstall --yes {' '.join(sorted(FOUR))}")
    (wheels,) = [line for line in typed_lines(START) if line.startswith("pip wheel ")]
    (by_name,) = [line for line in typed_lines(START) if line.startswith("pip install --find-links dist ")]
    environment.must(wheels)
    environment.must(by_name)
    environment.typed.update([from_the_clone, wheels, by_name])
    assert environment.distributions() == FOUR
    environment.must("pip check")
    make_stage(environment)
    return environment


def _type_page(installed: Installed, page: Path, folder: Path) -> list[str]:
    """Type the lines of a page one after another in a new folder; what failed, with what it printed."""
    failed = []
    here = installed.folder_for(page, typed_lines(page), folder)
    for line in lines_to_run(page):
        if line in installed.typed:  # the environment was made with it
            continue
        done = installed.type(line, at=here, is_short=name_of(page) != FULL_LENGTH)
        if done.returncode != EXIT_CODES.get(name_of(page), {}).get(line, 0):
            failed.append(f"{name_of(page)}: {line}\nexit code {done.returncode}\n{done.stdout[-3000:]}")
    return failed


def _type_pages(installed: Installed, pages: Sequence[Path], folder: Path) -> list[str]:
    """Type the lines of these pages; what failed. Pages that change the environment come last, one after another."""
    by_name = {name_of(page): page for page in pages}
    free = [page for name, page in by_name.items() if name not in IN_ORDER]

    def run(page: Path) -> list[str]:
        return _type_page(installed, page, folder / name_of(page).replace("/", "-"))

    with ThreadPoolExecutor(WORKERS) as workers:
        failed = [each for found in workers.map(run, free) for each in found]
    assert installed.distributions() == FOUR  # what follows installs the others
    return failed + [each for name in IN_ORDER if name in by_name for each in run(by_name[name])]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_documented_line_works_in_a_clean_environment(installed: Installed, tmp_path: Path) -> None:
    failed = _type_pages(installed, pages_to_run(), tmp_path)
    assert not failed, f"{len(failed)} lines\n\n" + "\n\n".join(failed)
