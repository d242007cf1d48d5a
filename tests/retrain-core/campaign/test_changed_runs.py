"""A campaign whose code or data changed is not "already complete", and does not go on as if nothing had happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Job
from retrain.kernel.errors import ResumeError, RetrainError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.records.identity.copies import write_inputs
from retrain.run.check import identity_of
from retrain.run.configure import load_checked
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions, record
from tests.kit.problems import codes_in

Play = Callable[..., list[str]]
OWN = "own_advantage.signed+toy_flat"
CONDITIONS = conditions(OWN, "toy_raw+toy_flat")
ADVANTAGE = "from own_sign import SIGN\n\ndef signed(rewards_G):\n    return SIGN * rewards_G\n"
SIGN = '"""The side on which credit falls."""\n\nSIGN = 1\n'


class Recording:
    """A launcher whose runs record what they are made of, as a real one does, and end with `code`.

    `before(job)` is called before a run starts.
    """

    pid = None
    plugins: Plugins | None = None

    def __init__(self, code: int = 0, before: Callable[[Job], None] = lambda job: None) -> None:
        self.code, self.before = code, before
        self.started: list[str] = []
        self.argv: list[tuple[str, ...]] = []

    def start(self, job: Job) -> Recording:
        self.before(job)
        self.started.append(job.name)
        self.argv.append(job.argv)
        plugins = self.plugins = self.plugins or load_plugins({})
        checked = load_checked([next(word for word in job.argv if word.endswith(".toml"))], plugins)
        identity = identity_of(checked.config, plugins, checked.tables)
        write_inputs(job.folder, identity)
        record(job, "done" if self.code == 0 else "stopped", identity=identity.summary())
        (job.folder / "adapter/final").mkdir(parents=True, exist_ok=True)
        return self

    def poll(self) -> int:
        return self.code

    def close(self) -> None: ...


@pytest.fixture
def run(play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recording]:
    """`run("seeds = [1]", Recording(), *arguments)`: a campaign, one of whose conditions is code of the project."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("own_advantage", "own_sign"):  # of an earlier test
        monkeypatch.delitem(sys.modules, module, raising=False)
    Path("own_advantage.py").write_text(ADVANTAGE)
    Path("own_sign.py").write_text(SIGN)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "what is {i}?", "answer": "{i}"}}\n' for i in range(9)))
    base = ("--data-source", "files", "--data-path", "rows.jsonl")

    def call(
        seeds: str = "[1, 2]", launcher: Recording | None = None, *, arguments: tuple[str, ...] = (), **options: Any
    ) -> Recording:
        chosen = launcher or Recording()
        play(f"seeds = {seeds}", CONDITIONS, arguments=(*base, *arguments), launcher=chosen, **options)
        return chosen

    return call


@pytest.mark.long
def test_the_sign_of_an_advantage_flipped_after_the_campaign(
    run: Callable[..., Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(run().started) == 4
    assert run().started == []
    assert "Already complete: all 4 runs are done" in capsys.readouterr().out
    before = manifest()
    Path("own_sign.py").write_text(SIGN.replace("SIGN = 1", "SIGN = -1"))  # a module that the part imports
    for seeds in ("[1, 2]", "[1, 2, 3]"):
        with pytest.raises(ResumeError) as caught:
            run(seeds)
        told = str(caught.value)
        assert "2 of its" in told
        assert "own_sign.py:3 changed: 'SIGN = 1' is now 'SIGN = -1'" in told
        assert f"(2 runs: {OWN}_s1, done; {OWN}_s2, done)" in told
        assert "toy_raw" not in told
        assert codes_in(caught) == ["campaign.changed-inputs"]
    assert "Already complete" not in capsys.readouterr().out
    assert manifest() == before
    assert not Path("out.1").exists()
    assert run(arguments=("--resume-anyway",)).started == []
    told = capsys.readouterr().out
    assert "Already complete: all 4 runs are done" in told
    assert "made with other code or data than the present: own_sign.py:3 changed" in told
    assert sorted(run("[1, 2, 3]", arguments=("--resume-anyway",)).started) == [f"{OWN}_s3", "toy_raw+toy_flat_s3"]
    [accepted] = manifest()["accepted"]
    assert "own_sign.py:3 changed" in accepted["changes"][0]
    assert len(run(is_new=True).started) == 4
    assert manifest().get("accepted") is None


@pytest.mark.long
def test_rows_that_were_removed_change_every_run(run: Callable[..., Recording]) -> None:
    run()
    rows = Path("rows.jsonl").read_text().splitlines(keepends=True)
    Path("rows.jsonl").write_text("".join(rows[:5]))
    with pytest.raises(ResumeError) as caught:
        run()
    assert "4 of its 4 runs" in str(caught.value)
    assert "rows.jsonl:6 changed" in str(caught.value)


def test_runs_that_were_stopped_do_not_begin_anew_with_other_code(run: Callable[..., Recording]) -> None:
    with pytest.raises(RetrainError, match="4 of 4 runs failed") as failed:
        run("[1, 2]", Recording(75), arguments=("--campaign-retries", "0"))
    assert codes_in(failed) == ["campaign.failed-runs"]
    Path("own_advantage.py").write_text(ADVANTAGE.replace("SIGN *", "0 *"))
    with pytest.raises(ResumeError) as caught:
        run()
    assert "own_advantage.py:4 changed: 'return SIGN * rewards_G' is now 'return 0 * rewards_G'" in str(caught.value)
    assert f"(2 runs: {OWN}_s1; {OWN}_s2)" in str(caught.value)
    insisted = run(arguments=("--resume-anyway",))
    assert {argv[-2:] for argv in insisted.argv} == {("--resume-anyway", "true")}


@pytest.mark.long
def test_code_edited_while_the_campaign_goes_on_is_told(
    run: Callable[..., Recording], capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(job: Job) -> None:
        if job.name.endswith("_s2"):
            Path("own_sign.py").write_text(SIGN.replace("SIGN = 1", "SIGN = -1"))

    run("[1, 2]", Recording(before=edit))
    told = [line for line in capsys.readouterr().out.splitlines() if "changed during the campaign" in line]
    assert told == [f"note: changed during the campaign: own_sign.py  (1 run: {OWN}_s2, done)"]


def test_runs_of_an_earlier_version_are_counted_not_refused(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    play("seeds = [1]")
    assert play("seeds = [1, 2]") == ["grpo+toy_flat_s2", "toy_raw+toy_flat_s2"]
    told = capsys.readouterr().out
    assert "made by an earlier version that recorded no code and data: 2 runs: grpo+toy_flat_s1, done;" in told
