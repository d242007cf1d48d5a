"""The main job, measured: the embedded model learns, for every seed, condition, and way to train."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.docs.reading import SITE, blocks
from tests.end_to_end.running import records, retrain, tiny

OTHERS = (("grpo", "none"), ("maxrl", "none"), ("maxrl", "gtpo"), ("maxrl", "gtpo_hicra"))
PLAIN = ("--transform-mode", "none", "--save-every", "0")
SPLIT = ("--devices", "cpu,cpu")
HALF = """
class Reward:
    def __init__(self, context):
        pass
    def score(self, example, text):
        if example.reference in ("any", "never"):
            return float(example.reference == "any")
        return float(text.strip().rstrip(".}$ ").endswith(example.reference))
"""


def lines(run: Path) -> list[dict[str, Any]]:
    return records(run / "metrics.jsonl")


def held_out(run: Path) -> tuple[float, float]:
    """Correct rate on held-out examples in the first evaluation and in the last."""
    rates = [line["eval_correct_rate"] for line in lines(run) if "eval_correct_rate" in line]
    return rates[0], rates[-1]


def write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


@pytest.mark.long  # seed 1 at every change: `nox -s quickstart` trains it, and fails unless it learns as much
@pytest.mark.parametrize(("seed", "more"), [("1", ()), ("2", ()), ("3", ()), ("1", SPLIT)])
def test_the_full_pipeline_learns_for_every_seed_and_on_two_devices(
    seed: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    tiny("--seed", seed, *more, cwd=tmp_path)
    before, after = held_out(tmp_path / "logs/tiny")
    assert 0.35 <= before <= 0.60
    assert after >= 0.85


@pytest.mark.long
@pytest.mark.parametrize(("advantage", "transform"), OTHERS)
def test_every_other_condition_learns_too(advantage: str, transform: str, tmp_path: Path) -> None:
    tiny("--seed", "1", "--advantage-mode", advantage, "--transform-mode", transform, cwd=tmp_path)
    assert held_out(tmp_path / "logs/tiny")[1] > 0.80


GATES = ("sapo", "gmpo", "vespo", "luspo", "dppo_tv", "dppo_kl", "m2po", "dro", "icepop")
SEVERAL = """
[model]
model = "builtin:tiny"
[backend]
devices = "cpu"
[data]
source = "arithmetic"
[training]
seed = 1
max_steps = 16
group_size = 8
minibatches = 2
max_tokens = 64
temperature = 1.0
lr = 2e-3
save_every = 0
[eval]
examples = 128
samples = 2
"""


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "more"), [*((name, ()) for name in GATES), ("grpo", ("--off-policy-mask", "0.02"))])
def test_every_recipe_of_gates_masks_and_weights_learns(recipe: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """In two updates per step, so that the part that gives each its name does something."""
    (tmp_path / "retrain.toml").write_text(SEVERAL, encoding="utf-8")
    tiny("--recipe", recipe, *more, "--log-dir", "a", cwd=tmp_path)
    before, after = held_out(tmp_path / "a")
    assert after > before + 0.15


@pytest.mark.long
@pytest.mark.parametrize(
    ("advantage", "more"),
    [
        *((name, ()) for name in ("opo", "remax", "otb")),
        # it teaches where one completion of the group is right, and half of these answers are
        ("passk", ("--group-size", "2", "--batch-size", "32")),
    ],
)
def test_every_further_advantage_learns(advantage: str, more: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "retrain.toml").write_text(SEVERAL, encoding="utf-8")
    tiny("--advantage-mode", advantage, *PLAIN, *more, "--log-dir", "a", cwd=tmp_path)
    before, after = held_out(tmp_path / "a")
    assert after > before + 0.15


@pytest.mark.slow
def test_all_weights_learn(tmp_path: Path) -> None:
    """Six steps of full fine-tuning, which a model of transformers remains of."""
    size = ("--max-steps", "6", "--save-every", "1", "--eval-every", "6")
    tiny("--seed", "1", "--lora-rank", "0", "--lr", "1e-3", *size, cwd=tmp_path)
    before, after = held_out(tmp_path / "logs/tiny")
    assert before + 0.2 < after
    kept = {folder.name for folder in (tmp_path / "logs/tiny/adapter").iterdir() if (folder / "config.json").is_file()}
    assert kept == {"final", "checkpoint_step_4", "checkpoint_step_5"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_on_quantised_weights_learns(kind: str, tmp_path: Path) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    tiny("--seed", "1", "--quantize", kind, "--max-steps", "30", "--eval-every", "30", cwd=tmp_path)
    before, after = held_out(tmp_path / "logs/tiny")
    assert before + 0.2 < after
    assert max(line["logprob_gap_max"] for line in lines(tmp_path / "logs/tiny") if "loss" in line) < 1e-4


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("most", ["1", "2", "4"])
def test_it_learns_from_completions_of_older_policies(most: str, tmp_path: Path) -> None:
    flags = (*SPLIT, "--max-staleness", most, "--max-steps", "40", "--save-every", "0", "--seed", "1")
    tiny(*flags, "--log-dir", "run", cwd=tmp_path)
    assert lines(tmp_path / "run")[-1]["staleness_max"] == int(most)
    assert held_out(tmp_path / "run")[1] > 0.75  # measured: 0.92, 0.92, 0.88; 0.47 before


@pytest.mark.long
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_eight_updates_learn_more_per_sample_than_one(seed: str, tmp_path: Path) -> None:
    base = ("--max-steps", "20", "--save-every", "0", "--lr", "1e-3", "--loss", "ppo", "--seed", seed)
    for name, flags in (("one", ()), ("many", ("--minibatches", "4", "--epochs", "2"))):
        tiny(*base, *flags, "--log-dir", name, cwd=tmp_path)
    # measured: 0.90 to 0.92 beside 0.76 to 0.78
    assert held_out(tmp_path / "many")[1] >= max(held_out(tmp_path / "one")[1], 0.85)
    many, one = ([line for line in lines(tmp_path / name) if line["step"] >= 0] for name in ("many", "one"))
    assert max(line["updates"] for line in many) == 8
    clipped = [line["clip_fraction_updates"] for line in many if line["updates"]]
    assert all(shares[0] == 0.0 for shares in clipped), "the first update is on policy"
    assert sum(shares[-1] > 0.0 for shares in clipped) > len(clipped) / 2
    assert all(line["clip_fraction"] == 0.0 and line["updates"] <= 1 for line in one)
    assert max(line["logprob_gap_max"] for line in many) < 1e-4


@pytest.mark.long
def test_20_supervised_steps_raise_a_rate_under_5_percent_over_30_and_rl_goes_on(tmp_path: Path) -> None:
    """The configuration of the page, on sums of three numbers that the embedded model was never taught."""
    rng, rows = random.Random(0), dict[tuple[int, ...], dict[str, str]]()
    while len(rows) < 1000:
        a, b, c = terms = tuple(rng.randint(2, 12) for _ in range(3))
        solution = f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}. \\boxed{{{a + b + c}}}"
        rows[terms] = {"prompt": f"What is {a} + {b} + {c}?", "answer": str(a + b + c), "solution": solution}
    write(tmp_path / "chains.jsonl", list(rows.values()))
    (shown,) = (block for block in blocks(SITE / "algorithms/teachers.md", "toml") if "[sft]" in block)
    (tmp_path / "retrain.toml").write_text(shown, encoding="utf-8")
    tiny("--sft-steps", "0", "--max-steps", "1", "--log-dir", "cold", cwd=tmp_path)
    tiny("--log-dir", "warm", cwd=tmp_path)
    first, last = held_out(tmp_path / "warm")
    assert held_out(tmp_path / "cold")[0] < 0.05
    assert first > 0.30
    assert last > first + 0.05  # measured: 0.016, 0.684, 0.777


@pytest.mark.long
def test_a_student_without_a_verifier_comes_near_its_teacher(tmp_path: Path) -> None:
    plain = (*PLAIN, "--lr", "3e-3", "--temperature", "0.7")
    tiny(*plain, "--max-steps", "25", "--eval-every", "0", "--seed", "7", "--log-dir", "teacher", cwd=tmp_path)
    student = ("--teacher-adapter", "teacher", "--advantage-mode", "distillation", "--max-steps", "20", "--seed", "1")
    unjudged = ("--reward-type", "none", "--eval-examples", "0")
    tiny(*plain, *student, *unjudged, "--log-dir", "student", cwd=tmp_path)
    tiny(*plain, "--adapter", "student", "--max-steps", "1", "--lr", "1e-9", "--log-dir", "judged", cwd=tmp_path)
    # measured: students 94 to 96 %
    assert held_out(tmp_path / "judged")[0] > held_out(tmp_path / "teacher")[1] - 0.06
    divergences = [line["teacher_kl_mean"] for line in lines(tmp_path / "student")]
    assert sum(divergences[-5:]) < 0.4 * sum(divergences[:5])  # measured: 0.07 to 0.32


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_coefficient_of_a_tenth_keeps_the_policy_nearer_on_every_seed(tmp_path: Path) -> None:
    """The mean k1 per token over the last half of the steps, as a share of that without a penalty."""
    size = ("--max-steps", "120", "--batch-size", "2", "--group-size", "8", "--max-tokens", "32", "--lr", "0.003")
    # next to nothing, so that every completion is measured and not a sixteenth of them
    without = ("--kl-coef", "1e-12", "--kl-where", "reward")
    shares = []
    for seed in ("1", "2", "3"):
        sums = []
        for name, keys in (("with", ("--kl-coef", "0.1")), ("without", without)):
            more = ("--advantage-mode", "grpo", "--eval-examples", "0", "--seed", seed, "--log-dir", f"{name}_{seed}")
            tiny(*size, *PLAIN, *keys, *more, cwd=tmp_path)
            sums.append(sum(line["kl_k1_mean"] for line in lines(tmp_path / f"{name}_{seed}") if line["step"] >= 60))
        shares.append(sums[0] / sums[1])
    assert max(shares) < 1.0, shares  # measured: 0.71, 0.87 and 0.83
    assert sum(shares) / 3 < 0.9, shares


@pytest.mark.long
def test_refill_fills_nearly_every_step_and_records_its_cost(tmp_path: Path) -> None:
    """Of the sums about a third each is right whatever is answered, wrong whatever is answered, and judged."""
    (tmp_path / "mixed.py").write_text(HALF, encoding="utf-8")
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    answers = [("any", "never", str(a + b))[(3 * a + b) % 3] for a, b in sums]
    rows = [{"prompt": f"What is {a} + {b}?", "answer": each} for (a, b), each in zip(sums, answers, strict=True)]
    write(tmp_path / "mixed.jsonl", rows)
    run = ("--model", "builtin:tiny", "--devices", "cpu", "--advantage-mode", "grpo", *PLAIN, "--seed", "1")
    size = ("--max-steps", "20", "--batch-size", "4", "--group-size", "8", "--max-tokens", "32", "--lr", "1e-4")
    data = ("--data-source", "files", "--data-path", "mixed.jsonl", "--reward-type", "mixed.Reward")
    found = {}
    for refill in ("0", "8"):
        more = ("--temperature", "1.0", "--scoring-audit", "off", "--refill", refill, "--log-dir", refill)
        outcome = retrain(*run, *size, *data, *more, cwd=tmp_path)
        assert outcome.code == 0, outcome.err
        found[refill] = lines(tmp_path / refill)
    full = {name: sum(line["useful_groups"] == 4 for line in found[name]) / 20 for name in found}
    assert full["0"] < 0.5
    assert full["8"] > 0.95
    generations = records(tmp_path / "8/emergence/generations.jsonl")
    tokens = {name: sum(line["sampled_tokens"] for line in found[name]) for name in found}
    assert tokens["8"] == sum(each["num_tokens"] for each in generations) > tokens["0"]
    dropped = sum(line["dropped_tokens"] for line in found["8"])
    assert dropped == sum(each["num_tokens"] for each in generations if not each["trained"])
