"""What a teacher and a run without verdicts refuse before anything loads, by key."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from retrain.credit import retrain_check_config as problems_of
from retrain.credit import retrain_explain
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.run.check import check

DISTILLING = "--advantage-mode distillation --transform-mode none --teacher-model builtin:tiny"
SERVED = "--advantage-mode distillation --transform-mode none --teacher-engine vllm --temperature 1.0"


@pytest.mark.parametrize(
    ("flags", "key", "what"),
    [
        ("--teacher-model builtin:tiny", "teacher-model", "the teacher would have no effect"),
        ("--teacher-adapter logs/a", "teacher-adapter", "the teacher would have no effect"),
        (f"{DISTILLING} --teacher-engine openai", "teacher-engine", "'openai' gives no log-probabilities of given"),
        (f"{DISTILLING} --teacher-engine mlx", "teacher-engine", "'mlx' gives no log-probabilities of given"),
        (f"{SERVED} --teacher-adapter logs/a", "teacher-adapter", "a server is given no adapter"),
        (SERVED.replace("1.0", "0.7"), "temperature", "temperature = 0.7 does not go with a teacher on 'vllm'"),
        (f"{DISTILLING} --refill 2", "refill", "refill = 2 does not go with advantage 'distillation'"),
        (f"{DISTILLING} --overlong drop", "overlong", "overlong = 'drop' does not go with advantage 'distillation'"),
        (f"{DISTILLING} --soft-overlong 8", "soft-overlong", "soft_overlong = 8 does not go with"),
        ("--reward-type none", "reward-type", "no completion would be judged"),
        (f"{DISTILLING} --reward-type none --eval-examples 8", "eval-examples", "needs an evaluation"),
        ("--teacher-url http://localhost:1", "teacher-url", "[teacher] names no server"),
    ],
)
def test_refused_by_key(flags: str, key: str, what: str, tables: Mapping[str, TableEntry]) -> None:
    config, problems = load_config(None, tables=tables, arguments=["--backend", "local", *flags.split()])
    assert problems == []
    (problem,) = problems_of(config, load_plugins())
    assert f"--{key}" in problem.where
    assert what in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    "flags",
    [
        "",
        DISTILLING,
        f"{DISTILLING} --temperature 0.7 --overlong mask --reward-type none",
        f"{DISTILLING} --eval-examples 8 --batch-norm true --advantage-clip 2 --kl-coef 0.1",
        f"{SERVED} --teacher-url http://localhost:1 --teacher-model served",
        f"{DISTILLING} --backend tinker --temperature 1.0",
        f"{DISTILLING} --backend prime_rl",
    ],
)
def test_accepted(flags: str, tables: Mapping[str, TableEntry]) -> None:
    arguments = [*(() if "--backend" in flags else ("--backend", "local")), *flags.split()]
    config, problems = load_config(None, tables=tables, arguments=arguments)
    assert (problems, problems_of(config, load_plugins())) == ([], [])


@pytest.mark.parametrize(
    ("flags", "key", "what"),
    [
        ("--advantage-mode distillation --transform-mode none", "advantage-mode", "there is no teacher"),
        (
            f"{DISTILLING} --backend tinker --temperature 0.5",
            "temperature",
            "temperature",
        ),
        (f"{DISTILLING} --loss gspo", "loss", "gspo does not go with 'distillation'"),
        (f"{DISTILLING} --teacher-engine nothing", "teacher-engine", "no inference engine named 'nothing'"),
    ],
)
def test_a_run_refuses_what_other_parts_know(flags: str, key: str, what: str, tables: Mapping[str, TableEntry]) -> None:
    arguments = [*(() if "--backend" in flags else ("--backend", "local")), *flags.split()]
    config, problems = load_config(None, tables=tables, arguments=arguments)
    assert problems == []
    _, found = check(config, load_plugins(), tables)
    assert [problem.what for problem in found if f"--{key}" in problem.where and what in problem.what], found


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ("", None),
        ("--teacher-adapter logs/a", "me with the adapter in logs/a, engine pytorch"),
        ("--teacher-model large", "large, engine pytorch"),
        ("--teacher-engine vllm", "its only model, engine vllm"),
    ],
)
def test_explain_says_who_teaches(flags: str, row: str | None, tables: Mapping[str, TableEntry]) -> None:
    config, _ = load_config(None, tables=tables, arguments=["--model", "me", *flags.split()])
    assert (retrain_explain(config) or {}).get("teacher") == row
