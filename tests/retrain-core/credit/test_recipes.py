"""`[algorithm] recipe`: defaults under one name, which give way to whatever is set, and the label of such a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from retrain.credit.flow import build_flow
from retrain.kernel.config.load import Setting
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.declared import Kind, PluginSpec
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner, Plugins
from retrain.records.manifest import config_toml
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables

VALUES: Mapping[str, Any] = {
    "algorithm.advantage_mode": "grpo",
    "algorithm.advantage_params": {"scale": "std"},
    "algorithm.transform_mode": "none",
    "algorithm.loss": "ppo",
    "algorithm.clip_eps_high": 0.28,
    "optimizer.grad_clip_norm": 1.0,
    "training.temperature": 1.0,
}
FAULTY: Mapping[str, Mapping[str, Any]] = {
    "unknown": {"algorithm.clip_epz": 0.2},
    "no_table": {"algorithms.loss": "ppo"},
    "refused": {"algorithm.loss": "ppo", "algorithm.clip_eps": 2.0},
    "misnamed": {"algorithm.advantage_mode": "grpoo"},
    "misled": {"algorithm.advantage_mode": "grpo", "algorithm.advantage_params": {"scales": "std"}},
    "outside": {"training.max_steps": 3},
    "campaigning": {"campaign.retries": 3},
    "nested": {"algorithm.recipe": "bold"},
}
PARTIAL = {"algorithm.clip_eps": 0.1, "algorithm.params": {"a": 1}}
Read = Callable[..., tuple[Config, list[Problem]]]


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """Ours, and a distribution with a sound recipe and faulty ones."""
    found = load_plugins({})
    owner = Owner(distribution="retrain-bold", version="2.1")
    whole = {"algorithm.algorithm_mode": "maxrl_gtpo"}
    parts = {"bold": VALUES, "whole": whole, "listed": [("a", 1)], "partial": PARTIAL, **FAULTY}
    for name, values in parts.items():
        found.registries[Kind.RECIPE].add(PluginSpec(name=name, summary="x", factory=values), owner)
    return found


@pytest.fixture
def read(plugins: Plugins, tmp_path: Path) -> Read:
    """`read(toml, *flags, environ=..., settings=...)`: the configuration and every problem, as a run finds them."""

    def make(toml: str = "", *flags: str, **more: Any) -> tuple[Config, list[Problem]]:
        file = tmp_path / "r.toml"
        file.write_text(toml)
        tables = registered_tables(plugins)
        config, problems = read_config(file, plugins, tables, arguments=flags, **more)
        return config, problems + check(config, plugins, tables)[1]

    return make


def test_a_recipe_stands_between_the_defaults_and_everything_else(read: Read, plugins: Plugins) -> None:
    setting = Setting(path="training.temperature", value=0.5, origin=Origin(layer=Layer.FILE, place="condition 1"))
    config, problems = read(
        '[algorithm]\nrecipe = "bold"\nloss = "cispo"\n[algorithm.advantage_params]\nddof = 1\n',
        *("--optim-grad-clip-norm", "2.0"),
        environ={"RETRAIN__ALGORITHM__TRANSFORM_MODE": "gtpo"},
        settings=[setting],
    )
    assert not problems
    algorithm = config.algorithm
    assert (algorithm.advantage_mode, algorithm.advantage_params) == ("grpo", {"scale": "std", "ddof": 1})
    assert str(config.origin("algorithm.advantage_mode")) == "recipe bold"
    assert config.origin("algorithm.advantage_mode").layer is Layer.RECIPE
    set_by = {
        "algorithm.loss": ("cispo", "r.toml:3"),
        "algorithm.transform_mode": ("gtpo", "RETRAIN__ALGORITHM__TRANSFORM_MODE"),
        "optimizer.grad_clip_norm": (2.0, "--optim-grad-clip-norm"),
        "training.temperature": (0.5, "condition 1"),
    }
    for path, (value, place) in set_by.items():
        assert (config.value(path, None), str(config.origin(path)).endswith(place)) == (value, True), path
    assert algorithm.clip_eps_high == 0.0  # the recipe's clip is that of its own loss
    assert build_flow(config, plugins).condition == (
        "bold~advantage_params.ddof=1,loss=cispo,optim_grad_clip_norm=2.0,temperature=0.5,transform_mode=gtpo"
    )


@pytest.mark.parametrize(
    ("toml", "label"),
    [
        ("", "bold"),
        ('loss = "ppo"\nclip_eps_high = 0.28\n', "bold"),  # what the recipe says anyway
        ("surprisal_mask_rho = 0.2\n", "bold~surprisal_mask_rho=0.2"),
        ("tis_cap = 2.0\n", "bold~tis_cap=2.0"),
        ('advantage_mode = "maxrl"\n', "bold~advantage_mode=maxrl"),
        ('advantage_params = {scale = ""}\n', "bold~advantage_params.scale="),
    ],
)
def test_the_label_shows_every_departure_and_survives_a_repetition(
    read: Read, plugins: Plugins, toml: str, label: str
) -> None:
    config, problems = read(f'[algorithm]\nrecipe = "bold"\n{toml}[training]\nlr = 1e-3\n')
    assert not problems
    assert build_flow(config, plugins).condition == label
    again, problems = read(config_toml(config, seed=-1))
    assert not problems
    assert again.as_dict() == config.as_dict()
    assert {origin.layer for origin in again.origins.values()} == {Layer.FILE}
    assert build_flow(again, plugins).condition == label


@pytest.mark.parametrize(
    ("name", "where", "code"),
    [
        ("unknown", "recipe unknown [algorithm] clip_epz", "config.unknown-key"),
        ("no_table", "recipe no_table [algorithms] loss", "config.unknown-key"),
        ("refused", "recipe refused [algorithm] clip_eps", None),
        ("misnamed", "recipe misnamed [algorithm] advantage_mode", None),
        ("misled", "recipe misled [algorithm] advantage_params", None),
        ("outside", "recipe outside [training] max_steps", "recipe.key-of-run"),
        ("campaigning", "recipe campaigning [campaign] retries", "recipe.key-of-run"),
        ("nested", "recipe nested [algorithm] recipe", "recipe.names-recipe"),
        ("listed", "[algorithm] recipe", "recipe.not-a-mapping"),
    ],
)
def test_a_faulty_recipe_is_one_problem_that_names_its_owner(
    read: Read, name: str, where: str, code: str | None
) -> None:
    [problem] = read(f'[algorithm]\nrecipe = "{name}"\n')[1]
    assert where in problem.where
    assert code in (problem.code, None)
    assert "retrain-bold 2.1" in problem.why + problem.what


def test_a_recipe_may_be_named_wherever_a_key_is_set(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    [problem] = read('[algorithm]\nrecipe = "bolt"\n')[1]
    assert "r.toml:2 [algorithm] recipe" in problem.where
    assert (problem.what, problem.fix) == ("no recipe named 'bolt'", "use 'bold'")
    [problem] = read("[algorithm]\nrecipe = 3\n")[1]
    assert "not the integer 3" in problem.what
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    given = ("", "--recipe", "bold"), ("", "--recipe", f"{__name__.rpartition('.')[2]}.VALUES"), ()
    for arguments in given:  # a flag, a dotted path, the environment
        config, problems = read(*arguments, environ={} if arguments else {"RETRAIN__ALGORITHM__RECIPE": "bold"})
        assert (problems, config.algorithm.loss, config.optimizer.grad_clip_norm) == ([], "ppo", 1.0)


def test_a_recipe_beside_an_algorithm_mode_is_refused_unless_it_names_it(read: Read, plugins: Plugins) -> None:
    [problem] = read('[algorithm]\nrecipe = "bold"\nalgorithm_mode = "maxrl_gtpo"\n')[1]
    assert problem.code == "recipe.replaced"
    assert "r.toml:3 [algorithm] algorithm_mode" in problem.where
    config, problems = read('[algorithm]\nrecipe = "whole"\n')
    assert not problems
    flow = build_flow(config, plugins)
    assert (flow.condition, flow.algorithm is not None) == ("whole", True)
    assert not read(config_toml(config, seed=-1))[1]
    config, problems = read('[algorithm]\nrecipe = "partial"\nloss = "ppo"\n')  # it names no loss: its clip is for any
    again, more = read(config_toml(config, seed=-1))
    assert problems == more == []
    for found in (config, again):
        assert (found.algorithm.clip_eps, found.algorithm.params) == (0.1, {"a": 1})
        assert build_flow(found, plugins).condition == "partial~loss=ppo"
