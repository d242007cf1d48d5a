"""Flags and environment variables: a unique flag for every key, and no text read as more than it says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from retrain.kernel.config.load import FLAG_ALIASES, PARAM_FLAGS, TableEntry, all_keys, load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem

Load = Callable[..., tuple[Config, list[Problem]]]

# The flags that the documentation lists, and those of its reference whose name differs from the key's.
DOCUMENTED_FLAGS = {
    "advantage-mode": "algorithm.advantage_mode",
    "transform-mode": "algorithm.transform_mode",
    "seed": "training.seed",
    "lr": "training.lr",
    "batch-size": "training.batch_size",
    "group-size": "training.group_size",
    "max-steps": "training.max_steps",
    "lora-rank": "model.lora_rank",
    "log-dir": "logging.log_dir",
    "wandb-project": "logging.wandb_project",
    "wandb-entity": "logging.wandb_entity",
    "wandb-group": "logging.wandb_group",
    "wandb-tags": "logging.wandb_tags",
    "wandb-run-name": "logging.wandb_run_name",
    "resume": "resume.from",
    "resume-from": "resume.from",
    "gtpo-beta": "gtpo.beta",
    "hicra-alpha": "hicra.alpha",
    "sepa-steps": "sepa.steps",
    "sepa-schedule": "sepa.schedule",
    "sepa-delay-steps": "sepa.delay_steps",
    "sepa-correct-rate-gate": "sepa.correct_rate_gate",
    "bp-enabled": "backpressure.enabled",
    "bp-warmup-steps": "backpressure.warmup_steps",
    "bp-peak-bw-gb-s": "backpressure.peak_bw_gb_s",
    "optim-beta1": "optimizer.beta1",
    "optim-beta2": "optimizer.beta2",
    "optim-eps": "optimizer.eps",
    "optim-grad-clip-norm": "optimizer.grad_clip_norm",
    "lora-alpha": "lora.alpha",
    "lora-dropout": "lora.dropout",
    "inference-engine": "inference.engine",
    "inference-url": "inference.url",
    "inference-dtype": "inference.dtype",
    "attention-kernel": "inference.attention_kernel",
    "kv-cache-dtype": "inference.kv_cache_dtype",
    "prefix-caching": "inference.prefix_caching",
    "environment-provider": "environment.provider",
    "environment-id": "environment.id",
    "environment-args": "environment.args",
    "data-source": "data.source",
    "planning-detector": "planning.detector",
    "planning-threshold": "planning.threshold",
    "reward-type": "reward.type",
    "reward-judge-model": "reward.judge_model",
    "reward-custom-module": "reward.custom_module",
    "plugins-search-paths": "plugins.search_paths",
    "plugins-strict": "plugins.strict",
    "algorithm-params": "algorithm.params",
    "surprisal-mask-rho": "algorithm.surprisal_mask_rho",
    "strategic-grams": "logging.strategic_grams",
    "max-concurrent": "backend.max_concurrent",
    "top-p": "training.top_p",
}


@pytest.fixture(scope="module")
def flags(tables: Mapping[str, TableEntry]) -> dict[str, str]:
    """Flag without dashes -> path."""
    aliases = {flag.removeprefix("--"): path for flag, path in FLAG_ALIASES.items()}
    return {key.flag: key.path for key in all_keys(tables)} | aliases


def test_every_key_has_a_flag_of_its_own(tables: Mapping[str, TableEntry]) -> None:
    counts = Counter(key.flag for key in all_keys(tables))
    reserved = {flag.removeprefix("--") for flag in (*PARAM_FLAGS, *FLAG_ALIASES, "--set", "--help", "--version")}
    assert {flag: n for flag, n in counts.items() if n > 1} == {}
    assert set(counts) & reserved == set()
    assert all(flag == flag.lower() and "_" not in flag for flag in counts)


@pytest.mark.parametrize(("flag", "path"), DOCUMENTED_FLAGS.items(), ids=list(DOCUMENTED_FLAGS))
def test_a_documented_flag_sets_its_key(flag: str, path: str, flags: dict[str, str]) -> None:
    assert flags[flag] == path


def as_text(value: Any) -> str:
    """A default the way it would be typed."""
    import json

    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)


def test_every_flag_set_and_variable_accepts_its_own_default(tables: Mapping[str, TableEntry]) -> None:
    keys = [key for key in all_keys(tables) if key.table != "campaign"]
    by_flag = [word for key in keys for word in (f"--{key.flag}", as_text(key.default))]
    by_set = [f"--set={key.path}={as_text(key.default)}" for key in keys]
    environ = {f"RETRAIN__{key.path.upper().replace('.', '__')}": as_text(key.default) for key in keys}
    expected, _ = load_config(None, tables=tables)
    for arguments, variables in ((by_flag, {}), (by_set, {}), ([], environ)):
        config, problems = load_config(None, tables=tables, arguments=arguments, environ=variables)
        assert [str(problem) for problem in problems] == []
        assert config.as_dict() == expected.as_dict()
        assert len(config.origins) == len(keys)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lr", "1e-3"),
        ("--lr=1e-3",),
        ("--lr=.001",),
        ("--set", "training.lr=1e-3"),
        ("--set=training.lr=1e-3",),
        ("--lr", "5", "--lr", "1e-3"),
        ("--lr", " 0.001 "),
    ],
)
def test_the_forms_of_a_flag(arguments: tuple[str, ...], load: Load) -> None:
    config, problems = load("[training]\nlr = 7.0\n", *arguments)
    assert problems == []
    assert config.training.lr == 1e-3


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (("--seed", "-1"), "training.seed", -1),
        (("--planning-threshold", "-0.5e-2"), "planning.threshold", -0.005),
        (("--environment-max-turns=-1",), "environment.max_turns", -1),
        (("--log-dir", "a=b=c"), "logging.log_dir", "a=b=c"),
        (("--log-dir=a=b",), "logging.log_dir", "a=b"),
        (("--log-dir", "007"), "logging.log_dir", "007"),
        (("--log-dir", "true"), "logging.log_dir", "true"),
        (("--data-instruction", ""), "data.instruction", ""),
        (("--data-instruction=",), "data.instruction", ""),
        (("--data-instruction=--help me",), "data.instruction", "--help me"),
        (("--prefix-caching", "no"), "inference.prefix_caching", False),
        (("--prefix-caching", "False"), "inference.prefix_caching", False),
        (("--prefix-caching", "1"), "inference.prefix_caching", True),
        (("--recorders", "a,b , c"), "logging.recorders", ["a", "b", "c"]),
        (("--recorders", '["a,b"]'), "logging.recorders", ["a,b"]),
        (("--squeeze-target-ranks", "1, 2,4"), "squeeze.target_ranks", [1, 2, 4]),
        (("--options", '{"a": [1, {"b": null}]}'), "backend.options", {"a": [1, {"b": None}]}),
        (("--strategic-grams", '["a, b"]'), "logging.strategic_grams", '["a, b"]'),
    ],
)
def test_text_becomes_the_type_of_its_key(arguments: tuple[str, ...], path: str, value: object, load: Load) -> None:
    config, _ = load("", *arguments)
    found = config.value(path, None)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("1e-4", 1e-4),
        ("1E4", 1e4),
        (".5", 0.5),
        ("3", 3),
        ("-3", -3),
        ("-1e-3", -1e-3),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2]", [1, 2]),
        ('{"a": 1}', {"a": 1}),
        ('"3"', "3"),
        ("plain text", "plain text"),
        ("", ""),
        ("1.2.3", "1.2.3"),
        ("007", "007"),
        ("[1,", "[1,"),
        ("nan", "nan"),
        ("-Infinity", "-Infinity"),
        ("a=b", "a=b"),
    ],
)
def test_plugin_parameters_are_json_where_they_read_as_json(text: str, value: object, load: Load) -> None:
    config, problems = load("", "--transform-param", f"cap={text}")
    assert problems == []
    found = config.algorithm.transform_params["cap"]
    assert found == value
    assert type(found) is type(value)


def test_parameter_flags_repeat_and_add_to_the_file(load: Load) -> None:
    text = "[algorithm.advantage_params]\nscale = 1.0\nkept = 'yes'\n[backend.options]\nx = 1\n"
    arguments = ["--advantage-param", "scale=2.0", "--advantage-param=new=[1]", "--backend-opt", "y=2"]
    arguments += ["--data-opt=z=3", "--algorithm-param", "p=4", "--set", "algorithm.transform_params.cap=0.1"]
    config, problems = load(text, *arguments)
    assert problems == []
    assert config.algorithm.advantage_params == {"scale": 2.0, "kept": "yes", "new": [1]}
    assert config.backend.options == {"x": 1, "y": 2}
    assert config.data.options == {"z": 3}
    assert config.algorithm.params == {"p": 4}
    assert config.algorithm.transform_params == {"cap": 0.1}


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (("--lr",), "--lr needs a value", "--lr=VALUE"),
        (("--lr", "--seed", "3"), "--lr needs a value", "--lr=VALUE"),
        (("--learning-rate", "3"), "unknown flag --learning-rate", ""),
        (("--bach-size", "3"), "unknown flag --bach-size", "did you mean --batch-size?"),
        (("--lrr=3",), "unknown flag --lrr", "did you mean --lr?"),
        (("--max-steps-per-run=3",), "unknown flag --max-steps-per-run", "did you mean --max-steps?"),
        (("--optimizer-beta1=0.5",), "unknown flag --optimizer-beta1", "did you mean --optim-beta1?"),
        (("--beta1=0.5",), "unknown flag --beta1", "did you mean --optim-beta1?"),
        (("--dtype", "bf61"), "'bf61' is not a valid model.dtype", "did you mean 'bf16'?"),
        (("--dtype", "nothing"), "'nothing' is not a valid model.dtype", 'Default: "auto"'),
        (("--zzzzzzzzzz",), "unknown flag", "`retrain explain --keys`"),
        (("other.toml",), "unexpected argument 'other.toml'", "remove it"),
        (("-x",), "unexpected argument '-x'", "remove it"),
        (("--",), "unexpected argument '--'", "remove it"),
        (("--set", "lr=3"), "unknown key 'lr'", ""),
        (("--set", "training.lrr=3"), "unknown key 'training.lrr'", "use training.lr"),
        (("--set", "training.lr"), "is not name=value", "--set name=value"),
        (("--transform-param", "cap"), "is not name=value", "--transform-param name=value"),
        (("--transform-param", "=3"), "is not name=value", "--transform-param name=value"),
        (("--batch-size", "7.5"), "'7.5' is not a valid training.batch_size", "Prompts per step"),
        (("--batch-size", "many"), "'many' is not a valid training.batch_size", "Default: 8"),
        (("--lr", "fast"), "'fast' is not a valid training.lr", "Default: 4e-05"),
        (("--prefix-caching", "maybe"), "'maybe' is not a valid inference.prefix_caching", "Default: true"),
        (("--lr", "nan"), "finite", "Default"),
        (("--batch-size", "0"), "greater than or equal to 1", "Default"),
        (("--options", "x"), "'x' is not a valid backend.options", ""),
        (("--options", "[1]"), "'[1]' is not a valid backend.options", ""),
    ],
)
def test_a_bad_flag_is_reported_once_with_its_fix(arguments: tuple[str, ...], what: str, fix: str, load: Load) -> None:
    _, problems = load("", *arguments)
    assert len(problems) == 1, [str(problem) for problem in problems]
    assert what in problems[0].what
    assert fix in problems[0].fix


def test_environment_variables_are_layered_and_misspelt_ones_reported(load: Load) -> None:
    environ = {
        "RETRAIN__LOGGING__RECORDERS": "a,b",
        "RETRAIN__algorithm__transform_params": '{"cap": 1}',
        "RETRAIN__TRANING__LR": "1",
        "RETRAIN_PLUGINS": "x",
    }
    config, problems = load("", environ=environ)
    assert config.logging.recorders == ["a", "b"]
    assert config.algorithm.transform_params == {"cap": 1}
    assert [problem.where for problem in problems] == ["environment variable RETRAIN__TRANING__LR"]
    assert problems[0].fix == "use RETRAIN__TRAINING__LR"
