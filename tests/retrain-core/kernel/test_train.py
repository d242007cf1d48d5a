"""The whole loop on the toy policy: records, order, resumable state, plugins' own fields; no heavy library."""

import json
import math
import tomllib

import pytest

from retrain.kernel.run import BEFORE_TRAINING
from tests.kit.overlapped import outcome


@pytest.fixture
def run(command, toy_arguments, tmp_path):
    """`run("--lr", "1")`: a short run of the toys; returns the command's result."""
    base = [*toy_arguments, "--max-steps", "4", "--save-every", "2"]
    return lambda *arguments: command(*base, *arguments)


def lines(file):
    """Records of a JSONL file; NaN is refused."""
    return [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in file.read_text().splitlines()]


GRADED = """
class Reward:
    def __init__(self, context):
        pass
    def score(self, example, text):
        return len(text.split()) / 4  # of at most three words
    def gold(self, example):
        return "ok ok ok ok"
"""


def test_graded_rewards_their_parts_and_the_threshold_of_correct(run, tmp_path):
    (tmp_path / "graded.py").write_text(GRADED, encoding="utf-8")
    weights = 'reward.weights={"graded.Reward": 1.0, "toy": 0.5}'
    rewards = ["--reward-type", "match", "--set", weights, "--scoring-audit", "warn"]
    evals = ["--eval-examples", "3", "--eval-samples", "4", "--eval-every", "1"]
    for name, above in (("half", ()), ("low", ("--scoring-correct-above", "0.2"))):
        result = run(*rewards, *evals, *above, "--log-dir", name, "--max-steps", "2")
        assert result.code == 0, result.err
        shown = [line for line in result.out.splitlines() if "graded.Reward=0." in line and "toy=" in line]
        assert len(shown) == 5, "two steps and three evaluations"
    half, low = (lines(tmp_path / name / "metrics.jsonl") for name in ("half", "low"))
    written = lines(tmp_path / "low" / "emergence" / "generations.jsonl")
    for default, other in zip(half[1:], low[1:], strict=True):
        records = [record for record in written if record["step"] == other["step"]]
        rewards_N = sorted(record["reward"] for record in records)
        assert other["correct_rate"] == sum(reward > 0.2 for reward in rewards_N) / 8
        assert default["correct_rate"] == sum(reward > 0.5 for reward in rewards_N) / 8
        assert [other[f"reward_p{percent}"] for percent in (10, 50, 90)] == [rewards_N[i] for i in (0, 3, 7)]
        for part in ("graded.Reward", "toy"):
            assert other[f"reward_{part}_mean"] == math.fsum(r["reward_parts"][part] for r in records) / 8
        mean = other["eval_reward_graded.Reward_mean"] + 0.5 * other["eval_reward_toy_mean"]
        assert other["eval_mean_reward"] == pytest.approx(mean)
        same = {field for field in default.keys() & other.keys() if default[field] == other[field]}
        assert {"loss", "mean_reward", "eval_mean_reward", "useful_groups", "grad_norm"} <= same, "only `correct` moves"
    assert [line["eval_correct_rate"] for line in half] != [line["eval_correct_rate"] for line in low]


def test_a_run_leaves_its_records(run, tmp_path):
    result = run("--eval-examples", "3", "--eval-samples", "2")
    assert (result.code, result.err) == (0, "")
    folder = tmp_path / "logs" / "train"
    before, *steps = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in (before, *steps)] == [-1, 0, 1, 2, 3]
    assert not [field for line in steps for field in line if field.startswith("bp_")], "no pacer"
    assert "eval_pass_at_2" in before
    assert "eval_correct_rate" in steps[-1]
    assert "eval_correct_rate" not in steps[0]
    generations = lines(folder / "emergence" / "generations.jsonl")
    assert len(generations) == 4 * 2 * 4
    assert all(math.isfinite(record["reward"]) for record in generations)
    assert [record["step"] for record in lines(folder / "emergence" / "steps.jsonl")] == [0, 1, 2, 3]
    adapters = {path.name for path in (folder / "adapter").iterdir()}
    assert adapters == {"checkpoint_step_2", "final"}
    manifest = json.loads((folder / "run.json").read_text())
    assert (manifest["status"], manifest["seed"], manifest["condition"]) == ("done", 1, "grpo+toy_flat")
    assert manifest["distributions"]["retrain-toys"] == "1.0"
    assert tomllib.loads((folder / "config.toml").read_text())["training"]["seed"] == 1
    state = json.loads((folder / "trainer_state.json").read_text())
    assert (state["step"], state["example_idx"], state["checkpoint_name"]) == (3, 8, "final")


def test_held_out_examples_are_never_trained_on(run, tmp_path):
    run("--eval-examples", "4", "--max-steps", "8")
    trained = {r["example_id"] for r in lines(tmp_path / "logs/train/emergence/generations.jsonl")}
    assert len(trained) == 12 - 4


def test_the_same_seed_gives_the_same_run_and_another_does_not(run, tmp_path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert run("--seed", seed, "--max-steps", "2", "--log-dir", name).code == 0
    a, b, c = (outcome(tmp_path / name) for name in "abc")
    assert a == b
    assert all(part != other for part, other in zip((a[0], a[-1]), (c[0], c[-1]), strict=True))


def test_a_broken_verifier_stops_the_run_and_is_reported_cleanly(run, tmp_path):
    result = run("--reward-type", "toy_broken", "--scoring-audit", "off")
    assert result.code == 1
    assert "retrain: reward error" in result.err
    assert "failed on 8 of 8 completions; first: RuntimeError: the verifier is \ufffd[31mdown" in result.err
    manifest = json.loads((tmp_path / "logs/train/run.json").read_text())
    assert manifest["status"] == "failed"
    assert "RewardError" in manifest["error"]


def test_a_verifier_that_fails_its_audit_stops_before_anything_is_written(run, tmp_path):
    (tmp_path / "lenient.py").write_text("def score(response, reference):\n    return 1.0\n")
    result = run("--reward-type", "custom", "--reward-custom-module", "lenient")
    assert result.code == 1
    assert "the reward failed its audit" in result.err
    assert not (tmp_path / "logs/train").exists()


def test_a_verifier_that_fails_on_everything_stops_before_the_backend_is_imported(run, tmp_path):
    (tmp_path / "marking_backend.py").write_text("open('imported', 'w').close()\nmake = None\n")
    result = run("--reward-type", "toy_broken", "--backend", "marking_backend.make")
    assert result.code == 1
    assert not (tmp_path / "imported").exists()
    assert "--reward-type [reward] type: reward 'toy_broken' failed on all 9 texts that it was tried on" in result.err
    assert "RuntimeError: the verifier is \ufffd[31mdown" in result.err
    (tmp_path / "broken_score.py").write_text("def score(response, reference):\n    return response.undefined\n")
    result = run("--reward-type", "custom", "--reward-custom-module", "broken_score")
    assert result.code == 1
    assert "--reward-type [reward] type: reward 'custom' failed on all 9 texts" in result.err
    assert "AttributeError: 'str' object has no attribute 'undefined' (broken_score.py:2)" in result.err
    assert "Reward audit" not in result.out
    assert not (tmp_path / "logs/train").exists()


def test_a_plugins_metrics_are_recorded_and_its_fault_is_named(run, distribution, tmp_path):
    source = (
        "from retrain.api import hookimpl\n@hookimpl\ndef retrain_extra_metrics(run, groups):\n"
        "    if groups.step == 2:\n        raise ValueError('third step')\n    return {'mine': groups.step * 10}\n"
    )
    distribution("watcher", {"watcher": source})
    result = run()
    assert result.code == 1
    assert "retrain_extra_metrics of watcher:watcher raised ValueError: third step" in result.err
    assert [line["mine"] for line in lines(tmp_path / "logs/train/metrics.jsonl")] == [0, 10]
    assert json.loads((tmp_path / "logs/train/run.json").read_text())["status"] == "failed"


def test_a_step_without_an_informative_group_trains_nothing_but_counts(run, tmp_path):
    result = run("--group-size", "1", "--max-steps", "2", "--advantage-mode", "toy_raw")
    assert result.code == 0
    assert "group_size = 1: a group of one has nothing to compare, so no step will train" in result.out
    assert "no informative datums, skipping" in result.out
    steps = lines(tmp_path / "logs/train/metrics.jsonl")
    assert [step["loss"] for step in steps] == [None, None]
    assert [step["no_verdict_groups"] for step in steps] == [2, 2]
    assert json.loads((tmp_path / "logs/train/adapter/final/logits.json").read_text()) == [0.0] * 20


def test_a_warm_up_counts_up_to_the_evaluation_before_training(run, tmp_path):
    sizes = ("--sft-steps", "2", "--sft-batch-size", "2", "--max-steps", "1", "--eval-examples", "2")
    assert run(*sizes).code == 0
    steps = lines(tmp_path / "logs/train/metrics.jsonl")
    assert [line["step"] for line in steps] == [-3, -2, BEFORE_TRAINING, 0]


def test_the_toy_learns(run, tmp_path):
    """A single task whose answer is one word: the loop must make that word likely."""
    arguments = ["--data-opt", "count=1", "--max-steps", "40", "--batch-size", "1", "--group-size", "32"]
    result = run(*arguments, "--backend-opt", "step_size=20.0", "--max-tokens", "1")
    assert result.code == 0
    steps = lines(tmp_path / "logs/train/metrics.jsonl")
    assert steps[-1]["correct_rate"] > 0.9
    assert all(step["ratio_max"] == 1.0 for step in steps if step["loss"] is not None)


KEEPER = '''
from retrain.api import ConfigError, Problem, RetrainError, Watcher, hookimpl

DIARY = []
SAMPLED = []  # how far sampling had come when scoring began
SCORED = []  # and scoring by the end of each step


class Keeper(Watcher):
    """Records like a recorder, keeps state like a savepoint, judges and ends the run like a health monitor."""

    def __init__(self, context):
        self.limit = 3 if context.config.training.max_steps == 6 else 99
        self.seen = 0
        self.sampling = context.sampling_progress

    @hookimpl
    def retrain_load_state(self, state):
        self.seen = state["keeper"]["seen"]
        DIARY.append(f"load {self.seen}")

    @hookimpl
    def retrain_run_start(self, run):
        DIARY.append(f"start {run.manifest['seed']}")

    def step_line(self, metrics):
        self.seen += 1
        return {"keeper_seen": self.seen}

    def progress(self):
        return self.sampling.unit, self.sampling.done, self.sampling.total, self.sampling.limit

    def phase(self, step, phase):
        if phase == "scoring":
            SAMPLED.append(self.progress())

    @hookimpl
    def retrain_step_end(self, metrics):
        DIARY.append(f"line {metrics['step']} {metrics.get('keeper_seen')}")
        SCORED.append(self.progress())
        if self.seen == self.limit:
            return RetrainError(Problem(what="the keeper has seen enough"))

    @hookimpl
    def retrain_save_state(self, name, folder):
        if folder is None:
            return {"keeper": {"seen": self.seen}}
        DIARY.append(f"saved {name} {(folder / 'checkpoint.json').is_file()}")

    @hookimpl
    def retrain_run_end(self, error):
        DIARY.append(f"end {type(error).__name__}")


@hookimpl
def retrain_watch_run(context):
    return Keeper(context)
'''


@pytest.fixture
def watched(command, toy_arguments):
    """A short run of the toys."""
    return lambda *arguments: command(*toy_arguments, "--eval-examples", "2", "--save-every", "2", *arguments)


def test_a_plugin_records_keeps_state_and_ends_a_run_with_hooks_alone(watched, distribution, tmp_path):
    distribution("retrain-keeper", {"keeper": KEEPER})
    result = watched("--max-steps", "6", "--log-dir", "kept")
    import keeper  # made by the fixture

    assert result.code == 1
    assert "the keeper has seen enough" in result.err
    before = ["start 1", "line -1 None", "line 0 1", "line 1 2", "saved checkpoint_step_2 True"]
    assert keeper.SAMPLED == [("completions", 8, 8, 3)] * 3
    assert [unit for unit, *_ in keeper.SCORED] == ["scores"] * 4
    assert [*before, "line 2 3", "saved checkpoint_step_3 True", "end RetrainError"] == keeper.DIARY
    lines = [json.loads(line) for line in (tmp_path / "kept/metrics.jsonl").read_text().splitlines()]
    assert [line.get("keeper_seen") for line in lines] == [None, 1, 2, 3]

    keeper.DIARY.clear()
    resumed = watched("--max-steps", "5", "--resume", "kept")
    assert (resumed.code, resumed.err) == (0, "")
    assert [
        *("load 3", "start 1", "line 3 4", "saved checkpoint_step_4 True", "line 4 5"),
        *("saved final True", "end NoneType"),
    ] == keeper.DIARY
