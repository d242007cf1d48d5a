"""`[training] seeds`: each source of randomness moves alone, and every stream of the code has a source or a reason."""

import ast
import json
from pathlib import Path

import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.seeding import Seeds
from retrain.records.run import Control
from retrain.run.seed_sources import PURPOSES, run_seeds

ROOT = Path(__file__).parents[3]
ASSIGNED = {purpose for purposes in PURPOSES.values() for purpose in purposes}
OUTSIDE = {  # streams that no run draws from, with what they are for
    "held-out": "the split, which follows [eval] seed alone, so that all runs share their held-out examples",
    "arithmetic": "the made tasks themselves, which follow the seed of [data] options",
    "audit": "examples on which a reward is tried",
    "trace": "synthetic groups",
    "report": "excerpts on a page",
    "compare": "resampling in a comparison",
    "replay": "resampling the groups of a stored step",
    "signal": "resampling in an account of signal",
    "chat": "a chat",
    "doctor": "probes of a server",
    "tinker handshake": "probes of a service",
}
NAMED = {"Control.RANDOM_REWARD": Control.RANDOM_REWARD.value}
FOREIGN = ("retrain/testing/",)  # the conformance suite draws its own examples
KEYED = ("kernel/seeding.py", "kernel/contracts/tasks.py")  # where a purpose is passed on


def purposes(file):
    """What the file's calls of `derive`, `stream` and `Streams(purpose=)` name; `?` where that is no constant."""
    text = file.read_text(encoding="utf-8")
    if not any(f"{call}(" in text for call in ("derive", "stream", "Streams")):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "Streams":
            yield from (_text(keyword.value) for keyword in node.keywords if keyword.arg == "purpose")
        elif name in ("derive", "stream") and node.args and _is_seeds(node.func):
            yield _text(node.args[0])


def _is_seeds(function):
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    return any(word in owner.lower() for word in ("seed", "split", "stream", "draw"))


def _text(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return NAMED.get(ast.unparse(node), "?")


def test_every_purpose_in_the_source_is_assigned_or_says_why_not():
    found = {}
    for file in ROOT.glob("retrain-*/src/**/*.py"):
        if any(part in file.as_posix() for part in (*FOREIGN, *KEYED)):
            continue
        for purpose in purposes(file):
            found.setdefault(purpose, []).append(file.name)
    assert {name: files for name, files in found.items() if name not in ASSIGNED | set(OUTSIDE)} == {}
    assert set(found) >= ASSIGNED  # none is assigned that nothing draws from


@pytest.mark.parametrize("source", PURPOSES)
def test_a_source_moves_its_own_streams_and_no_other(source):
    config = Config(tables={"training": TrainingTable(seed=1, seeds={source: 7})})
    seeds = run_seeds(config)
    moved = {p for p in {*ASSIGNED, "a plugin's"} if seeds.derive(p, 0, "x") != Seeds(1).derive(p, 0, "x")}
    assert moved == set(PURPOSES[source])
    assert all(seeds.derive(p, 0) == Seeds(7).derive(p, 0) for p in moved)  # as a run with that seed draws


def test_a_drawn_seed_is_only_for_what_is_not_set_apart():
    plain = run_seeds(Config(tables={"training": TrainingTable(seed=5)}))
    assert (plain, hash(plain)) == (Seeds(5), hash(Seeds(5)))
    config = Config(tables={"training": TrainingTable(seed=-1, seeds={"data": 7})})
    first, second = run_seeds(config), run_seeds(config)
    assert first.derive("shuffle", 0) == second.derive("shuffle", 0)
    assert first.root != second.root
    assert first.derive("sample") != second.derive("sample")
    assert run_seeds(config, root=3).root == 3  # that of a run which goes on


@pytest.fixture
def trained(command, toy_arguments, tmp_path):
    """`trained(seeds)`: what a run of the toys drew, its losses, and what its evaluations found."""

    def train(seeds, *more):
        name = f"logs/{len(list(tmp_path.glob('logs/*')))}"
        sizes = ["--max-steps", "2", "--eval-examples", "3", "--eval-every", "1", "--log-dir", name]
        result = command(*toy_arguments, *sizes, "--seeds", json.dumps(dict(seeds)), *more)
        assert result.code == 0, result.err
        folder = tmp_path / name
        rows = [json.loads(line) for line in (folder / "emergence/generations.jsonl").read_text().splitlines()]
        evals = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
        return {
            "order": [row["example_id"] for row in rows],
            "texts": {(row["example_id"], number % 4): row["completion"] for number, row in enumerate(rows[:8])},
            "evals": [(row["example"], row["scores"], row["lengths"]) for row in evals],
            "held_out": {row["example"] for row in evals},
            "record": json.loads((folder / "run.json").read_text()),
            "folder": folder,
        }

    return train


@pytest.mark.long
def test_a_run_whose_sampling_and_evaluation_are_set_apart(trained, command):
    base, moved = trained({}), trained({"sampling": 9, "evaluation": 9})
    assert moved["order"] == base["order"]
    assert moved["texts"] != base["texts"]
    assert moved["held_out"] == base["held_out"]
    assert moved["evals"][:3] != base["evals"][:3]  # those before training
    assert moved["record"]["config"]["training"]["seeds"] == {"sampling": 9, "evaluation": 9}
    assert moved["record"]["seed"] == 1
    file = moved["folder"] / "config.toml"
    assert "sampling = 9" in file.read_text()
    refused = command(str(file), "--max-steps", "4", "--resume", str(moved["folder"]), "--seeds", '{"data": 5}')
    assert refused.code != 0
    assert "training.seeds was {'sampling': 9, 'evaluation': 9}" in refused.err
