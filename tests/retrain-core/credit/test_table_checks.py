"""What `[kl]`, `[entropy]`, `[sft]`, `[teacher]` and a run without verdicts refuse before anything loads, by key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from retrain.credit import retrain_check_config as problems_of
from retrain.credit import retrain_explain
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.check import check

Tables = Mapping[str, TableEntry]
DISTILLING = "--advantage-mode distillation --transform-mode none --teacher-model builtin:tiny"
SERVED = "--advantage-mode distillation --transform-mode none --teacher-engine vllm --temperature 1.0"
COV = "--entropy-kl-cov 0.1 --epochs 2"


def read(flags: str, tables: Tables) -> Config:
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
def test_refused_by_key(flags: str, key: str, code: str, tables: Tables) -> None:
    (problem,) = problems_of(read(flags, tables), load_plugins())
    assert (problem.where.split()[0], problem.code) == (f"--{key}", code)
    assert problem.fix


@pytest.mark.parametrize(
    "flags",
    [
        *("", "--backend tinker", "--backend prime_rl", "--sft-steps 2", "--backend tinker --sft-steps 2"),
        "--kl-coef 0.1 --kl-where reward --kl-estimator k1",
        "--kl-coef 0.1 --kl-estimator k1 --kl-target 0.1 --kl-horizon 1000",
        "--entropy-kl-cov 0.001 --minibatches 2 --entropy-coef 0.01",
        "--entropy-clip-cov 0.001 --loss ppo",
        DISTILLING,
        f"{DISTILLING} --temperature 0.7 --overlong mask --reward-type none",
        f"{DISTILLING} --eval-examples 8 --batch-norm true --advantage-clip 2 --kl-coef 0.1",
        f"{SERVED} --teacher-url http://localhost:1 --teacher-model served",
        f"{DISTILLING} --backend tinker --temperature 1.0",
        f"{DISTILLING} --backend prime_rl",
    ],
)
def test_accepted(flags: str, tables: Tables) -> None:
    assert problems_of(read(flags, tables), load_plugins()) == []


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--advantage-mode distillation --transform-mode none", "advantage-mode"),
        (f"{DISTILLING} --backend tinker --temperature 0.5", "temperature"),
        (f"{DISTILLING} --loss gspo", "loss"),
        (f"{DISTILLING} --teacher-engine nothing", "teacher-engine"),
    ],
)
def test_a_run_refuses_what_other_parts_know(flags: str, key: str, tables: Tables) -> None:
    _, found = check(read(flags, tables), load_plugins(), tables)
    assert [problem for problem in found if f"--{key}" in problem.where], found
    rows = {"--teacher-adapter logs/a": "me with the adapter in logs/a, engine pytorch"}
    rows |= {"--teacher-engine vllm": "its only model, engine vllm", "": None}
    assert {
        flags: (retrain_explain(read(f"--model me {flags}", tables)) or {}).get("teacher") for flags in rows
    } == rows
