"""Data from Python: a list, a DataFrame or a data set is read as the file with the same rows would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest

import retrain
from retrain.facade.hosting import data_file, rows_of
from retrain.kernel.errors import ConfigError
from tests.kit.problems import codes_in

ROWS = [{"Q": "One?", "gold": "007"}, {"Q": "Two?", "gold": "2"}]


class Polars:
    """What is used of a polars DataFrame."""

    def to_dicts(self) -> list[dict[str, Any]]:
        return ROWS

    def __iter__(self) -> Any:
        raise AssertionError("iterating gives columns")


@pytest.mark.parametrize(
    "form",
    [list, tuple, iter, pd.DataFrame, datasets.Dataset.from_list, lambda rows: Polars()],
    ids=["list", "tuple", "iterator", "pandas", "datasets", "polars"],
)
def test_every_form_of_rows_becomes_the_same_file(form: Callable[[Any], Any], tmp_path: Path) -> None:
    file = Path(data_file(form(ROWS), tmp_path, "data"))
    assert list(map(json.loads, file.read_text().splitlines())) == ROWS
    assert file == Path(data_file(ROWS, tmp_path, "data"))
    assert data_file(tmp_path / "mine.csv", tmp_path, "data") == str(tmp_path / "mine.csv")


def test_values_are_plain_and_integers_stay_integers() -> None:
    frame = pd.DataFrame({"n": [7, None], "x": [1.5, np.nan], "day": [pd.Timestamp("2024-01-01"), pd.NaT]})
    frame["chat"] = [np.array([{"role": "user", "n": np.int64(1)}]), None]
    first = {"n": 7, "x": 1.5, "day": "2024-01-01 00:00:00", "chat": [{"role": "user", "n": 1}]}
    assert rows_of(frame, "data") == [first, dict.fromkeys(first)]
    assert json.dumps(rows_of(frame, "data")[0]["n"]) == "7"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ([], "data.no-rows"),
        ({"train": ROWS}, "data.no-split"),
        (["One?"], "data.row-not-dict"),
        *((data, "data.not-rows") for data in (3, b"rows")),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "data.column-twice"),
    ],
)
def test_what_holds_no_rows_is_refused(data: Any, code: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        data_file(data, tmp_path, "data")
    assert codes_in(caught) == [code]
    assert not list(tmp_path.iterdir())


def test_a_run_on_rows_is_evaluated_and_sampled_on_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"Q": f"{n} + {n}?", "gold": {"text": str(2 * n)}} for n in range(8)]
    config = {
        "model": {"model": "builtin:tiny", "lora_rank": 2},
        "training": {"max_steps": 1, "batch_size": 1, "group_size": 2, "max_tokens": 4},
        "reward": {"type": "match"},
        "scoring": {"audit": "off"},
    }
    with pytest.raises(ConfigError, match=r"(?s)no column 'golden.text'.*columns: Q, gold, gold.text.*use 'gold.text'"):
        retrain.train(config, data=rows, quiet=True, prompt_key="Q", answer_key="golden.text")
    run = retrain.train(config, data=rows, quiet=True, prompt_key="Q", answer_key="gold.text")
    assert run.config["data"]["path"].startswith(str(tmp_path / "logs/data"))
    others = pd.DataFrame([{"Q": f"{n} + 1?", "gold": {"text": str(n + 1)}} for n in range(4)])
    assert run.evaluate(data=others, greedy=True)[0]["set"] == "data"
    renamed = others.rename(columns={"Q": "ask"})
    assert run.evaluate(data=renamed, prompt_key="ask", examples=2)[0]["set"] == "data"
    with pytest.raises(ConfigError, match=r"(?s)no column 'Q'.*columns: ask"):
        run.evaluate(data=renamed)
    assert [entry["prompt"] for entry in run.sample(others)] == list(others["Q"])
    assert [entry["prompt"] for entry in run.sample(renamed, prompt_key="ask")] == list(others["Q"])
