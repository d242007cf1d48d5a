"""The reader of a run: typed, lazy, and at ease with a run that has just begun, is being written or is damaged."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.errors import ConfigError
from retrain.records import record_names
from retrain.records.run import Run, is_run
from tests.kit.problems import codes_in

SOURCES = sorted(Path(__file__).parents[3].glob("retrain-core/src/**/*.py"))
NAMES = {value for name, value in vars(record_names).items() if name.isupper() and isinstance(value, str)}
ALSO_WORDS = {record_names.ADAPTERS, record_names.PATHS, record_names.RUNS}  # too common as words to be looked for


def made(folder: Path, *lines: str, manifest: dict[str, Any] | str = "") -> Run:
    folder.mkdir(exist_ok=True)
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    (folder / record_names.RUN_FILE).write_text(text or '{"config": {"training": {"max_steps": 3}}}')
    (folder / record_names.METRICS).write_text("".join(lines))
    return Run(folder)


def test_a_run_that_has_not_begun_is_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not is_run(tmp_path)
    assert not is_run(tmp_path / ("long" * 100))
    assert (run.record, run.table("training"), run.identity, run.last_step(), run.num_steps) == ({}, {}, {}, {}, 0)
    assert [*run.steps(), *run.completions(), *run.evaluations(), *run.token_steps(), *run.checkpoints()] == []
    assert run.token_arrays(0, ("tokens",)) is None
    assert run.held_out() == {}


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    lines = ['{"step": -1, "eval_correct_rate": 0.25}\n', '{"step": 0, "loss": 1.0}\n', '{"step": 1, "lo']
    run = made(tmp_path, *lines)
    assert is_run(tmp_path)
    assert [step for step, _ in run.steps()] == [-1, 0]
    assert (run.last_step(), run.num_steps) == ({"step": 0, "loss": 1.0}, 1)
    assert run.held_out() == {-1: 0.25}
    (tmp_path / record_names.METRICS).write_text("".join([*lines[:2], '{"step": 1, "loss": 2.0}\n']))
    assert (run.last_step(), run.num_steps) == ({"step": 1, "loss": 2.0}, 2)
    assert run.curves({"loss"}).column("loss").tolist()[1:] == [1.0, 2.0]
    assert run.table("training") == {"max_steps": 3}


def test_what_is_damaged_fails_who_needs_it(tmp_path: Path) -> None:
    run = made(tmp_path, '{"step": 0}\nnonsense\n{"step": 1}\n', manifest="{")
    assert run.record == {}
    with pytest.raises(ConfigError, match=r"run\.json:1"):
        assert run.manifest
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2"):
        list(run.steps())
    assert run.last_step() == {"step": 1}
    for read in (run.completions, run.evaluations):
        with pytest.raises(ConfigError) as caught:
            list(read(required=True))
        assert codes_in(caught) == ["record.unreadable"]


def test_one_module_spells_the_names_of_files() -> None:
    """Names within a sentence for people, such as the help of a command, are another matter."""
    found = []
    for file in SOURCES:
        if file.name == "record_names.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_path = node.value.startswith(f"{record_names.EMERGENCE}/") and "\n" not in node.value
                if node.value in NAMES - ALSO_WORDS or is_path:
                    found.append(f"{file.name}:{node.lineno}: {node.value}")
    assert not found, found
