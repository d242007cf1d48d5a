from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit.problems import codes_in, refused
from tests.kit.shared import first_or_long

Load = Callable[..., Any]
SUBJECTS = ["intermediate_algebra", "precalculus", "number_theory", "counting_and_probability", "geometry"]


def row(subject: str, number: int, solution: str | None = None) -> dict[str, str]:
    text = rf"Thus \boxed{{\frac{{{number}}}{{2}}}}." if solution is None else solution
    return {"problem": f"{subject} {number}?", "level": "Level 5", "type": subject.title(), "solution": text}


def as_lines(rows: list[dict[str, str]]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Each default subject in another of the accepted layouts, with a test split beside some."""
    root = tmp_path / "math"
    rows = {subject: [row(subject, 1), row(subject, 2)] for subject in SUBJECTS}
    for subject in SUBJECTS[:2]:
        (root / subject).mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows[subject]), root / subject / "train-00000-of-00001.parquet")
        pq.write_table(pa.Table.from_pylist([row(subject, 9)]), root / subject / "test-00000-of-00001.parquet")
    (root / SUBJECTS[2]).mkdir()
    (root / SUBJECTS[2] / "all.jsonl").write_text(as_lines(rows[SUBJECTS[2]]))
    (root / f"{SUBJECTS[3]}.jsonl").write_text(as_lines(rows[SUBJECTS[3]]))
    (root / "train").mkdir()
    (root / "train" / f"{SUBJECTS[4]}.jsonl").write_text(as_lines(rows[SUBJECTS[4]]))
    return root


def test_a_local_folder_of_the_default_subjects(load: Load, folder: Path) -> None:
    loaded = load("math", path=str(folder))
    assert [e.task for e in loaded.examples] == [s for s in SUBJECTS for _ in range(2)]
    assert loaded.examples[0].reference == r"\frac{1}{2}"
    assert loaded.examples[0].prompt == "intermediate_algebra 1?"
    assert loaded.examples[0].info == {"level": "Level 5", "type": "Intermediate_Algebra"}
    assert loaded.notes[0].startswith("math: 10 rows from")
    loaded = load("math", path=str(folder), options={"subjects": "precalculus,intermediate_algebra", "split": "test"})
    assert [e.prompt for e in loaded.examples] == ["precalculus 9?", "intermediate_algebra 9?"]
    for options in ({"subject": ["geometry"]}, {"subjects": ["geometri"]}, {"subjects": []}, {"split": 3}):
        with pytest.raises(AssertionError, match="Problem"):
            load("math", options=options)


def test_solutions_without_a_box_are_left_out_and_counted(load: Load, tmp_path: Path) -> None:
    rows = [row("geometry", number, text) for number, text in ((1, None), (2, "no"), (3, r"\boxed{}"), (4, r"\boxed{"))]
    (tmp_path / "geometry.jsonl").write_text(as_lines([*rows, row("geometry", 1)]))
    loaded = load("math", path=str(tmp_path), options={"subjects": ["geometry"]})
    assert len(loaded.examples) == 1
    assert any("math: 3 rows left out: no reference answer: no box in the solution" in note for note in loaded.notes)
    assert "math: 1 duplicates dropped" in loaded.notes


@pytest.mark.parametrize(
    ("subject", "code"),
    [
        ("geometry", "data.subject-missing"),
        ("prealgebra", "data.no-tasks"),
        ("nowhere", "data.path-missing"),
        ("keys", "data.unread-key"),
    ],
)
def test_a_bad_folder_is_one_clear_error(load: Load, tmp_path: Path, subject: str, code: str) -> None:
    (tmp_path / "prealgebra.jsonl").write_text(as_lines([row("prealgebra", 1, "nothing boxed")]))
    keys: dict[str, Any] = {"prompt_key": "problem"} if subject == "keys" else {"options": {"subjects": [subject]}}
    if subject == "nowhere":
        keys = {}
    assert refused(load, "math", path=str(tmp_path / "nowhere" if subject == "nowhere" else tmp_path), **keys) == [code]


@pytest.mark.parametrize("environ", first_or_long([{}, {"HF_HUB_OFFLINE": "1"}, {"HF_DATASETS_OFFLINE": "1"}]))
def test_an_unreachable_hub_is_one_quick_error_without_retries(tmp_path: Path, environ: dict[str, str]) -> None:
    code = (
        "from retrain_rewards.sources.rows import hub_rows\nfrom retrain.api import ConfigError\n"
        "try: list(hub_rows('EleutherAI/hendrycks_math', 'geometry', 'train', where=''))\n"
        "except ConfigError as error: print(error)"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", **environ}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert codes_in(done.stdout) == ["data.hub-unavailable"]
    assert ("offline mode is set" if environ else "no answer from http://127.0.0.1:9") in done.stdout
    assert "Retry" not in done.stderr
