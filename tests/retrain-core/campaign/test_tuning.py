"""A tuned campaign searches with the same budget for each condition, keeps what it chose, and survives a kill."""

import json
import math
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.campaign.search import Search
from retrain.campaign.tune_checks import most_held_out
from retrain.kernel.errors import ConfigError
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from retrain.verdicts.wording.verdict_line import answer
from tests.end_to_end.campaigns import manifest
from tests.kit.campaigns import conditions, record
from tests.kit.problems import codes_in

TWO = conditions("grpo+toy_flat", "toy_raw+toy_flat")
LR = '"training.lr" = { low = 1e-4, high = 1e-1, log = true }'
EVAL = "[eval]\nexamples = 2\n"
SEEDS = "seeds = [1, 2]\nparallel = true\n"


class Learns:
    """A launcher whose runs are at their best with a learning rate of 0.01; the machine dies at one of its starts."""

    def __init__(self, *, dies_at=0, failing=""):
        self.started, self.dies_at, self.failing = [], dies_at, failing

    def start(self, job):
        self.started.append(job.name)
        if len(self.started) == self.dies_at:
            raise KeyboardInterrupt
        config = tomllib.loads((job.folder.parent.parent / "configs" / f"{job.name}.toml").read_text())
        seed, steps, lr = (config["training"][name] for name in ("seed", "max_steps", "lr"))
        fails = bool(self.failing) and self.failing in job.name
        record(job, "failed" if fails else "done", seed=seed, config=config, condition=job.name)
        rate = 0.9 - 0.1 * abs(math.log10(lr / 0.01)) - 0.5 / (1 + steps)
        lines = ({"step": step, "sampled_tokens": 10, "eval_correct_rate": rate} for step in range(steps))
        (job.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (job.folder / "adapter/final").mkdir(parents=True, exist_ok=True)
        return type("Ended", (), {"pid": None, "poll": lambda self: int(fails)})()

    def close(self): ...


@pytest.fixture
def tuned(play):
    """`tuned(options, launcher=Learns())`: the names of the runs that a campaign with [campaign.tune] started."""

    def call(options="runs = 6\nseeds = [7]", conditions=TWO, *, launcher=None, keys=LR, **more):
        table = f"[campaign.tune]\n{keys}\n{options}\n"
        return play(f"{SEEDS}{table}", f"{conditions}\n{EVAL}", launcher=launcher or Learns(), **more)

    return call


def config_of(folder, name):
    return tomllib.loads(Path(folder, "configs", f"{name}.toml").read_text())


def test_each_final_seed_runs_the_best_of_its_own_share(tuned):
    started = tuned()
    assert len(started) == 2 * 6 + 2 * 2
    tuning = manifest()["tuning"]
    assert (tuning["runs"], tuning["choice"], tuning["seeds"]) == (6, "per_seed", [7])
    first, second = tuning["conditions"].values()
    assert [each["values"] for each in first["trials"]] == [each["values"] for each in second["trials"]]
    assert (first["runs"], first["tokens"]) == (6, 6 * 4 * 10)
    for seed in (1, 2):
        share = [each for each in first["trials"] if each["for_seed"] == seed]
        best = max(share, key=lambda each: each["value"])["values"]
        assert len(share) == 3
        assert {"for_seed": seed, "values": best} in first["chosen"]
        for label in ("grpo+toy_flat", "toy_raw+toy_flat"):
            final = config_of("out", f"{label}_s{seed}")
            assert final["training"]["lr"] == best["training.lr"]
            assert (final["training"]["seed"], final["eval"]["skip"], final["eval"]["examples"]) == (seed, 0, 2)
    trial = config_of("out/tuning", "grpo+toy_flat~tune1.0_s7")
    assert (trial["training"]["seed"], trial["eval"]["skip"], trial["eval"]["examples"]) == (7, 2, 2)
    kinds = [json.loads(line)["kind"] for line in Path("ledger.jsonl").read_text().splitlines()]
    assert kinds.count("attempt_started") == 16
    assert kinds.index("tuned") < len(kinds) - 4
    assert tuned() == []


@pytest.mark.parametrize(
    "options",
    [
        'runs = 6\nseeds = [7]\nsampler = "quasi_random"',
        'runs = 12\nseeds = [7, 8]\nsampler = "tpe"\nchoice = "best"',
        'runs = 8\nseeds = [7]\npruner = "halving"\nmin_steps = 1\nreduction_factor = 2\nchoice = "best"',
        'tokens = 200\nseeds = [7]\nchoice = "best"',
    ],
)
def test_a_killed_search_comes_to_the_same_choices(tuned, options):
    started = tuned(options, launcher=Learns())
    whole = manifest()["tuning"]
    Path("out").rename("whole")
    for dies_at in (3, 6):
        with pytest.raises(KeyboardInterrupt):
            tuned(options, launcher=Learns(dies_at=dies_at))
    journal = Path("out/tuning/optuna.jsonl")
    with journal.open("a") as stream:
        stream.write('{"op_code": 5, "wor')  # a write that the kill cut
    journal.with_name("optuna.jsonl.lock").symlink_to(journal)
    tuned(options, launcher=Learns())
    assert manifest()["tuning"] == whole
    assert set(started) == {path.name for folder in ("out/runs", "out/tuning/runs") for path in Path(folder).iterdir()}


@pytest.mark.parametrize("pruner", ["none", "halving"])
def test_a_kill_between_a_value_and_its_decision_changes_nothing(tuned, monkeypatch, pruner):
    options = f'runs = 4\nseeds = [7]\npruner = "{pruner}"\nreduction_factor = 2\nchoice = "best"'
    tuned(options)
    whole = manifest()["tuning"]
    Path("out").rename("whole")
    with monkeypatch.context() as dying:
        dying.setattr(Search, "decide", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tuned(options)
    tuned(options)
    assert manifest()["tuning"] == whole


def test_halving_stops_the_worse_configurations_and_a_token_budget_ends_the_search(tuned):
    tuned('runs = 8\nseeds = [7]\npruner = "halving"\nreduction_factor = 2\nchoice = "best"')
    trials = manifest()["tuning"]["conditions"]["grpo+toy_flat"]["trials"]
    assert {each["state"] for each in trials} == {"complete", "pruned"}
    assert sorted({each["tokens"] for each in trials}) == [10, 20, 40]
    assert all(each["tokens"] == 40 for each in trials if each["state"] == "complete")
    Path("out").rename("halved")
    tuned('tokens = 200\nseeds = [7]\nchoice = "best"')
    found = manifest()["tuning"]["conditions"].values()
    assert [(each["tokens"], len(each["trials"])) for each in found] == [(200, 5), (200, 5)]


def test_a_failed_configuration_is_not_chosen_and_a_control_has_the_values_of_its_condition(tuned):
    options = 'runs = 3\nseeds = [7]\nchoice = "best"'
    with_control = f'{options}\n[campaign.plan]\nhypothesis = "better"\n'
    tuned(with_control, launcher=Learns(failing="tuneall.0"), arguments=("--campaign-controls", '["no_update"]'))
    found = manifest()["tuning"]["conditions"]
    assert [each["state"] for each in found["grpo+toy_flat"]["trials"]] == ["fail", "complete", "complete"]
    assert list(found) == ["grpo+toy_flat", "toy_raw+toy_flat"]
    rates = [config_of("out", f"toy_raw+toy_flat{control}_s1")["training"]["lr"] for control in ("", "+no_update")]
    assert rates[0] == rates[1] == found["toy_raw+toy_flat"]["chosen"][0]["values"]["training.lr"]


def test_a_condition_that_sets_the_key_is_not_tuned_and_the_verdict_says_so_first(tuned):
    fixed = f"{TWO}lr = 0.02\n"
    tuned(conditions=fixed)
    study = comparison_with_ledger([Path("out")], Options())
    told = "Not tuned alike: grpo+toy_flat with 6 runs; toy_raw+toy_flat~lr=0.02 not at all."
    assert answer(study).startswith(told)
    assert study.undeclared == ()
    assert not any("second campaign" in each for each in study.notices)
    singles = [*Path("out/runs").iterdir()]
    assert comparison_with_ledger(singles, Options()).tuning is not None


def test_a_final_run_on_a_tuning_seed_is_not_planned(tuned):
    tuned('runs = 6\nseeds = [7]\n[campaign.plan]\nhypothesis = "better"')
    assert not any("tuning seed" in each for each in comparison_with_ledger([Path("out")], Options()).exploratory)
    content = json.loads(Path("out/manifest.json").read_text())
    content["tuning"]["seeds"] = [1]
    Path("out/manifest.json").write_text(json.dumps(content))
    study = comparison_with_ledger([Path("out")], Options())
    assert "grpo+toy_flat has final runs on tuning seed 1: its values were chosen on it" in study.exploratory
    assert any("does not hold the tuning that was recorded" in each for each in study.notices)


def test_tasks_are_tuned_apart_from_the_largest_held_out_set_of_any(load_text):
    tasks = '[[data.tasks]]\nname = "a"\nheld_out = 6\n[[data.tasks]]\nname = "b"\n'
    config = load_text(f"{SEEDS}", f"{TWO}\n{EVAL}").config
    data = config.data.model_copy(update={"tasks": tomllib.loads(tasks)["data"]["tasks"]})
    several = replace(config, tables={**config.tables, "data": data})
    assert (most_held_out(config), most_held_out(several)) == (2, 6)


GOOD = "runs = 4\nseeds = [7]"


@pytest.mark.parametrize(
    ("keys", "options", "code", "fix"),
    [
        ('"training.lrr" = { low = 1, high = 2 }', GOOD, "config.unknown-key", "did you mean"),
        ('"training.seed" = { low = 1, high = 2 }', GOOD, "campaign.foreign-key", "remove it"),
        ('"training.lr" = { low = 1e-3, high = 1e-4 }', GOOD, "tune.bad-range", "exchange them"),
        ('"training.lr" = { low = 0.0, high = 1.0, log = true }', GOOD, "tune.bad-range", "remove log"),
        ('"training.lr" = { choices = [1e-3] }', GOOD, "tune.bad-range", "two different"),
        ('"training.lr" = { low = 1e-3, hihg = 1.0 }', GOOD, "tune.bad-range", "low = "),
        ('"training.lr" = { choices = 3 }', GOOD, "tune.bad-range", "two different"),
        ('"training.lr" = { low = 1.0, high = nan }', GOOD, "tune.bad-range", "two numbers"),
        (f'"training.lr" = {{ low = 1, high = 1{400 * "0"} }}', GOOD, "tune.bad-range", "two numbers"),
        ('"training.lr" = { low = 1e-5, high = 1e-3, log = "yes" }', GOOD, "tune.bad-range", "neither"),
        ('"eval.samples" = { choices = [1, 2] }', GOOD, "tune.bad-range", "measures"),
        (f"{LR}\nlr = {{ low = 1e-5, high = 1e-3 }}", GOOD, "tune.bad-range", "second time"),
        ('"training.lr" = 3', GOOD, "config.bad-value", ""),
        ('"training.lr" = { low = -1.0, high = 1.0 }', GOOD, "config.bad-value", ""),
        ("", GOOD, "tune.no-keys", "add one"),
        (LR, f"{GOOD}\nkeys = 3", "config.bad-value", ""),
        (LR, "seeds = [7]", "tune.budget", "runs = 4"),
        (LR, "runs = 4\ntokens = 9\nseeds = [7]", "tune.budget", "runs = 4"),
        (LR, "runs = 5\nseeds = [7]", "tune.uneven", "runs = 6"),
        (LR, "runs = 8\nseeds = [2, 7]", "tune.final-seed", "seeds = [8]"),
        (LR, "runs = 4\nseeds = []", "tune.bad-seeds", "seeds = "),
        (LR, f'{GOOD}\nmetric = "eval_correct_rate:last"', "compare.bad-metric", "final"),
    ],
)
def test_a_search_that_cannot_be_run_is_refused_with_its_fix(load_text, keys, options, code, fix):
    with pytest.raises(ConfigError) as caught:
        load_text(f"{SEEDS}[campaign.tune]\n{keys}\n{options}\n", f"{TWO}\n{EVAL}")
    assert codes_in(caught) == [code]
    problem = caught.value.problems[0]
    assert problem.where
    assert problem.fix
    assert fix in str(problem)


def test_a_campaign_without_the_table_loads_no_optuna(write):
    write(SEEDS, f"{TWO}\n{EVAL}")
    call = "run(['explain', 'c.toml']); print('optuna' in sys.modules)"
    program = f"import sys; from retrain.cli.command_line import run; {call}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
