"""A plugin's own `Algorithm`: declared by its traits, built from its parameters, checked, resumed, and run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import assign_credit
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Needs
from retrain.kernel.errors import ConfigError, CreditError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group
from tests.kit.problems import codes_in, refused

BATCH_MEAN = """
import numpy as np
from retrain.advantages import Credit, GroupStatus, Needs, TokenCredit, group_status, train_rows
from retrain.api import PluginSpec, Table, hookimpl


class Params(Table):
    scale: float = 1.0


class BatchMean:
    \"\"\"Reward minus the mean of the whole step.\"\"\"

    needs = Needs(entropy=ENTROPY)
    labels = LABELS

    def __init__(self, context):
        self.scale, self.steps = context.params.scale, 0

    def assign(self, step, groups):
        mean = np.mean([score.value for group in groups for score in group.scores])
        statuses, tokens, rows = [], [], []
        for group in groups:
            statuses.append(group_status(group))
            credits = [
                TokenCredit(advantages_A=np.full(c.num_actions, self.scale * (score.value - mean) * FACTOR))
                for c, score in zip(group.completions, group.scores)
            ]
            tokens.append(tuple(credits))
            if statuses[-1] is GroupStatus.INFORMATIVE:
                for c, credit in zip(group.completions, credits):
                    rows += train_rows(c, credit.advantages_A)
        metrics = {"batch_mean": float(mean), "steps_seen": self.steps}
        return Credit(statuses_P=tuple(statuses), tokens_PG=tuple(tokens), rows=tuple(rows), metrics=metrics)

    def observe(self, step, groups, credit):
        self.steps += 1

    def state(self):
        return {"steps": self.steps}

    def restore(self, state):
        self.steps = state["steps"]


@hookimpl
def retrain_register_algorithms(register):
    register(
        PluginSpec(
            name="batch_mean", summary="A test.", factory=BatchMean, params=Params, traits=Needs(entropy=ENTROPY)
        )
    )
"""
Install = Callable[..., None]
BuildFlow = Callable[..., tuple[CreditFlow, PluginContext]]
LABELS = {"condition": "batch_mean"}


@pytest.fixture
def install(distribution: Callable[..., Path], toys: Path) -> Install:
    """`install(factor="np.inf")`: the algorithm, with or without a fault."""

    def write(*, factor: str = "1.0", labels: object = LABELS, entropy: bool = False) -> None:
        constants = f"import numpy as np\nFACTOR, LABELS, ENTROPY = {factor}, {labels!r}, {entropy}\n"
        distribution("retrain-batch-mean", {"batch_mean": constants + BATCH_MEAN})

    return write


@pytest.fixture
def flow(tables: Mapping[str, TableEntry]) -> BuildFlow:
    """`flow("--algorithm-param", "scale=2")`: the flow that is configured, and what a factory is given."""

    def build(*arguments: str) -> tuple[CreditFlow, PluginContext]:
        config, problems = load_config(None, tables=tables, arguments=["--algorithm-mode", "batch_mean", *arguments])
        assert problems == []
        plugins = load_plugins({"RETRAIN_BLOCK": "retrain-sepa"})  # it needs nobody's stages
        return build_flow(config, plugins), PluginContext(config=config, seeds=Seeds(0), plugins=plugins)

    return build


def test_its_traits_make_it_a_whole_algorithm(
    install: Install, flow: BuildFlow, make_group: Callable[..., Group]
) -> None:
    install(entropy=True)
    built, context = flow("--algorithm-params", '{"scale": 2.0}')
    assert (built.is_custom, built.condition) == (True, "batch_mean")
    assert (built.needs_entropy, built.needs_planning, built.controller) == (True, False, "")
    algorithm = build_algorithm(built, context)
    assert algorithm.needs == Needs(entropy=True)
    names = {"algorithm_mode": "batch_mean", "condition": "batch_mean"}
    assert dict(algorithm.labels) == {**names, "advantage_mode": "", "transform_mode": "", "uncertainty_kind": ""}
    groups = [make_group(1, 0), make_group(1, 1)]
    credit = algorithm.assign(3, groups)
    assert [t.advantages_A.tolist() for tokens_G in credit.tokens_PG for t in tokens_G] == [[0.5], [-1.5], [0.5], [0.5]]
    assert len(credit.rows) == 2
    algorithm.observe(3, groups, credit)
    resumed = build_algorithm(built, context)
    resumed.restore(algorithm.state())
    assert resumed.assign(4, groups).metrics["steps_seen"] == 1


def test_it_has_no_stages_to_compute_and_its_parameters_are_checked(install: Install, flow: BuildFlow) -> None:
    install()
    assert refused(assign_credit, [], flow()[0]) == ["credit.own-algorithm"]
    with pytest.raises(ConfigError, match="unknown option 'scael'"):
        flow("--algorithm-params", '{"scael": 2.0}')


@pytest.mark.parametrize("labels", [{}, {"name": "x"}, {"condition": 1}, "batch_mean"])
def test_labels_without_a_condition_are_refused(labels: object, install: Install, flow: BuildFlow) -> None:
    install(labels=labels)
    assert refused(build_algorithm, *flow()) == ["plugin.no-condition"]


@pytest.mark.parametrize(
    ("factor", "code"),
    [("np.nan", "credit.not-finite"), ("np.inf", "credit.not-finite"), ("None", "credit.part-raised")],
)
def test_faulty_credit_is_named(
    factor: str, code: str, install: Install, flow: BuildFlow, make_group: Callable[..., Group]
) -> None:
    install(factor=factor)
    with pytest.raises(CreditError, match="step 5: algorithm 'batch_mean'") as caught:
        build_algorithm(*flow()).assign(5, [make_group(1, 0)])
    assert codes_in(caught) == [code]


def test_credit_and_rows_of_another_shape_are_named(
    install: Install, flow: BuildFlow, make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    install()
    group, algorithm = make_group(1, 0), build_algorithm(*flow())
    completions = [replace(c, reference_logprobs_T=np.zeros(len(c.tokens_T)), kl_coef=0.1) for c in group.completions]
    near = replace(group, completions=tuple(completions))
    assert all(row.kl_coef == 0.1 for row in algorithm.assign(5, [near]).rows)
    sound = algorithm.assign(5, [group])
    first, *rest = sound.rows
    elsewhere = replace(first, advantages_T=np.ones(len(first.tokens_T)))
    for answer, given, code in (
        (sound, near, "credit.no-reference"),
        ("credit", group, "credit.not-credit"),
        (replace(sound, statuses_P=()), group, "credit.wrong-count"),
        (replace(sound, tokens_PG=(sound.tokens_PG[0][:1],)), group, "credit.wrong-count"),
        (replace(sound, rows=(elsewhere, *rest)), group, "credit.unsampled-token"),
    ):
        monkeypatch.setattr(algorithm.algorithm, "assign", lambda step, groups, a=answer: a)  # type: ignore[attr-defined]
        assert refused(algorithm.assign, 5, [given]) == [code]


def test_a_run_trains_with_it(install: Install, command: Any, toy_arguments: list[str], tmp_path: Path) -> None:
    install()
    result = command(*toy_arguments, "--max-steps", "3", "--algorithm-mode", "batch_mean")
    assert (result.code, result.err) == (0, "")
    folder = tmp_path / "logs" / "train"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["condition"], line["steps_seen"]) for line in steps] == [("batch_mean", n) for n in range(3)]
    assert "sepa_lambda" not in steps[0]
    assert json.loads((folder / "run.json").read_text())["condition"] == "batch_mean"
