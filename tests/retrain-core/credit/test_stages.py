"""Stages of credit are found by name, like any part: a stranger's will do, and a missing one names who provides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain import advantages
from retrain.advantages import compute_composable_advantages
from retrain.credit.flow import CreditFlow, build_flow
from retrain.credit.pipeline import CreditGroup, assign_credit
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.errors import ConfigError, CreditError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.registry import Plugins

BuildFlow = Callable[..., CreditFlow]
STRANGE = """
import numpy as np
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
    "whole": TransformSpec(name="whole", compute_context=lambda ctx: seen(ctx)),
}
CONTEXTS = []


def seen(ctx):
    CONTEXTS.append(ctx)
    return [np.zeros(len(u)) for u in ctx.uncertainties_G]


@hookimpl
def retrain_register_transforms(register):
    for name in NAMES:
        register(PluginSpec(name=name, summary="A test.", factory=SPECS[name]))
"""


@pytest.fixture
def strangers(distribution: Callable[..., Path], toys: Path) -> Callable[..., Plugins]:
    """`strangers("gtpo", "weighted")`: these transforms and the toys are installed, retrain-sepa is not."""

    def install(*names: str, more: str = "") -> Plugins:
        distribution("retrain-strange", {"strange": f"{STRANGE}\nNAMES = {names!r}\n{more}"})
        plugins = load_plugins({"RETRAIN_BLOCK": "retrain-sepa"})
        assert [failure for failure in plugins.failures if "strange" in failure.owner.distribution] == []
        plugins.left_out.clear()  # as if it were not installed, in place of left out on purpose
        return plugins

    return install


@pytest.fixture
def flow(tables: Mapping[str, TableEntry]) -> BuildFlow:
    """`flow(plugins, "--transform-mode", "weighted")`: what the command line names, on top of toy parts."""

    def build(plugins: Plugins, *arguments: str) -> CreditFlow:
        base = ["--advantage-mode", "toy_raw", "--uncertainty-kind", "toy_nll"]
        config, problems = load_config(None, tables=tables, arguments=[*base, *arguments])
        assert problems == []
        return build_flow(config, plugins)

    return build


def one_group() -> CreditGroup:
    logprobs_G = [np.array([-1.0, -2.0]), np.array([-3.0])]
    planning_G = [np.array([True, False]), np.array([True])]
    return CreditGroup(rewards_G=np.array([1.0, 0.5]), logprobs_G=logprobs_G, planning_G=planning_G, name="group 0")


@pytest.mark.parametrize(
    ("arguments", "place", "user", "stage", "transform"),
    [
        (["--transform-mode", "weighted"], "--transform-mode", "transform 'weighted'", "gtpo", "gtpo"),
        (["--transform-mode", "amplified"], "--transform-mode", "transform 'amplified'", "hicra", "gtpo_hicra"),
        (
            ["--transform-mode", "toy_flat", "--surprisal-mask-rho", "0.5"],
            "--surprisal-mask-rho",
            "the top-rho mask",
            "top_rho",
            "gtpo",
        ),
    ],
)
def test_a_stage_that_nobody_provides_is_a_missing_plugin(
    arguments: list[str],
    place: str,
    user: str,
    stage: str,
    transform: str,
    strangers: Callable[..., Plugins],
    flow: BuildFlow,
) -> None:
    with pytest.raises(ConfigError) as caught:
        flow(strangers("weighted", "amplified"), *arguments)
    (problem,) = caught.value.problems
    assert place in problem.where
    assert problem.what == f"{user} needs stage {stage!r}, and there is no transform named {transform!r}"
    assert "amplified (retrain-strange 1.0)" in problem.why
    assert problem.fix == install_line("retrain-sepa")


def test_every_missing_stage_is_told_with_everything_else(strangers: Callable[..., Plugins], flow: BuildFlow) -> None:
    plugins = strangers("weighted")
    arguments = ["--advantage-mode", "gpro", "--transform-mode", "weighted", "--surprisal-mask-rho", "0.5"]
    with pytest.raises(ConfigError) as caught:
        flow(plugins, *arguments)
    problems = [problem.what for problem in caught.value.problems]
    assert len(problems) == 3
    assert "no advantage named 'gpro'" in problems[0]
    assert "needs stage 'gtpo'" in problems[1]
    assert "needs stage 'top_rho'" in problems[2]


def test_a_faulty_transform_is_told_with_the_other_problems(strangers: Callable[..., Plugins], flow: BuildFlow) -> None:
    plugins = strangers("weighted", more="SPECS['weighted'] = 3")
    with pytest.raises(PluginError, match=r"transform 'weighted' of retrain-strange 1\.0 is int"):
        flow(plugins, "--transform-mode", "weighted")
    with pytest.raises(ConfigError) as caught:
        flow(plugins, "--transform-mode", "weighted", "--advantage-mode", "gpro")
    assert len(caught.value.problems) == 2


def test_another_distribution_may_provide_the_stage(strangers: Callable[..., Plugins], flow: BuildFlow) -> None:
    built = flow(strangers("gtpo", "weighted"), "--transform-mode", "weighted", "--gtpo-beta", "0.3")
    assert built.gtpo_beta == 7.0  # the owner of the stage says how strong it is
    result = assign_credit([one_group()], built)
    assert [advs_T.tolist() for advs_T in result.token_advs[0]] == [[7.0, 7.0], [3.5]]


def test_what_a_stage_gives_is_checked_as_any_part(strangers: Callable[..., Plugins], flow: BuildFlow) -> None:
    built = flow(strangers("gtpo", "weighted", more="SHORT = 1"), "--transform-mode", "weighted")
    with pytest.raises(CreditError, match="group 0 completion 0: stage 'gtpo' has length 1, expected 2"):
        assign_credit([one_group()], built)


def test_a_transform_of_that_name_without_the_stage_is_named(
    strangers: Callable[..., Plugins], flow: BuildFlow
) -> None:
    more = "SPECS['gtpo'] = TransformSpec(name='gtpo')"
    with pytest.raises(ConfigError, match=r"transform 'gtpo' of retrain-strange 1\.0 carries no stage 'gtpo'"):
        flow(strangers("gtpo", "weighted", more=more), "--transform-mode", "weighted")


def test_two_owners_of_a_stage_are_both_named(strangers: Callable[..., Plugins], flow: BuildFlow) -> None:
    strangers("gtpo", "weighted")
    with pytest.raises(ConfigError) as caught:
        flow(load_plugins({}), "--transform-mode", "weighted")
    (problem,) = caught.value.problems
    assert "provided twice" in problem.what
    assert "retrain-sepa" in problem.what
    assert "retrain-strange" in problem.what


def test_a_whole_transform_needs_no_stage_and_sees_the_default_strengths(
    strangers: Callable[..., Plugins], flow: BuildFlow
) -> None:
    built = flow(strangers("whole"), "--transform-mode", "whole")
    assign_credit([one_group()], built)
    import strange  # type: ignore[import-not-found]

    (context,) = strange.CONTEXTS
    assert (context.gtpo_beta, context.hicra_alpha) == (0.1, 0.2)


def test_the_public_functions_are_those_of_the_installed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: advantages.gtpo_weights(np.array([1.0, 3.0]), 1.0).tolist(),
        lambda: advantages.amplify_planning(np.array([1.0, -1.0]), np.array([True, True]), 0.5).tolist(),
        lambda: advantages.top_rho_threshold([np.array([1.0, 2.0])], 0.5),
    ]
    assert [call() for call in calls] == [[0.5, 1.5], [1.5, -0.5], 2.0]
    monkeypatch.setenv("RETRAIN_BLOCK", "retrain-sepa")
    for call, name in zip(calls, ("gtpo_weights", "amplify_planning", "top_rho_threshold"), strict=True):
        with pytest.raises(PluginError) as caught:
            call()
        assert f"retrain.advantages: {name}() needs stage" in str(caught.value)
        assert "there is no transform named 'gtpo" in str(caught.value)
        assert "fix: retrain-sepa is installed, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it" in str(caught.value)
    monkeypatch.delenv("RETRAIN_BLOCK")
    assert calls[2]() == 2.0


def test_plugins_are_discovered_once_until_something_changes(
    monkeypatch: pytest.MonkeyPatch, distribution: Callable[..., Path], toys: Path
) -> None:
    discovered: list[None] = []

    def counted() -> Plugins:
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
