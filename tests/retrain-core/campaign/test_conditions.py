"""Keys that a condition may set, under which names, and its label."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.campaign.conditions import Condition, ConditionLines, read_conditions
from retrain.kernel.config.load import TableEntry, all_keys
from retrain.kernel.errors import Problem

MODES = 'advantage_mode = "grpo"\ntransform_mode = "none"\n'


def read(tables: Mapping[str, TableEntry], *texts: str) -> tuple[list[Condition], list[Problem]]:
    given_ = [tomllib.loads(MODES + text) for text in texts]
    return read_conditions(given_, all_keys(tables), ConditionLines(None, len(given_)))


@pytest.mark.parametrize(
    ("text", "path", "value", "label"),
    [
        ("lr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ('"training.lr" = 1e-4', "training.lr", 1e-4, "lr=0.0001"),
        ("training.lr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ("[training]\nlr = 1e-4", "training.lr", 1e-4, "lr=0.0001"),
        ("gtpo_beta = 0.5", "gtpo.beta", 0.5, "gtpo_beta=0.5"),
        ("[sepa]\nsteps = 10", "sepa.steps", 10, "sepa_steps=10"),
        ("entropy_mask_rho = 0.2", "algorithm.surprisal_mask_rho", 0.2, "surprisal_mask_rho=0.2"),
        ('reward_type = "math"', "reward.type", "math", "reward_type=math"),
        ("optim_beta1 = 0.8", "optimizer.beta1", 0.8, "optim_beta1=0.8"),
        ('backend = "toy"', "backend.backend", "toy", "backend=toy"),
        ("[backend.options]\na = 1", "backend.options", {"a": 1}, "options.a=1"),
        ('"algorithm.transform_params.cap" = 2', "algorithm.transform_params", {"cap": 2}, "transform_params.cap=2"),
    ],
)
def test_one_key_by_each_of_its_names(
    tables: Mapping[str, TableEntry], text: str, path: str, value: object, label: str
) -> None:
    [condition], problems = read(tables, text)
    assert not problems
    assert condition.label == f"grpo+none~{label}"
    assert [s.value for s in condition.settings if s.path == path] == [value]
    assert condition.sets(path)


def test_overrides_of_a_label_are_sorted_and_no_two_conditions_are_the_same(tables: Mapping[str, TableEntry]) -> None:
    texts = "lr = 1.0\nbatch_size = 2", "batch_size = 2\nlr = 2.0\nbase_url = ''", 'batch_size = 2\n"training.lr" = 1.0'
    (first, second, _), [problem] = read(tables, *texts)
    assert first.label == "grpo+none~batch_size=2,lr=1.0"
    assert second.label == "grpo+none~base_url=,batch_size=2,lr=2.0"
    assert (problem.code, problem.what) == ("campaign.same-condition", f"is the same as condition 1: {first.label}")


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("lrr = 1.0", "config.unknown-key", "'lr'"),
        ("steps = 5", "config.unknown-key", "'sepa_steps'"),
        ("[sepa]\nstps = 5", "config.unknown-key", "'sepa.steps'"),
        ("seed = 5", "campaign.foreign-key", "remove"),
        ('log_dir = "x"', "campaign.foreign-key", "remove"),
        ("[campaign]\nretries = 1", "campaign.foreign-key", "remove"),
        ('resume_from = "x"', "campaign.foreign-key", "remove"),
        ('lr = 1.0\n"training.lr" = 2.0', "campaign.key-set-twice", "keep one"),
        ('"algorithm.advantage_mode" = "maxrl"', "campaign.key-set-twice", "keep one"),
    ],
)
def test_what_a_condition_cannot_set(tables: Mapping[str, TableEntry], text: str, code: str, fix: str) -> None:
    _, [problem] = read(tables, text)
    assert problem.code == code
    assert fix in problem.fix
    assert "condition 1" in problem.where


@settings(max_examples=30)
@given(text=st.text(max_size=200))
def test_places_never_fail(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.mktemp("p") / "c.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert "condition 1" in ConditionLines(file, 1).of(1, "lr")


def test_places_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f"[campaign]\n[[campaign.conditions]]\n{MODES}\n[[ campaign . conditions ]]\n{MODES}lr = 1\n")
    places = ConditionLines(file, 2)
    assert places.of(1) == f"{file}:2 condition 1"
    assert places.of(2, "lr") == places.of(2, "training.lr") == f"{file}:9 condition 2"
    assert ConditionLines(file, 3).of(3) == f"{file} condition 3"
