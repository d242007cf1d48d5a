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

from retrain.api import ConfigError
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


def test_subjects_and_split(load: Load, folder: Path) -> None:
    loaded = load("math", path=str(folder), options={"subjects": "precalculus,intermediate_algebra", "split": "test"})
    assert [e.prompt for e in loaded.examples] == ["precalculus 9?", "intermediate_algebra 9?"]


def test_solutions_without_a_box_are_left_out_and_counted(load: Load, tmp_path: Path) -> None:
    rows = [
        row("geometry", 1),
        row("geometry", 2, "no box"),
        row("geometry", 3, r"\boxed{}"),
        row("geometry", 4, r"\boxed{"),
    ]
    (tmp_path / "geometry.jsonl").write_text(as_lines([*rows, row("geometry", 1)]))
    loaded = load("math", path=str(tmp_path), options={"subjects": ["geometry"]})
    assert len(loaded.examples) == 1
    assert any("math: 3 rows left out: no reference answer: no box in the solution" in note for note in loaded.notes)
    assert "math: 1 duplicates dropped" in loaded.notes


@pytest.mark.parametrize(
    ("subjects", "message"),
    [
        (["geometry"], "no files of subject 'geometry'"),
        (["algebra"], "no column 'solution'"),
        (["prealgebra"], "no usable task"),
    ],
)
def test_a_bad_folder_is_one_clear_error(load: Load, tmp_path: Path, subjects: list[str], message: str) -> None:
    (tmp_path / "algebra.jsonl").write_text('{"problem": "p", "answer": "1"}\n')
    (tmp_path / "prealgebra.jsonl").write_text(as_lines([row("prealgebra", 1, "nothing boxed")]))
    with pytest.raises(ConfigError, match=message):
        load("math", path=str(tmp_path), options={"subjects": subjects})


def test_missing_folder_and_foreign_keys(load: Load, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load("math", path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="not read by source 'math'"):
        load("math", path=str(tmp_path), prompt_key="problem")


@pytest.mark.parametrize(
    "options", [{"subject": ["geometry"]}, {"subjects": ["geometri"]}, {"subjects": []}, {"split": 3}]
)
def test_bad_options_are_refused(load: Load, options: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="Problem"):
        load("math", options=options)


LOAD_FROM_HUB = """
from retrain.api import Config, ConfigError, Kind, PluginContext, Seeds, load_plugins
from retrain.kernel.config.schema import DataTable
from retrain.kernel.plugins.resolve import build_part
plugins = load_plugins()
config = Config(tables={"data": DataTable(source="math", options={"subjects": ["geometry"]})})
context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins)
try:
    loaded = build_part(Kind.DATA_SOURCE, "math", "test", context, config.data.options, "test").load()
    print([e.reference for e in loaded.examples])
except ConfigError as error:
    print(error)
"""


def run_from_hub(home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env |= {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", **environ}
    return subprocess.run([sys.executable, "-c", LOAD_FROM_HUB], capture_output=True, text=True, env=env, check=True)


@pytest.mark.parametrize("environ", first_or_long([{}, {"HF_HUB_OFFLINE": "1"}, {"HF_DATASETS_OFFLINE": "1"}]))
def test_an_unreachable_hub_is_one_quick_error_without_retries(tmp_path: Path, environ: dict[str, str]) -> None:
    done = run_from_hub(tmp_path, **environ)
    assert "EleutherAI/hendrycks_math (geometry, split train) cannot be loaded" in done.stdout
    assert ("offline mode is set" if environ else "no answer from http://127.0.0.1:9") in done.stdout
    assert "set [data] path to a local copy" in done.stdout
    assert "Retry" not in done.stderr


@pytest.mark.long
def test_an_unreachable_hub_is_replaced_by_the_cache(tmp_path: Path) -> None:
    import datasets

    cached = tmp_path / "datasets" / "EleutherAI___hendrycks_math" / "geometry" / "0.0.0" / "0123456789abcdef"
    (tmp_path / "geometry.jsonl").write_text(as_lines([row("geometry", 1), row("geometry", 2)]))
    builder = datasets.load_dataset_builder(
        "json", data_files=str(tmp_path / "geometry.jsonl"), cache_dir=str(tmp_path / "c")
    )
    builder.download_and_prepare()
    cached.parent.mkdir(parents=True)
    Path(builder.cache_dir).rename(cached)
    for arrow in cached.glob("*.arrow"):
        arrow.rename(cached / "hendrycks_math-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    info |= {"dataset_name": "hendrycks_math", "config_name": "geometry", "builder_name": "parquet"}
    info["splits"]["train"]["dataset_name"] = "hendrycks_math"
    (cached / "dataset_info.json").write_text(json.dumps(info))
    done = run_from_hub(tmp_path)
    assert done.stdout.strip() == str([r"\frac{1}{2}", r"\frac{2}{2}"])
