"""The suite of recorders: accept everything that a run records, and release it however the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.records.manifest import build_manifest
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_plain_state, expect_unchanged
from retrain.testing.toys import lines, write_toy_adapter

RESUME_AT = 5


def records_a_whole_run(bench: Bench) -> None:
    """It accepts a start, every line of a run with absent and null fields, a checkpoint, and the end."""
    recorder, folder = bench.build(), _run_folder(bench)
    recorder.start(_manifest(bench), folder)
    for line in lines():
        recorder.step(line)
    if hasattr(recorder, "checkpoint"):
        adapter = bench.folder / "checkpoint"
        adapter.mkdir()
        write_toy_adapter(adapter)
        recorder.checkpoint(adapter, "step_000030")
    recorder.finish(None)


def lets_go_of_a_run_that_failed(bench: Bench) -> None:
    """`finish` accepts the error that ended the run, whether or not any step came before."""
    for count in (0, 3):
        recorder = bench.build()
        recorder.start(_manifest(bench), _run_folder(bench, f"failed-{count}"))
        for line in lines()[:count]:
            recorder.step(line)
        recorder.finish(RuntimeError("the run broke"))


def can_be_finished_before_it_started(bench: Bench) -> None:
    """`finish` works even when `start` raised."""
    bench.build().finish(RuntimeError("start failed"))


def leaves_lines_alone(bench: Bench) -> None:
    """It does not modify the lines and the manifest it receives."""
    recorder, manifest, before = bench.build(), _manifest(bench), _manifest(bench)
    recorder.start(manifest, _run_folder(bench))
    for line in lines()[:3]:
        given = dict(line)
        recorder.step(given)
        what = f"the line of step {line['step']}"
        expect_unchanged(given == line, what, why="every other recorder gets the same line")
    recorder.finish(None)
    is_same = {**manifest, "started": ""} == {**before, "started": ""}
    expect_unchanged(is_same, "the manifest", why="other recorders read it too")


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored from its state, after a JSON round trip, it records the rest of the run into the same folder."""
    recorder, folder = bench.build(), _run_folder(bench)
    recorder.start(_manifest(bench), folder)
    for line in lines()[:RESUME_AT]:
        recorder.step(line)
    state = expect_plain_state(recorder) if hasattr(recorder, "state") else None
    recorder.finish(RuntimeError("killed"))
    resumed = bench.build()
    if state:
        expect(
            hasattr(resumed, "restore"),
            f"state() returns {state!r:.100}, and there is no restore()",
            why="the state in a checkpoint would be lost",
            fix="add restore(self, state)",
        )
        resumed.restore(state)
    resumed.start(_manifest(bench), folder)
    for line in lines()[RESUME_AT:]:
        resumed.step(line)
    resumed.finish(None)


def _manifest(bench: Bench) -> dict[str, Any]:
    return build_manifest(bench.config, bench.plugins, seed=1, condition="toy")


def _run_folder(bench: Bench, name: str = "run") -> Path:
    folder = bench.folder / name
    folder.mkdir(exist_ok=True)
    return folder
