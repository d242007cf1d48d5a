"""Flags and environment variables: a unique flag for every key, and no text read as more than it says."""

import json
from collections import Counter

import pytest

from retrain.kernel.config.load import FLAG_ALIASES, PARAM_FLAGS, all_keys, load_config


def test_every_key_has_a_flag_of_its_own(tables):
    counts = Counter(key.flag for key in all_keys(tables))
    reserved = {flag.removeprefix("--") for flag in (*PARAM_FLAGS, *FLAG_ALIASES, "--set", "--help", "--version")}
    assert {flag: n for flag, n in counts.items() if n > 1} == {}
    assert set(counts) & reserved == set()
    assert all(flag == flag.lower() and "_" not in flag for flag in counts)


def as_text(value):
    """A default the way it would be typed."""
    return json.dumps(value) if isinstance(value, list | dict | bool) else str(value)


def test_every_flag_set_and_variable_accepts_its_own_default(tables):
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


FORMS = [("--lr", "1e-3"), ("--lr=1e-3",), ("--lr=.001",), ("--lr", "5", "--lr", "1e-3"), ("--lr", " 0.001 ")]
FORMS += [("--set", "training.lr=1e-3"), ("--set=training.lr=1e-3",)]


@pytest.mark.parametrize("arguments", FORMS)
def test_the_forms_of_a_flag(arguments, load):
    config, problems = load("[training]\nlr = 7.0\n", *arguments)
    assert problems == []
    assert config.training.lr == 1e-3


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (("--seed", "-1"), "training.seed", -1),
        (("--planning-threshold", "-0.5e-2"), "planning.threshold", -0.005),
        (("--environment-max-turns=-1",), "environment.max_turns", -1),
        *((("--log-dir", text), "logging.log_dir", text) for text in ("a=b=c", "007", "true")),
        (("--log-dir=a=b",), "logging.log_dir", "a=b"),
        *((words, "data.instruction", "") for words in (("--data-instruction", ""), ("--data-instruction=",))),
        (("--data-instruction=--help me",), "data.instruction", "--help me"),
        *((("--prefix-caching", text), "inference.prefix_caching", False) for text in ("no", "False")),
        (("--prefix-caching", "1"), "inference.prefix_caching", True),
        (("--resume-anyway",), "resume.anyway", True),
        (("--recorders", "a,b , c"), "logging.recorders", ["a", "b", "c"]),
        (("--recorders", '["a,b"]'), "logging.recorders", ["a,b"]),
        (("--squeeze-target-ranks", "1, 2,4"), "squeeze.target_ranks", [1, 2, 4]),
        (("--options", '{"a": [1, {"b": null}]}'), "backend.options", {"a": [1, {"b": None}]}),
        (("--strategic-grams", '["a, b"]'), "logging.strategic_grams", '["a, b"]'),
    ],
)
def test_text_becomes_the_type_of_its_key(arguments, path, value, load):
    config, _ = load("", *arguments)
    found = config.value(path, None)
    assert found == value
    assert type(found) is type(value)


READ_AS = [
    *(("0.1", 0.1), ("1e-4", 1e-4), ("1E4", 1e4), (".5", 0.5), ("3", 3), ("-3", -3), ("-1e-3", -1e-3), ("null", None)),
    *(("true", True), ("False", False), ("[1, 2]", [1, 2]), ('{"a": 1}', {"a": 1}), ('"3"', "3")),
    *((text, text) for text in ("plain text", "", "1.2.3", "007", "[1,", "nan", "-Infinity", "a=b")),
]


@pytest.mark.parametrize(("text", "value"), READ_AS)
def test_plugin_parameters_are_json_where_they_read_as_json(text, value, load):
    config, problems = load("", "--transform-param", f"cap={text}")
    assert problems == []
    found = config.algorithm.transform_params["cap"]
    assert found == value
    assert type(found) is type(value)


def test_parameters_and_variables_add_to_the_file_and_misspelt_ones_are_reported(load):
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


BAD_FLAGS = {
    "config.value-missing": [(("--lr",), "--lr=VALUE"), (("--lr", "--seed", "3"), "--lr=VALUE")],
    "config.unknown-flag": [
        *((("--learning-rate", "3"), ""), (("--bach-size", "3"), "--batch-size"), (("--lrr=3",), "--lr")),
        *((("--max-steps-per-run=3",), "--max-steps"), (("--optimizer-beta1=0.5",), "--optim-beta1")),
        *((("--beta1=0.5",), "--optim-beta1"), (("--zzzzzzzzzz",), "`retrain explain --keys`")),
    ],
    "config.extra-argument": [((word,), "") for word in ("other.toml", "-x", "--")],
    "config.unknown-key": [(("--set", "lr=3"), ""), (("--set", "training.lrr=3"), "training.lr")],
    "config.not-name-value": [
        *((("--set", "training.lr"), "--set name=value"), (("--transform-param", "cap"), "--transform-param name=")),
        (("--transform-param", "=3"), "--transform-param name=value"),
    ],
    "config.bad-value": [
        *((("--dtype", "bf61"), "'bf16'"), (("--dtype", "nothing"), 'Default: "auto"')),
        *((("--batch-size", "7.5"), "Prompts per step"), (("--batch-size", "many"), "Default: 8")),
        *((("--lr", "fast"), "Default: 4e-05"), (("--lr", "nan"), "Default"), (("--batch-size", "0"), "Default")),
        *((("--prefix-caching", "maybe"), "Default: true"), (("--options", "x"), ""), (("--options", "[1]"), "")),
    ],
}


@pytest.mark.parametrize(
    ("arguments", "code", "fix"), [(given, code, fix) for code, rows in BAD_FLAGS.items() for given, fix in rows]
)
def test_a_bad_flag_is_reported_once_with_its_fix(arguments, code, fix, load):
    (problem,) = load("", *arguments)[1]
    assert problem.code == code
    assert fix in problem.fix
