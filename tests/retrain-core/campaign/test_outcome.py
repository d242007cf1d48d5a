"""How far a run is, from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.campaign.planned import RunProgress, progress


def test_progress_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert progress(tmp_path) == RunProgress()
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": -1, "eval_correct_rate": 0.1}\n')
    assert progress(tmp_path) == RunProgress(steps_done=0)
    with file.open("a") as stream:
        stream.write('{"step": 0, "correct_rate": 0.5}\n{"step": 1, "correct_ra')
    assert progress(tmp_path) == RunProgress(steps_done=1, correct_rate=0.5)


@given(content=st.binary(max_size=300))
def test_progress_of_anything(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_bytes(content)
    progress(folder)
