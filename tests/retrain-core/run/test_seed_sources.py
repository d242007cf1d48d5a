"""`[training] seeds`: each source of randomness moves alone."""

import json

import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.seeding import Seeds
from retrain.run.seed_sources import PURPOSES, run_seeds
from tests.kit.overlapped import GENERATIONS, lines

ASSIGNED = set().union(*PURPOSES.values())


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


@pytest.mark.long
def test_a_run_whose_sampling_and_evaluation_are_set_apart(command, toy_arguments, tmp_path):
    sizes = [*toy_arguments, "--max-steps", "2", "--eval-examples", "3", "--eval-every", "1"]
    apart = {"sampling": 9, "evaluation": 9}
    for name, seeds in (("base", {}), ("moved", apart)):
        assert command(*sizes, "--log-dir", name, "--seeds", json.dumps(seeds)).code == 0
    # Before training: the same policy and the same examples, but other completions.
    for file, example, own, first in (
        (GENERATIONS, "example_id", ("completion",), 8),
        ("eval.jsonl", "example", ("scores", "lengths"), 3),
    ):
        base, moved = (lines(tmp_path / name, file)[:first] for name in ("base", "moved"))
        assert {row[example] for row in moved} == {row[example] for row in base}
        assert [[row[key] for key in own] for row in moved] != [[row[key] for key in own] for row in base]
    record = json.loads((tmp_path / "moved/run.json").read_text())
    assert (record["config"]["training"]["seeds"], record["seed"]) == (apart, 1)
    refused = command("moved/config.toml", "--max-steps", "4", "--resume", "moved", "--seeds", '{"data": 5}')
    assert refused.code != 0
    assert "training.seeds was {'sampling': 9, 'evaluation': 9}" in refused.err
