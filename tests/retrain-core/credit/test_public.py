"""The public functions: the same pipeline, with whatever is installed; a stage of another distribution will do."""

import importlib

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain import advantages
from retrain.advantages import compute_composable_advantages
from retrain.credit.flow import build_flow
from retrain.credit.pipeline import assign_credit
from retrain.kernel.config.load import load_config
from retrain.kernel.errors import ConfigError, CreditError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.missing import install_line
from tests.kit.credit_parts import make_credit_group
from tests.kit.problems import codes_in, refused


def test_toys_lists_and_missing_masks(toys):
    result = compute_composable_advantages(
        [1, 0], [[-1, -1], [-1]], advantage_mode="toy_raw", transform_mode="toy_index", uncertainty_kind="toy_nll"
    )
    assert [advs.tolist() for advs in result.token_advs] == [[1.0, 2.0], [0.0]]
    assert result.metrics == {"toy_groups": 1.0}
    right, penalty = np.array([1.0, 0.0, 1.0, 0.0]), np.array([-100.0, 0.0, 0.0, -100.0])
    named = {"named_rewards": {"right": right, "penalty": penalty}, "advantage_mode": "gdpo", "transform_mode": "none"}
    params = {
        "advantage_params": {"weights": {"right": 1.0, "penalty": 1.0}},
        "batch_norm": True,
        "advantage_clip": 0.5,
    }
    result = compute_composable_advantages(right + penalty, [[-1.0, -1.0]] * 4, **named, **params)
    assert_allclose([advs_T[0] for advs_T in result.token_advs], [0, 0, 0.5, -0.5], atol=2e-4)
    with pytest.raises(ConfigError, match="did you mean 'gtpo'"):
        compute_composable_advantages([1, 0], [[-1], [-1]], transform_mode="gtop")
    assert refused(compute_composable_advantages, [1, 0], [[-1]], [[False], [False]]) == ["credit.wrong-count"]


STRANGE = """
from retrain.advantages import CreditStage, TransformSpec
from retrain.api import PluginSpec, hookimpl

GTPO = TransformSpec(
    name="gtpo",
    use_gtpo=True,
    stages={
        "gtpo": CreditStage(
            apply=lambda u_T, strength: [strength] * (len(u_T) - SHORT),
            strength=lambda config: 7.0,
        )
    },
)
SHORT = 0
SPECS = {
    "gtpo": GTPO,
    "weighted": TransformSpec(name="weighted", use_gtpo=True),
    "amplified": TransformSpec(name="amplified", apply_hicra=True),
    "whole": TransformSpec(name="whole", compute_context=lambda ctx: ctx.uncertainties_G),
}

@hookimpl
def retrain_register_transforms(register):
    for name in NAMES:
        register(PluginSpec(name=name, summary="A test.", factory=SPECS[name]))
"""


@pytest.fixture
def strangers(distribution, toys):
    """`strangers("gtpo", "weighted")`: these transforms and the toys are installed, retrain-sepa is not."""

    def install(*names, more=""):
        distribution("retrain-strange", {"strange": f"{STRANGE}\nNAMES = {names!r}\n{more}"})
        plugins = load_plugins({"RETRAIN_BLOCK": "retrain-sepa"})
        assert [failure for failure in plugins.failures if "strange" in failure.owner.distribution] == []
        plugins.left_out.clear()  # as if it were not installed, in place of left out on purpose
        return plugins

    return install


@pytest.fixture
def flow(tables):
    """`flow(plugins, "--transform-mode weighted")`: what the command line names, on top of toy parts."""

    def build(plugins, arguments):
        base = ["--advantage-mode", "toy_raw", "--uncertainty-kind", "toy_nll"]
        config, problems = load_config(None, tables=tables, arguments=[*base, *arguments.split()])
        assert problems == []
        return build_flow(config, plugins)

    return build


def one_group():
    return make_credit_group([1.0, 0.5], [[-1.0, -2.0], [-3.0]], planning=[[True, False], [True]])


@pytest.mark.parametrize(
    ("arguments", "place", "user", "stage"),
    [
        ("--transform-mode weighted", "--transform-mode", "transform 'weighted'", "gtpo"),
        ("--transform-mode amplified", "--transform-mode", "transform 'amplified'", "hicra"),
        ("--transform-mode toy_flat --surprisal-mask-rho 0.5", "--surprisal-mask-rho", "the top-rho mask", "top_rho"),
    ],
)
def test_a_stage_that_nobody_provides_is_a_missing_plugin(arguments, place, user, stage, strangers, flow):
    with pytest.raises(ConfigError) as caught:
        flow(plugins := strangers("weighted", "amplified"), arguments)
    (problem,) = caught.value.problems
    assert place in problem.where
    assert problem.what.startswith(f"{user} needs stage {stage!r}")
    assert problem.fix == install_line("retrain-sepa")
    with pytest.raises(ConfigError) as caught:
        flow(plugins, f"{arguments} --advantage-mode gpro")
    assert [stage in problem.what for problem in caught.value.problems] == [False, True], "all are reported at once"


def test_a_faulty_transform_is_reported_with_the_other_problems(strangers, flow):
    plugins = strangers("weighted", more="SPECS['weighted'] = 3")
    with pytest.raises(PluginError) as alone:
        flow(plugins, "--transform-mode weighted")
    assert codes_in(alone) == ["plugin.wrong-shape"]
    with pytest.raises(ConfigError) as caught:
        flow(plugins, "--transform-mode weighted --advantage-mode gpro")
    assert codes_in(caught)[1:] == ["plugin.wrong-shape"]


def test_another_distribution_may_provide_the_stage_and_is_checked(strangers, flow):
    plugins = strangers("gtpo", "weighted")
    built = flow(plugins, "--transform-mode weighted --gtpo-beta 0.3")
    assert built.gtpo_beta == 7.0  # the owner of the stage says how strong it is
    result = assign_credit([one_group()], built)
    assert [advs_T.tolist() for advs_T in result.token_advs[0]] == [[7.0, 7.0], [3.5]]
    importlib.import_module("strange").SHORT = 1
    with pytest.raises(CreditError, match="group 0 completion 0: stage 'gtpo'") as caught:
        assign_credit([one_group()], built)
    assert codes_in(caught) == ["credit.wrong-length"]


def test_a_transform_of_that_name_without_the_stage_and_two_owners_are_named(strangers, flow):
    plugins = strangers("gtpo", "weighted", more="SPECS['gtpo'] = TransformSpec(name='gtpo')")
    with pytest.raises(ConfigError, match=r"of retrain-strange 1\.0 carries no stage") as caught:
        flow(plugins, "--transform-mode weighted")
    assert codes_in(caught) == ["plugin.no-stage"]
    with pytest.raises(ConfigError) as caught:
        flow(load_plugins({}), "--transform-mode weighted")
    (problem,) = caught.value.problems
    assert "provided twice" in problem.what
    assert all(name in problem.what for name in ("retrain-sepa", "retrain-strange"))


def test_the_public_functions_are_those_of_the_installed_distribution(monkeypatch):
    calls = [
        lambda: advantages.gtpo_weights(np.array([1.0, 3.0]), 1.0).tolist(),
        lambda: advantages.amplify_planning(np.array([1.0, -1.0]), np.array([True, True]), 0.5).tolist(),
        lambda: advantages.top_rho_threshold([np.array([1.0, 2.0])], 0.5),
    ]
    assert [call() for call in calls] == [[0.5, 1.5], [1.5, -0.5], 2.0]
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-sepa")
    for call, name in zip(calls, ("gtpo_weights", "amplify_planning", "top_rho_threshold"), strict=True):
        with pytest.raises(PluginError, match=f"retrain.advantages: {name}\\(\\) needs stage"):
            call()
    monkeypatch.delenv("RETRAIN_BLOCK")
    assert calls[2]() == 2.0


def test_plugins_are_discovered_once_until_something_changes(monkeypatch, distribution, toys):
    discovered = []

    def counted():
        discovered.append(None)
        return load_plugins()

    monkeypatch.setattr("retrain.credit.public.load_plugins", counted)
    group = ([1.0, 0.0], [[-1.0], [-1.0]])
    compute_composable_advantages(*group, advantage_mode="toy_raw")  # writes byte code beside what it imports
    compute_composable_advantages(*group, advantage_mode="toy_raw")
    discovered.clear()
    for _ in range(3):
        compute_composable_advantages(*group, advantage_mode="toy_raw")
    assert discovered == []
    with pytest.raises(ConfigError, match="no transform named 'whole'"):
        compute_composable_advantages(*group, transform_mode="whole")
    distribution("retrain-strange", {"strange": f"{STRANGE}\nNAMES = ['whole']"})  # into a folder that is on the path
    compute_composable_advantages(*group, transform_mode="whole")
    assert len(discovered) == 1
    discovered.clear()
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-strange")
    with pytest.raises(ConfigError, match="no transform named 'whole'"):
        compute_composable_advantages(*group, transform_mode="whole")
    assert len(discovered) == 1
