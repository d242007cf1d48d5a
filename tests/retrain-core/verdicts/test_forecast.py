"""`retrain status --forecast` on runs on disk: what it says, refuses, logs, settles, withdraws; it stops nothing."""

import json
import shutil

import pytest

from retrain.verdicts.forecast import FILE, Track
from tests.kit.problems import codes_in

STEPS, EVERY = 8, 2


@pytest.fixture
def write(made, tmp_path):
    """`write(name, lr=..., seed=...)`: a run whose rates rise with `lr`, evaluated every second step of eight."""

    def run(name, *, lr, seed=1, done=True, end=None, **model):
        steps = STEPS if done else STEPS // 2
        config = {"training": {"lr": lr}, "model": {"model": "builtin:tiny"} | model}
        status = "done" if done else "interrupted"
        file = made.MadeRun(seed=seed, steps=steps, max_steps=STEPS, eval_every=EVERY, status=status, config=config)
        folder = made.write_run(tmp_path / "logs" / name, file)
        last = 0.5 + 40 * lr + 0.01 * seed if end is None else end
        rates = {step: 0.4 + (last - 0.4) * (step + 1) / STEPS for step in range(-1, STEPS) if (step + 1) % EVERY == 0}
        rows = [{"step": -1, "eval_correct_rate": 0.4}]
        rows += [{"step": step, "correct_rate": 0.5} for step in range(steps)]
        rows = [row | ({"eval_correct_rate": rates[row["step"]]} if row["step"] in rates else {}) for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return run


@pytest.fixture
def forecast(command):
    """`forecast(run, ...)`: the result of the command."""
    return lambda *arguments: command("status", *map(str, arguments), "--forecast")


@pytest.fixture
def runs(write):
    """Five conditions of two finished runs, and one of a sixth that is half way; its folder."""
    for number in range(5):
        for seed in (1, 2):
            write(f"c{number}s{seed}", lr=1e-3 * (1 + number), seed=seed)
    return write("now", lr=3.5e-3, done=False)


def noted(tmp_path):
    file = tmp_path / "logs" / FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_forecast_and_what_it_rests_on(runs, forecast, tmp_path):
    result = forecast(runs, "--json")
    assert (result.code, result.err) == (0, "")
    data = json.loads(result.out)
    assert (data["step"], data["max_steps"], data["runs"], data["conditions"]) == (4, 8, 10, 5)
    assert data["interval"][0] <= 0.65 <= data["interval"][1]
    assert data["check"]["runs"] == 10
    told = forecast(runs).out
    assert "Held-out rate after 8 steps, forecast after 4: 6" in told
    assert "From 10 finished runs of 5 conditions" in told
    assert "a planned run continues to its end" in told
    [record] = noted(tmp_path)  # asked twice, said once
    assert record["run"] == "now"
    assert [record["low"], record["high"]] == data["interval"]


def test_too_few_conditions_are_counted_not_runs(write, forecast, tmp_path):
    for number in range(3):
        for seed in range(4):
            write(f"c{number}s{seed}", lr=1e-3 * (1 + number), seed=seed)
    run = write("now", lr=9e-3, done=False)
    write("other", lr=7e-3, model="another")
    refused = forecast(run)
    assert (refused.code, refused.out, codes_in(refused.err)) == (2, "", ["forecast.too-few-conditions"])
    for part in ("3 conditions have", "1 finished runs do not match", "a 80 % interval needs 4", "runs of 1 more"):
        assert part in refused.err
    assert noted(tmp_path) == []
    assert forecast(run, "--level", "0.7").code == 0


def test_what_came_true_is_logged_and_told(runs, write, forecast, tmp_path):
    low, high = json.loads(forecast(runs, "--json").out)["interval"]
    shutil.rmtree(runs)
    write("now", lr=3.5e-3, end=(low + high) / 2)
    ended = forecast(runs)
    assert f"The run has ended: its held-out rate is {50 * (low + high):.1f}%" in ended.out
    assert "Of 1 runs forecast here that have ended, the interval held for 1." in ended.out
    assert [(each["event"], each.get("held")) for each in noted(tmp_path)] == [("forecast", None), ("came_true", True)]
    forecast(runs)
    assert len(noted(tmp_path)) == 2


def test_forecasts_that_did_not_hold_withdraw_the_next(runs, forecast, tmp_path):
    file = tmp_path / "logs" / FILE
    about = {"event": "came_true", "time": "2026-03-01T12:00:00+00:00", "started": "then", "step": 4, "rate": 0.1}
    lines = [about | {"run": f"r{n}", "level": 0.8, "held": n < 2} for n in range(8)]
    lines += [lines[-1] | {"step": 6, "held": True}]  # of each run the first forecast counts
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = file.read_bytes()
    assert Track(level=0.8, held=4, ended=8).is_withdrawn is False
    withdrawn = forecast(runs)
    assert (withdrawn.code, withdrawn.out, codes_in(withdrawn.err)) == (2, "", ["forecast.withdrawn"])
    assert "forecasts of 80 % are withdrawn: 2 of 8 intervals held" in withdrawn.err
    assert file.read_bytes() == before  # it said nothing
    assert forecast(runs, "--level", "0.7").code == 0  # of another promise nothing is known yet


def test_forecasts_are_withdrawn_soon_if_they_fail():
    first = next(n for n in range(1, 50) if Track(level=0.8, held=0, ended=n).is_withdrawn)
    half = next(n for n in range(2, 100, 2) if Track(level=0.8, held=n // 2, ended=n).is_withdrawn)
    assert first == 3
    assert half <= 20
    assert not Track(level=0.8, held=0, ended=0).is_withdrawn
    assert not Track(level=0.999, held=900, ended=900).is_withdrawn


def test_hostile_folders(runs, forecast, tmp_path):
    assert codes_in(forecast(tmp_path / "nowhere").err) == ["forecast.no-such-run"]
    (tmp_path / "logs/c0s1/metrics.jsonl").write_text("damaged\n")  # a past run that cannot be read is of no use
    assert json.loads(forecast(runs, "--json").out)["runs"] == 9
    (tmp_path / "logs" / FILE).write_text('{"event": "forecast", "run": "../../etc", "low": "x"}\n')
    damaged = forecast(runs)
    assert (damaged.code, codes_in(damaged.err)) == (2, ["record.unreadable"])
    assert f"{FILE}:1" in damaged.err
    (tmp_path / "logs" / FILE).unlink()
    (runs / "metrics.jsonl").write_text('{"step": 0, "correct_rate": 0.5}\n')
    assert codes_in(forecast(runs).err) == ["forecast.no-evaluation"]
