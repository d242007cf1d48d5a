"""`retrain.compare` says in Python what the command says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retrain
from retrain.kernel.errors import ConfigError


def test_python_says_what_the_command_says(
    made: Any, compare: Callable[..., Any], compare_json: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = made.write_campaign(tmp_path / "c", {"grpo+none": 0.0, "<i>+none": 0.1}, seeds=range(6), steps=10)
    retrain.compare(folder)  # the first look begins the ledger, and says that nothing is known before it
    found = retrain.compare(folder, metric="correct_rate:auc", align="tokens", alpha=0.1, baseline="<i>+none")
    options = ["--metric", "correct_rate:auc", "--align", "tokens", "--alpha", "0.1", "--baseline", "<i>+none"]
    assert found.data == compare_json(folder, *options)
    assert [each["verdict"] for each in found.verdicts] == ["worse"]
    assert type(found.verdicts[0]["verdict"]) is str
    told = compare(folder, *options).out
    assert [line.split() for line in repr(found).splitlines()][3:7] == [line.split() for line in told.splitlines()][2:6]
    assert "&lt;i&gt;+none" in found._repr_html_()
    assert "<i>" not in found._repr_html_()
    runs = sorted(path for path in (folder / "runs").iterdir() if path.is_dir())
    assert retrain.compare(map(retrain.load, runs[:2])).data["conditions"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": "epochs"}, r"align=\.\.\.[\s\S]*unknown budget 'epochs'[\s\S]*tokens"),
        ({"at": float("nan")}, r"at=\.\.\.[\s\S]*not a finite number"),
        ({"at": -1.0}, "not a positive"),
        ({"at": 2.5}, "2.5 is not a positive"),
        ({"alpha": 2.0}, "not between 0 and 0.5"),
        ({"last": 0}, "0 is not a number of steps"),
        ({"metric": ""}, r"metric=\.\.\.[\s\S]*is not a metric"),
    ],
)
def test_an_option_that_cannot_be_is_named_as_in_python(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        retrain.compare(tmp_path, **options)
