"""Scaffolds with parameters: a value in the TOML reaches the part that a run builds, and a wrong one is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retrain.api import Example, Kind, PluginContext, Seeds
from retrain.campaign.load import load_campaign
from retrain.campaign.session import launcher_of
from retrain.cli.command_line import run
from retrain.cli.scaffold.render import KINDS, kind_of, slug, template
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import build_part
from retrain.run.configure import load_checked
from retrain.tasks.scoring.build import build_rewards, load_data
from tests.kit.problems import codes_in

BASE = {"model": 'model = "builtin:tiny"', "backend": 'devices = "cpu"', "data": 'source = "arithmetic"'}
FILE = "own.toml"


def context_of() -> tuple[PluginContext, Any]:
    """What parts get in a run of `own.toml`, and its checked configuration."""
    plugins = load_plugins({})
    checked = load_checked([FILE], plugins)
    return PluginContext(config=checked.config, seeds=Seeds(1), plugins=plugins), checked


def number_of_tasks() -> int:
    context, _ = context_of()
    key, config = "environment.provider", context.config
    return len(build_part(Kind.ENVIRONMENT, config.value(key, ""), key, context, {}, "", ()).load().examples)


def number_of_examples() -> int:
    context, checked = context_of()
    return len(load_data(checked.config, context).examples)


def score_of_a_near_miss() -> float:
    context, checked = context_of()
    *_, own = build_rewards(checked.config, context, None)
    return float(own.reward.score(Example(id="1", prompt="?", reference="100"), r"\boxed{104}").value)


def niceness() -> int:
    plugins = load_plugins({})
    launcher: Any = launcher_of(load_campaign([FILE], plugins), plugins)
    return int(launcher.nice)


@dataclass(frozen=True)
class Case:
    """A parameter of a scaffold: where the TOML has it, and what two values of it do; `before` are lines of the table.

    Without `observe` the tests of test_scaffold.py train with the parameter.
    """

    table: str
    key: str
    options: str
    name: str
    values: Mapping[str, object]
    observe: Callable[[], object] | None = None
    before: str = ""
    part: str = "PLUGIN"

    def lines(self, kind: str, name: str, value: str) -> str:
        part = f"my_{kind.replace('-', '_')}.{self.part}"
        return f'{self.before}{self.key} = "{part}"\n{self.options} = {{ {name} = {value} }}'


CAMPAIGN = 'seeds = [1]\nmax_steps = 1\nconditions = [{ advantage_mode = "grpo", transform_mode = "none" }]\n'
CASES = {
    "transform": Case("algorithm", "transform_mode", "transform_params", "floor", {"0.5": 0}),
    "loss": Case("algorithm", "loss", "loss_params", "tau_good", {"1.0": 0}),
    "reward": Case("reward", "type", "params", "tolerance", {"0.01": 0.0, "0.05": 1.0}, score_of_a_near_miss),
    "inference-engine": Case("inference", "engine", "options", "max_completions", {"64": 0}),
    "planning-detector": Case("planning", "detector", "params", "openings", {'["wait"]': 0}),
    "data-source": Case("data", "source", "options", "size", {"7": 7, "9": 9}, number_of_examples),
    "sampler": Case("data", "sampler", "sampler_params", "floor", {"0.01": 0}, before='source = "arithmetic"\n'),
    "backend": Case("backend", "backend", "options", "step_size", {"0.1": 0}),
    "environment": Case(
        *("environment", "provider", "args", "tasks", {"2": 2, "5": 5}, number_of_tasks), part="create"
    ),
    "launcher": Case(
        *("campaign", "launcher", "launcher_options", "nice", {"1": 1, "3": 3}), observe=niceness, before=CAMPAIGN
    ),
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parameters")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in CASES:
            assert run(["init-plugin", "--kind", kind, "--name", f"my-{kind}"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _folder(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lab)
    monkeypatch.syspath_prepend(str(lab))


def configured(kind: str, value: str, name: str) -> None:
    case = CASES[kind]
    tables = BASE | {case.table: case.lines(kind, name, value)}
    written(tables | ({"algorithm": 'transform_mode = "gtpo_hicra"'} if kind == "planning-detector" else {}))


def written(tables: Mapping[str, str], more: str = "") -> None:
    text = "".join(f"[{name}]\n{lines}\n" for name, lines in tables.items())
    Path(FILE).write_text(f"{text}{more}\n", encoding="utf-8")


@pytest.mark.parametrize("kind", [kind for kind, case in CASES.items() if case.observe])
def test_a_value_in_the_toml_changes_what_the_part_does(kind: str) -> None:
    for value, effect in CASES[kind].values.items():
        configured(kind, value, CASES[kind].name)
        assert CASES[kind].observe() == effect  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *((kind, "") for kind in ("reward", "inference-engine", "planning-detector", "transform", "data-source")),
        *(("transform", "2"), ("backend", "-1.0")),  # out of range
    ],
)
def test_a_wrong_parameter_is_refused_with_its_key(kind: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES[kind]
    configured(kind, value or next(iter(case.values)), case.name if value else f"{case.name}s")
    assert run([FILE, "--max-steps", "1"]) == 2
    told = capsys.readouterr().err
    if kind != "inference-engine":  # whose backend checks them
        assert codes_in(told) == ["plugin.bad-option" if value else "plugin.unknown-option"]
    assert re.search(rf"{FILE}:\d+ \[{case.table}\] .*\b{case.name}", told)


def test_every_scaffold_with_parameters_is_tried() -> None:
    for kind in map(slug, KINDS):
        variables = json.loads((template(kind) / "cookiecutter.json").read_text(encoding="utf-8"))
        assert bool(variables["params"] or kind_of(kind) is Kind.ENVIRONMENT) == (kind in CASES), kind


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('[reward]\ntype = "match"\nparams = { tolerance = 0.1 }', "reward 'match' takes no parameters"),
        ("[reward]\nparams = { tolerance = 0.1 }", "reward 'match' takes no parameters"),
        ("[reward.weights]\nmatch = 1.0\n[reward.params.math]\nx = 1", "params.math"),
        ("[reward.weights]\nmatch = 1.0\n[reward.params]\nmatch = 1", "params.match"),
        ("[inference]\noptions = { max_completions = 2 }", "inference engine 'pytorch' takes no parameters"),
    ],
)
def test_parameters_that_no_part_reads_are_refused(lines: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    written(BASE, lines)
    assert run(["explain", FILE]) == 2
    assert told in capsys.readouterr().err


def test_with_several_rewards_each_has_its_own_parameters() -> None:
    rewards = '[reward.weights]\nmatch = 1.0\n"my_reward.PLUGIN" = 1.0\n'
    written(BASE, rewards + '[reward.params."my_reward.PLUGIN"]\ntolerance = 0.05')
    assert score_of_a_near_miss() == 1.0
