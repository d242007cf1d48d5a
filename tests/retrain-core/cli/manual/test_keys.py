"""Keys: the annotated file, the JSON Schema, and the keys that each backend supports."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from retrain.cli.manual.json_schema import configuration_schema
from retrain.cli.manual.keys import TRIED, Asked, annotated, ask, questions, support
from retrain.credit.configured_loss import applicable_losses
from retrain.kernel.config.load import TableEntry, all_keys, load_config
from retrain.kernel.declared import Capabilities, Kind
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables


def test_it_is_the_defaults_and_names_every_key_of_a_run(plugins: Plugins, load: Callable[..., Any]) -> None:
    text = annotated(plugins).removeprefix("```toml\n").removesuffix("```")
    config, problems = load(text)
    assert not problems
    empty, _ = load("")
    assert config.as_dict() == empty.as_dict()
    tables = registered_tables(plugins)
    for key in all_keys(tables):
        if not tables[key.table].traits.starts_runs:
            section = text.partition(f"[{key.table}]\n")[2].partition("\n\n")[0]
            assert f"{key.name} = " in section, key.path
            assert key.description in section, key.path


BACKENDS = ("local", "tinker", "prime_rl")
REGULARISERS = {"kl.coef": "kl_{where}", "entropy.coef": "entropy", "entropy.kl_cov": "kl_cov"}
REGULARISERS |= {"entropy.clip_cov": "clip_cov"}


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins({})


@pytest.fixture(scope="module")
def asked_of_all(plugins: Plugins) -> list[Asked]:
    return list(ask(plugins, BACKENDS))


@pytest.fixture
def answers(asked_of_all: list[Asked]) -> dict[tuple[str, str], str]:
    """`answers[what, backend]`: empty for yes, or why not."""
    return {(each.text, name): answer for each in asked_of_all for name, answer in each.answers.items()}


@pytest.mark.long
def test_losses_and_regularisers_are_answered_as_they_are_declared(plugins: Plugins, asked_of_all: list[Asked]) -> None:
    seen = 0
    for asked in asked_of_all:
        *_, path = asked.values
        for backend in BACKENDS:
            declared = plugins.find(Kind.BACKEND, backend)[0].spec.traits
            assert isinstance(declared, Capabilities)
            works = asked.answers[backend] == ""
            if list(asked.values) == ["algorithm.loss"]:
                losses = applicable_losses(plugins, backend) or ["importance_sampling"]  # told elsewhere: the default
                assert works == (asked.values[path] in losses), asked.text
            elif path in REGULARISERS:
                name = REGULARISERS[path].format(where=asked.values.get("kl.where"))
                assert works == (name in declared.regularisers), (asked.text, backend)
            else:
                continue
            seen += 1
    assert seen >= 3 * 9


def test_the_local_backend_takes_everything(answers: dict[tuple[str, str], str]) -> None:
    assert {what: answer for (what, backend), answer in answers.items() if backend == "local" and answer} == {}


IGNORED = {
    "tinker": (
        *("[algorithm] dual_clip = 3.0", '[algorithm] recipe = "gspo"', "[model] lora_rank = 0"),
        '[kl] where = "loss", coef = 0.1',
    ),
    "prime_rl": (
        *('[algorithm] aggregation = "constant"', "[algorithm] is_bounds = [0.5, 2.0]", "[algorithm] dual_clip = 3.0"),
        *('[optimizer] schedule = "cosine"', "[model] lora_rank = 0", "[sft] steps = 20"),
    ),
}
DONE_BEFORE_THE_BACKEND = {
    "tinker": (
        *('[training] overlong = "mask"', '[algorithm] aggregation = "sequence_mean"', '[algorithm] recipe = "dapo"'),
        *("[algorithm] is_bounds = [0.5, 2.0]", '[optimizer] schedule = "cosine"', "[sft] steps = 20"),
        *('[teacher] model = "some-teacher"', '[algorithm] loss = "likelihood"', '[kl] where = "reward", coef = 0.1'),
    ),
    "prime_rl": (*("[training] minibatches = 2", "[algorithm] batch_norm = true", '[teacher] model = "some-teacher"'),),
}


@pytest.mark.parametrize(("cases", "works"), [(IGNORED, False), (DONE_BEFORE_THE_BACKEND, True)])
def test_a_setting_that_would_be_ignored_is_refused_and_one_that_needs_no_backend_works(
    cases: dict[str, tuple[str, ...]], works: bool, answers: dict[tuple[str, str], str]
) -> None:
    asked = [(what, backend) for backend, settings in cases.items() for what in settings]
    assert [pair for pair in asked if (answers[pair] == "") != works] == []


@pytest.mark.long
def test_every_question_is_asked_and_every_recipe_is_a_row(plugins: Plugins) -> None:
    asked = list(questions(plugins, registered_tables(plugins)))
    assert all(values in asked for values in TRIED)  # a renamed key would drop out of the table
    text = support(plugins)
    for entry in plugins.registered(Kind.RECIPE):
        assert f'recipe = "{entry.spec.name}"' in text
    assert text.startswith("|  | `local` | `tinker` | `prime_rl` |")


TESTS = Path(__file__).parents[2]
FULL = TESTS / "kernel" / "config" / "full_annotated.toml"
CASES = {case["name"]: case for case in tomllib.loads((TESTS / "cli/bad_configs.toml").read_text("utf-8"))["case"]}
UNKNOWN_KEYS = ("table-typo", "key-typo", "key-in-the-wrong-table", "key-outside-tables")
# What TOML can write where one value is meant; 2.0 is left out, as JSON takes it for an integer.
POOL = (-1, 0, 1, 7, 0.5, -0.5, True, "", "text", "grpo", "auto", [], ["a"], [1], [""], {}, {"a": 1}, {"a": {"b": 1}})


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return configuration_schema(load_plugins({}))


@pytest.fixture(scope="module")
def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Checks a document; the schema itself is a valid one of its dialect."""
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_the_documented_file_and_every_template_are_accepted(validator: Draft202012Validator) -> None:
    templates = [entry.spec.load() for entry in load_plugins({}).registered(Kind.TEMPLATE)]
    assert len(templates) >= 6
    for text in [FULL.read_text(encoding="utf-8"), *(t() if callable(t) else t for t in templates)]:
        validator.validate(tomllib.loads(text))


@pytest.mark.parametrize("name", UNKNOWN_KEYS)
def test_keys_that_the_loader_does_not_know_are_refused(name: str, validator: Draft202012Validator) -> None:
    assert not validator.is_valid(tomllib.loads(CASES[name]["text"]))


def _as_toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_as_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.long
def test_loader_and_schema_agree_about_every_key_and_kind_of_value(
    validator: Draft202012Validator, tables: Mapping[str, TableEntry], tmp_path: Path
) -> None:
    file, disagreed, refused = tmp_path / "retrain.toml", [], 0
    for key in all_keys(tables):
        for value in POOL:
            text = f"[{key.table}]\n{key.name} = {_as_toml(value)}\n"
            file.write_text(text, encoding="utf-8")
            _, problems = load_config(file, tables={key.table: tables[key.table]})
            by_loader = any(key.name in problem.where for problem in problems)
            by_schema = not validator.is_valid(tomllib.loads(text))
            refused += by_schema
            if by_loader != by_schema and not _by_a_rule_of_its_own(problems):
                disagreed.append(f"{key.path} = {value!r}: loader {by_loader}, schema {by_schema}")
    assert not disagreed, "\n".join(disagreed)
    assert refused > 1000


def _by_a_rule_of_its_own(problems: list[Any]) -> bool:
    """A Python validator, which a schema cannot express; its message is our own text."""
    machine = ("Input should", "List should", "String should", "Extra inputs", "Field required", "is refused")
    return bool(problems) and not any(word in problem.what for problem in problems for word in machine)


def test_every_key_is_there_with_its_meaning_and_registered_names_are_examples(
    schema: dict[str, Any], tables: Mapping[str, TableEntry]
) -> None:
    for key in all_keys(tables):
        found = schema["$defs"][schema["properties"][key.table]["$ref"].removeprefix("#/$defs/")]["properties"]
        assert key.description in found[key.name]["description"], key.path
        assert all(alias in found for alias in key.aliases)
    table = schema["$defs"]["AlgorithmTable"]["properties"]
    assert {"grpo", "maxrl"} <= set(table["advantage_mode"]["examples"])
    assert "gtpo_sepa" in table["transform_mode"]["examples"]


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('advantage_mode = "grpo"\nadvantage_params = {scale = "std", ddof = 1}', True),
        ('advantage_mode = "grpo"\nadvantage_params = {scale = "sd"}', False),
        ('advantage_mode = "grpo"\nadvantage_params = {ddof = 2}', False),
        ('advantage_mode = "my_module.mine"\nadvantage_params = {scale = "sd"}', True),
        ("advantage_params = {eps = -1.0}", False),  # of maxrl, the default
        ('advantage_mode = "grpo"', True),
    ],
)
def test_parameters_follow_the_name_of_the_part(text: str, is_valid: bool, validator: Draft202012Validator) -> None:
    assert validator.is_valid(tomllib.loads(f"[algorithm]\n{text}\n")) is is_valid


def test_a_table_of_a_plugin_is_part_of_it_and_its_faults_are_not(
    distribution: Callable[..., Path], command: Callable[..., Any]
) -> None:
    source = (
        "from retrain.api import PluginSpec, Table, TableTraits, hookimpl, key\n"
        "class MineTable(Table):\n    '''Mine.'''\n    depth: int = key(3, 'How deep.', ge=1)\n"
        "@hookimpl\ndef retrain_register_config_tables(register):\n"
        "    register(PluginSpec(name='mine', summary='s', factory=MineTable, traits=TableTraits()))\n"
        "    register(PluginSpec(name='gone', summary='s', factory='no_such_module:Table'))\n"
        "@hookimpl\ndef retrain_register_advantages(register):\n"
        "    register(PluginSpec(name='odd', summary='s', factory='x:y', params='no_such_module:Params'))\n"
    )
    distribution("mine", {"mine": source})
    result = command("explain", "--schema")
    assert (result.code, result.err) == (0, "")
    schema = json.loads(result.out)
    assert "mine" in schema["properties"]
    assert "gone" not in schema["properties"]
    check = Draft202012Validator(schema)
    assert check.is_valid({"mine": {"depth": 1}})
    assert not check.is_valid({"mine": {"depth": 0}})


def test_init_writes_the_schema_that_its_first_line_names(command: Callable[..., Any], tmp_path: Path) -> None:
    assert command("init", "--template", "tiny").code == 0
    text = (tmp_path / "retrain.toml").read_text(encoding="utf-8")
    named = text.splitlines()[0].removeprefix("#:schema ")
    schema = json.loads((tmp_path / named).read_text(encoding="utf-8"))
    assert schema == json.loads(command("explain", "--schema").out)
    assert Draft202012Validator(schema).is_valid(tomllib.loads(text))
