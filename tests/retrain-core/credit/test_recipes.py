"""From a configuration, or a recipe, to a credit flow in every form; text and rewards of single tokens."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.advantages import compute_composable_advantages
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.checks import as_advantage, as_algorithm, as_transform, as_uncertainty
from retrain.credit.flow import build_flow
from retrain.credit.specs import (
    AdvantageContext,
    AdvantageSpec,
    AlgorithmSpec,
    TransformSpec,
    UncertaintySpec,
)
from retrain.inspect.credit_command import replay
from retrain.kernel.config.load import Setting, load_config
from retrain.kernel.config.resolved import Layer, Origin
from retrain.kernel.contracts.algorithm import Needs
from retrain.kernel.declared import Kind, PluginSpec
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Owner
from retrain.records.manifest import config_toml
from retrain.records.run import StoredStep
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain.testing.toys import scored_groups
from tests.kit.conforming import check_conforms
from tests.kit.credit_parts import found, make_credit_group, make_flow
from tests.kit.problems import codes_in

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


@pytest.fixture(scope="module")
def plugins():
    """Ours, and a distribution with a sound recipe and faulty ones."""
    found = load_plugins({})
    owner = Owner(distribution="retrain-bold", version="2.1")
    whole = {"algorithm.algorithm_mode": "maxrl_gtpo"}
    parts = {"bold": VALUES, "whole": whole, "listed": [("a", 1)], "partial": PARTIAL, **FAULTY}
    for name, values in parts.items():
        found.registries[Kind.RECIPE].add(PluginSpec(name=name, summary="x", factory=values), owner)
    return found


@pytest.fixture
def read(plugins, tmp_path):
    """`read(toml, *flags, environ=..., settings=...)`: the configuration and every problem, as a run finds them."""

    def make(toml="", *flags, **more):
        file = tmp_path / "r.toml"
        file.write_text(toml)
        tables = registered_tables(plugins)
        config, problems = read_config(file, plugins, tables, arguments=flags, **more)
        return config, problems + check(config, plugins, tables)[1]

    return make


def test_a_recipe_stands_between_the_defaults_and_everything_else(read, plugins):
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
def test_the_label_shows_every_departure_and_survives_a_repetition(read, plugins, toml, label):
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
def test_a_faulty_recipe_is_one_problem_that_names_its_owner(read, name, where, code):
    [problem] = read(f'[algorithm]\nrecipe = "{name}"\n')[1]
    assert where in problem.where
    assert code in (problem.code, None)
    assert "retrain-bold 2.1" in problem.why + problem.what


def test_a_recipe_may_be_named_wherever_a_key_is_set(read, monkeypatch):
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


def test_a_recipe_beside_an_algorithm_mode_is_refused_unless_it_names_it(read, plugins):
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
    for each in (config, again):
        assert (each.algorithm.clip_eps, each.algorithm.params) == (0.1, {"a": 1})
        assert build_flow(each, plugins).condition == "partial~loss=ppo"


SPEC = AdvantageSpec(name="mine", compute=lambda ctx: ctx.rewards_G * ctx.params["scale"])


@pytest.mark.parametrize(
    "target",
    [
        *(SPEC, lambda: SPEC, lambda rewards: 2 * rewards, lambda rewards, params: params["scale"] * rewards),
        lambda ctx: ctx.params["scale"] * ctx.rewards_G,
        *(lambda context: context.params["scale"] * context.rewards_G, lambda rewards, extra=3: 2 * rewards),
        *(lambda rewards, *, extra=3, **more: 2 * rewards, lambda: lambda rewards: 2 * rewards),
        functools.partial(lambda factor, rewards: factor * rewards, 2),
    ],
)
def test_the_forms_of_an_advantage(target):
    spec = as_advantage(found(target))
    assert spec.name == "mine"
    context = AdvantageContext(rewards_G=np.array([1.0, 3.0]), params={"scale": 2.0})
    assert list(spec.compute(context)) == [2.0, 6.0]


def test_the_forms_of_the_other_parts():
    for convert, spec in (
        (as_transform, TransformSpec(name="mine")),
        (as_uncertainty, UncertaintySpec(name="mine", compute=lambda ctx: ctx.logprobs_T)),
        (as_algorithm, AlgorithmSpec(name="mine", advantage_mode="a", transform_mode="b")),
    ):
        assert convert(found(spec)) is spec
        assert convert(found(lambda spec=spec: spec)) is spec
    for convert in (as_transform, as_algorithm):
        whole = convert(found(lambda ctx: []))
        assert whole.compute_context is not None
        assert (whole.needs_planning, whole.uses_sepa_controller) == (True, True)

    def by_step(step):
        return step.rewards_PG

    assert as_advantage(found(by_step)).compute_step is by_step


OTHERS = [3, "text", None, lambda a, b, c: a, lambda: 3]
NOT_ONE = [  # an advantage is one function, and only one by token needs no verdict
    AdvantageSpec(name="a"),
    AdvantageSpec(name="a", compute=lambda ctx: [], compute_step=lambda step: []),
    AdvantageSpec(name="a", compute=lambda ctx: [], compute_tokens=lambda ctx: []),
    AdvantageSpec(name="a", compute=lambda ctx: [], needs_verdict=False),
]


@pytest.mark.parametrize(
    ("convert", "target"),
    [
        *((convert, t) for convert in (as_advantage, as_transform, as_uncertainty, as_algorithm) for t in OTHERS),
        *((as_advantage, spec) for spec in NOT_ONE),
    ],
)
def test_other_forms_are_refused_with_the_owner(convert, target):
    with pytest.raises(PluginError, match="'mine' of my-dist 1") as caught:
        convert(found(target))
    assert codes_in(caught) == ["plugin.wrong-shape"]
    if target in NOT_ONE[1:2]:
        assert "has both compute and compute_step" in str(caught.value)

    def make():
        raise ValueError("no such table")

    line = make.__code__.co_firstlineno + 1
    with pytest.raises(PluginError, match=rf"'mine' of my-dist 1 .*\.py:{line}\)") as caught:
        as_transform(found(make))
    assert codes_in(caught) == ["plugin.raised"]


@pytest.fixture
def flow(tables, toys):
    """`flow("--key value")`: the flow that a command line names, with the toys installed."""

    def build(arguments):
        config, problems = load_config(None, tables=tables, arguments=arguments.split())
        assert problems == []
        return build_flow(config, load_plugins({}))

    return build


def test_names_and_numbers_come_from_the_configuration(flow):
    built = flow(
        "--advantage-mode toy_identity --transform-mode toy_flat --uncertainty-kind toy_nll --batch-norm true "
        "--gtpo-beta 0.7 --hicra-alpha 0.3 --surprisal-mask-rho 0.2 --transform-param cap=1 --advantage-clip 2.5"
    )
    assert built.condition == "toy_raw+toy_flat", "an alias gives the same part"
    assert (built.gtpo_beta, built.hicra_alpha, built.mask_rho) == (0.7, 0.3, 0.2)
    assert (built.batch_norm, built.advantage_clip, built.transform_params) == (True, 2.5, {"cap": 1})
    assert (built.needs_planning, built.needs_entropy, built.controller) == (False, False, "")
    whole = flow("--transform-mode toy_index")
    assert (whole.needs_planning, whole.controller) == (True, "sepa")
    built = flow("--algorithm-mode grpo_none --advantage-mode maxrl --transform-mode gtpo_sepa")
    assert (built.advantage.name, built.transform.name, built.condition) == ("grpo", "none", "grpo_none")
    for key in ("uncertainty_kind", "uncertainty_metric", "token_uncertainty"):
        built = flow(f"--transform-mode toy_flat --transform-param {key}=toy_entropy")
        assert (built.uncertainty.name, built.needs_entropy, built.transform_params) == ("toy_entropy", True, {})
    with pytest.raises(ConfigError, match="unknown option 'scael'"):
        flow("--advantage-mode grpo --advantage-param scael=std")
    assert flow("--advantage-mode toy_raw --advantage-param anything=1").advantage_params == {"anything": 1}


WORDS = {1: "\\bo", 2: "xed{4", 3: "2}", 4: " so", 5: "é"}


class Tokenizer:
    """Decodes a word per id; an id outside its vocabulary is an error."""

    def decode(self, tokens, **_):
        return "".join(WORDS[int(token)] for token in tokens)


def group_of(*ids_G):
    """A group with these sampled tokens and rewards 1, 0, 1, ..."""
    rewards = [float(number % 2 == 0) for number in range(len(ids_G))]
    (group,) = scored_groups([make_credit_group(rewards, [[-1.0] * len(ids) for ids in ids_G])])
    pairs = zip(group.completions, ids_G, strict=True)
    completions = tuple(replace(c, tokens_T=np.array([9, 9, *ids], dtype=np.int64)) for c, ids in pairs)
    return replace(group, completions=completions)


def seen_by(flow, group, tokenizer):
    seen = []

    def credit(ctx):
        seen.append(ctx)
        return [np.zeros(len(lp)) for lp in ctx.logprobs_G]

    if flow.algorithm:
        flow = replace(flow, algorithm=replace(flow.algorithm, compute_context=credit))
    else:
        flow = replace(flow, transform=replace(flow.transform, compute_context=credit))
    CreditAlgorithm(flow=flow, tokenizer=tokenizer).assign(0, [group])
    return seen


@pytest.mark.parametrize("spec", [TransformSpec, AlgorithmSpec])
def test_a_part_that_asks_sees_the_sampled_tokens_and_their_texts(spec):
    part = spec(name="t", needs_text=True)
    flow = make_flow(**({"transform": part} if spec is TransformSpec else {"algorithm": part}))
    (ctx,) = seen_by(flow, group_of([1, 2, 3], [4]), Tokenizer())
    assert ctx.tokens_G is not None
    assert [tokens.tolist() for tokens in ctx.tokens_G] == [[1, 2, 3], [4]]  # the prompt's are not among them
    assert ctx.texts_G == [["\\bo", "xed{4", "2}"], [" so"]]
    assert ctx.token_rewards_G is None


def test_rewards_of_single_tokens_reach_a_part_that_asks():
    group = group_of([1, 2], [3])
    first = replace(group.completions[0], rewards_T=np.array([7.0, 7.0, 0.5, -0.25]))
    flow = make_flow(transform=TransformSpec(name="t", needs_token_rewards=True))
    (ctx,) = seen_by(flow, replace(group, completions=(first, group.completions[1])), None)
    assert ctx.token_rewards_G is not None
    assert [rewards.tolist() for rewards in ctx.token_rewards_G] == [[0.5, -0.25], [0.0]]
    assert (ctx.tokens_G, ctx.texts_G) == (None, None), "nothing is decoded unless a part asks"
    assert CreditAlgorithm(flow=flow).needs == Needs(token_rewards=True)  # for the part that sets them
    with pytest.raises(ConfigError, match="takes rewards of single tokens: a run does not store them"):
        replay(StoredStep(step=3, metrics={}, groups=()), flow, None, sepa_lambda=0.0)


DIGITS = """
from retrain.advantages import TransformSpec
from retrain.api import PluginSpec

def credit(ctx):
    pairs = zip(ctx.advantages_G, ctx.texts_G, strict=True)
    return [[a * (4.0 if any(map(str.isdigit, text)) else 1.0) for text in texts] for a, texts in pairs]

SPEC = TransformSpec(name="digits", compute_context=credit, needs_text=True)
PLUGIN = PluginSpec(name="digits", summary="Four times the credit for tokens with a digit.", factory=SPEC)
"""


def test_a_transform_that_reads_the_text_conforms_and_credits_what_it_reads(tmp_path, monkeypatch):
    check_conforms("transform", DIGITS, monkeypatch, tmp_path, "credit_for_digits")
    texts = ["The", " answer", " is", " \\bo", "xed{4", "2", "", "}", "."]
    logprobs, modes = (
        [[-1.0] * len(texts), [-1.0, -1.0]],
        {"advantage_mode": "grpo", "texts_G": [texts, ["no", " answer"]]},
    )
    result = compute_composable_advantages([1.0, 0.0], logprobs, transform_mode="credit_for_digits.PLUGIN", **modes)
    assert result.token_advs[0].tolist() == [0.5, 0.5, 0.5, 0.5, 2.0, 2.0, 0.5, 0.5, 0.5]
    assert result.token_advs[1].tolist() == [-0.5, -0.5]
