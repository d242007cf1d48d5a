"""Which versions of retrain-core a distribution accepts, in every spelling that metadata allow."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from retrain import __version__
from retrain.kernel.plugins.requirement import unmet_requirement


def required(line: str, folder: Path) -> Distribution:
    """A distribution with one requirement."""
    head = "Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n"
    (folder / "METADATA").write_text(f"{head}Requires-Dist: numpy>=99\nRequires-Dist: {line}\n", encoding="utf-8")
    return Distribution.at(folder)


@pytest.mark.parametrize(
    "line",
    [
        "retrain-core",
        "retrain-core>=0.0.1",
        "retrain-core[wandb]>=0.0.1,<99",
        f"retrain-core=={__version__}",
        "Retrain_Core (>=0.0.1)",
        'retrain-core>=99; extra == "next"',
        "retrain-core-extras>=99",
        "retrain>=99",
    ],
)
def test_a_requirement_that_is_met_or_no_matter_says_nothing(line: str, tmp_path: Path) -> None:
    assert unmet_requirement(required(line, tmp_path)) == ""


@pytest.mark.parametrize(
    "line",
    [
        "retrain-core>=99",
        "retrain-core<0.0.1",
        "retrain_core == 99.0",
        "retrain.core[ray]>=99,<100",
        "retrain-core (>=99)",
    ],
)
def test_a_requirement_that_is_not_met_is_told_with_both_versions_and_the_fix(line: str, tmp_path: Path) -> None:
    told = unmet_requirement(required(line, tmp_path))
    assert "it requires retrain-core " in told
    assert f"and this is {__version__}" in told
    assert "fix: pip install --upgrade theirs" in told


def test_a_requirement_that_cannot_be_read_is_not_met(tmp_path: Path) -> None:
    assert "requires retrain-core newest" in unmet_requirement(required("retrain-core newest", tmp_path))


def test_a_distribution_without_requirements_is_fine(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n", encoding="utf-8")
    assert unmet_requirement(Distribution.at(tmp_path)) == ""
