"""Refusals: faults of plugins and inputs, named with plugin and place, and what tables refuse before anything loads."""

from dataclasses import replace

import numpy as np
import pytest

from retrain.credit import retrain_check_config as problems_of
from retrain.credit import retrain_explain
from retrain.credit.pipeline import assign_credit
from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformOutput, TransformSpec, UncertaintySpec
from retrain.kernel.config.load import load_config
from retrain.kernel.errors import CreditError
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.check import check
from tests.kit.credit_parts import make_credit_group, make_flow
from tests.kit.problems import codes_in

NAN = float("nan")


def answers(value):
    """A stage that answers the same to anything."""
    return lambda *_: value


def raising(*_):
    raise KeyError("scale")


def refused(flow, groups, code):
    with pytest.raises(CreditError) as caught:
        assign_credit(groups if isinstance(groups, list) else [groups], flow)
    assert codes_in(caught) == [code]
    return str(caught.value)


OF_NUMBERS = [  # answers where two numbers are wanted
    *(([1.0], "credit.wrong-length"), ([[1.0], [2.0]], "credit.wrong-length"), (1.0, "credit.wrong-length")),
    *(([1.0, NAN], "credit.not-finite"), ([float("-inf"), 1.0], "credit.not-finite"), (None, "credit.not-numbers")),
    *(([None, 1.0], "credit.not-numbers"), (["1.5", 1.0], "credit.not-numbers")),
    *(([[1.0], [1.0, 2.0]], "credit.not-numbers"), (raising, "credit.part-raised")),
]


@pytest.mark.parametrize(("value", "code"), OF_NUMBERS)
@pytest.mark.parametrize("stage", ["advantage", "uncertainty", "entropy_transform", "post_process"])
def test_a_faulty_part_is_named_with_its_place(stage, value, code):
    compute = raising if value is raising else answers(value)
    if stage == "advantage":
        flow, place = make_flow(advantage=AdvantageSpec(name="bad", compute=compute)), "step 3: "
    elif stage == "uncertainty":
        flow, place = make_flow(uncertainty=UncertaintySpec(name="bad", compute=compute)), "step 3 completion 0: "
    else:
        flow, place = make_flow(transform=TransformSpec(name="bad", **{stage: compute})), "step 3 completion 0: "
    text = refused(flow, make_credit_group([1, 0], [[-1, -1], [-2, -2]], name="step 3"), code)
    assert text.startswith(place)
    assert stage in text
    assert "'bad'" in text
    assert code != "credit.not-finite" or f"at position {int(value[0] == 1.0)}" in text
    assert value is not raising or f"test_faults.py:{raising.__code__.co_firstlineno + 1})" in text


def test_negative_uncertainties_and_missing_entropies_are_refused():
    flow = make_flow(uncertainty=UncertaintySpec(name="bad", compute=lambda ctx: ctx.logprobs_T))
    text = refused(flow, make_credit_group([1, 0], [[-0.0], [-0.0, -2.0]]), "credit.negative-uncertainty")
    assert "completion 1: uncertainty 'bad' is -2.0 at position 1" in text
    flow = make_flow(uncertainty=UncertaintySpec(name="h", compute=lambda ctx: ctx.entropies_T, needs_entropy=True))
    refused(flow, make_credit_group([1, 0], [[-1], [-1]]), "backend.no-entropies")
    group = make_credit_group([1, 0], [[-1], [-1]], entropies_G=[np.array([0.5]), np.array([0.7])])
    assert assign_credit([group], flow).uncertainties[0][1].tolist() == [0.7]


OF_GROUPS = [  # answers where two and one numbers are wanted
    ([[1.0, 1.0]], "credit.wrong-count", "one per completion"),
    ([[1.0, 1.0], [1.0, 1.0]], "credit.wrong-length", "completion 1"),
    ([[1.0, 1.0], [NAN]], "credit.not-finite", "completion 1 is nan at position 0"),
    *((None, "credit.wrong-count", "is NoneType"), (3.0, "credit.wrong-count", "is float")),
    *((iter([]), "credit.wrong-count", ""), (raising, "credit.part-raised", "KeyError: 'scale'")),
]
OF_OUTPUTS = [
    (TransformOutput(token_advs=[]), "credit.wrong-count", "has 0 entries"),
    (TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": NAN}), "credit.not-finite", "metric 'm'"),
    (TransformOutput(token_advs=[[1, 1], [1]], metrics={"m": "text"}), "credit.not-numbers", "metric 'm'"),
]


@pytest.mark.parametrize("whole", ["algorithm", "transform", "advantage by token"])
@pytest.mark.parametrize(("value", "code", "fragment"), [*OF_GROUPS, *OF_OUTPUTS])
def test_a_faulty_function_of_a_group_is_named(whole, value, code, fragment):
    compute = raising if value is raising else answers(value)
    if whole == "algorithm":
        flow, named = make_flow(algorithm=AlgorithmSpec(name="bad", compute_context=compute)), "algorithm 'bad'"
    elif whole == "transform":
        flow, named = make_flow(transform=TransformSpec(name="bad", compute_context=compute)), "'toy_centre+bad'"
    elif isinstance(value, TransformOutput):
        return
    else:
        flow, named = make_flow(advantage=AdvantageSpec(name="bad", compute_tokens=compute)), "advantage 'bad'"
    text = refused(flow, make_credit_group([1, 0], [[-1, -1], [-2]]), code)
    assert text.startswith("group 0: ")
    assert fragment in text
    assert named in text


@pytest.mark.parametrize(
    ("value", "code", "place"),
    [
        *(([[1.0, 0.0]], "credit.wrong-count", "one per group"), (3.0, "credit.wrong-count", "is float")),
        ([[1.0, 0.0], [1.0]], "credit.wrong-length", "group 1: "),
        *(([[1.0, 0.0], [1.0, NAN]], "credit.not-finite", "group 1: "), (raising, "credit.part-raised", "")),
    ],
)
def test_a_faulty_advantage_of_steps_is_named(value, code, place):
    compute = raising if value is raising else answers(value)
    flow = make_flow(advantage=AdvantageSpec(name="a", compute_step=compute))
    groups = [make_credit_group([1, 0], [[-1], [-1]], name=f"group {number}") for number in range(2)]
    text = refused(flow, groups, code)
    assert "advantage 'a'" in text
    assert place in text


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({"logprobs_G": [np.array([-1.0, np.nan]), np.array([-1.0])]}, "credit.not-finite", "completion 0"),
        ({"logprobs_G": [np.array([-1.0, -1.0]), np.array([-np.inf])]}, "credit.not-finite", "completion 1"),
        ({"logprobs_G": [np.array([-1.0, -1.0])]}, "credit.wrong-count", "log-probabilities"),
        ({"planning_G": [np.array([True, False])]}, "credit.wrong-count", "planning masks"),
        ({"planning_G": [np.array([True]), np.array([True])]}, "credit.wrong-mask", "completion 0"),
        ({"rewards_G": np.array([1.0, np.nan])}, "credit.not-finite", "reward is nan at position 1"),
    ],
)
def test_faulty_inputs_are_named(changes, code, place):
    text = refused(make_flow(), replace(make_credit_group([1, 0], [[-1, -1], [-1]]), **changes), code)
    assert text.startswith("group 0")
    assert place in text


DISTILLING = "--advantage-mode distillation --transform-mode none --teacher-model builtin:tiny"
SERVED = "--advantage-mode distillation --transform-mode none --teacher-engine vllm --temperature 1.0"
COV = "--entropy-kl-cov 0.1 --epochs 2"


def read(flags, tables):
    arguments = [*(() if "--backend" in flags else ("--backend", "local")), *flags.split()]
    config, problems = load_config(None, tables=tables, arguments=arguments)
    assert problems == []
    return config


@pytest.mark.parametrize(
    ("flags", "key", "code"),
    [
        ("--backend tinker --kl-coef 0.1", "kl-coef", "backend.lacks-term"),
        ("--backend prime_rl --kl-coef 0.1", "kl-coef", "backend.lacks-term"),
        ("--backend prime_rl --kl-coef 0.1 --kl-where reward", "kl-coef", "backend.lacks-term"),
        ("--backend tinker --entropy-coef 0.1", "entropy-coef", "backend.lacks-term"),
        ("--backend prime_rl --entropy-clip-cov 0.1", "entropy-clip-cov", "backend.lacks-term"),
        ("--kl-coef 0.1 --kl-where reward --kl-estimator k3", "kl-estimator", "kl.bad-estimator"),
        ("--kl-coef 0.1 --kl-target 0.1", "kl-target", "kl.half-steered"),
        ("--kl-coef 0.1 --kl-horizon 10", "kl-horizon", "kl.half-steered"),
        ("--kl-target 0.1 --kl-horizon 10", "kl-target", "kl.no-coef"),
        ("--entropy-kl-cov 0.1", "entropy-kl-cov", "entropy.one-update"),
        (f"{COV} --loss ppo", "entropy-kl-cov", "entropy.clipped-loss"),
        (f"{COV} --entropy-clip-cov 0.1", "entropy-kl-cov", "entropy.two-terms"),
        ("--entropy-clip-cov 0.1 --entropy-clip-cov-low 5", "entropy-clip-cov-low", "entropy.empty-range"),
        ("--teacher-model builtin:tiny", "teacher-model", "teacher.no-effect"),
        ("--teacher-adapter logs/a", "teacher-adapter", "teacher.no-effect"),
        (f"{DISTILLING} --teacher-engine openai", "teacher-engine", "teacher.bad-engine"),
        (f"{DISTILLING} --teacher-engine mlx", "teacher-engine", "teacher.bad-engine"),
        (f"{SERVED} --teacher-adapter logs/a", "teacher-adapter", "teacher.adapter-on-server"),
        (SERVED.replace("1.0", "0.7"), "temperature", "teacher.temperature"),
        (f"{DISTILLING} --refill 2", "refill", "credit.needs-no-verdict"),
        (f"{DISTILLING} --overlong drop", "overlong", "credit.needs-no-verdict"),
        (f"{DISTILLING} --soft-overlong 8", "soft-overlong", "credit.needs-no-verdict"),
        ("--reward-type none", "reward-type", "credit.nothing-teaches"),
        (f"{DISTILLING} --reward-type none --eval-examples 8", "eval-examples", "eval.no-reward"),
        ("--teacher-url http://localhost:1", "teacher-url", "teacher.no-server"),
        ("--backend prime_rl --sft-steps 2", "sft-steps", "sft.not-supported"),
        ("--sft-steps 2 --sft-path x", "sft-path", "sft.no-source"),
    ],
)
def test_refused_by_key(flags, key, code, tables):
    (problem,) = problems_of(read(flags, tables), load_plugins())
    assert (problem.where.split()[0], problem.code) == (f"--{key}", code)
    assert problem.fix


@pytest.mark.parametrize(
    "flags",
    [
        *("", "--backend tinker", "--backend prime_rl", "--sft-steps 2", "--backend tinker --sft-steps 2"),
        "--kl-coef 0.1 --kl-where reward --kl-estimator k1",
        "--kl-coef 0.1 --kl-estimator k1 --kl-target 0.1 --kl-horizon 1000",
        "--entropy-kl-cov 0.001 --minibatches 2 --epochs 2 --entropy-coef 0.01",
        "--entropy-clip-cov 0.001 --loss ppo",
        DISTILLING,
        f"{DISTILLING} --temperature 0.7 --overlong mask --reward-type none",
        f"{DISTILLING} --eval-examples 8 --batch-norm true --advantage-clip 2 --kl-coef 0.1",
        f"{SERVED} --teacher-url http://localhost:1 --teacher-model served",
        f"{DISTILLING} --backend tinker --temperature 1.0",
        f"{DISTILLING} --backend prime_rl",
    ],
)
def test_accepted(flags, tables):
    assert problems_of(read(flags, tables), load_plugins()) == []


BACKENDS = """
from retrain.api import Capabilities, CheckpointMode, Determinism, PluginSpec, hookimpl
FACTS = dict(reports_sync_loss=True, supports_checkpoint_resume=True, checkpoint_resume_mode=CheckpointMode.UNSUPPORTED)
FACTS |= dict(determinism=Determinism.EXACT, provides_entropy=False)
@hookimpl
def retrain_register_backends(register):
    for name, by_token in (("by_token", True), ("by_completion", False)):
        traits = Capabilities(preserves_token_advantages=by_token, **FACTS)
        register(PluginSpec(name=name, summary="A test.", factory="nowhere:make", traits=traits))
    register(PluginSpec(name="unknown", summary="A test.", factory="nowhere:make"))
"""


def test_a_teacher_needs_a_backend_that_is_not_known_to_flatten_the_credit_of_tokens(distribution, tables):
    distribution("retrain-flat", {"flat": BACKENDS})
    plugins = load_plugins()
    found = {
        name: [each.code for each in problems_of(read(f"{DISTILLING} --backend {name}", tables), plugins)]
        for name in ("by_token", "by_completion", "unknown")
    }
    assert found == {"by_token": [], "by_completion": ["teacher.no-token-credit"], "unknown": []}


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--advantage-mode distillation --transform-mode none", "advantage-mode"),
        (f"{DISTILLING} --backend tinker --temperature 0.5", "temperature"),
        (f"{DISTILLING} --loss gspo", "loss"),
        (f"{DISTILLING} --teacher-engine nothing", "teacher-engine"),
    ],
)
def test_a_run_refuses_what_other_parts_know(flags, key, tables):
    _, found = check(read(flags, tables), load_plugins(), tables)
    assert [problem for problem in found if f"--{key}" in problem.where], found
    rows = {"--teacher-adapter logs/a": "me with the adapter in logs/a, engine pytorch"}
    rows |= {"--teacher-engine vllm": "its only model, engine vllm", "": None}
    assert {
        flags: (retrain_explain(read(f"--model me {flags}", tables)) or {}).get("teacher") for flags in rows
    } == rows
