"""The JSON Schema of a configuration."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from retrain.cli.manual.json_schema import configuration_schema
from retrain.kernel.config.load import TableEntry, all_keys, load_config
from retrain.kernel.declared import Kind
from retrain.kernel.plugins.discover import load_plugins
from retrain.records.identity.inputs import PARAMS

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


def test_the_options_of_every_part_stand_under_the_key_that_holds_them(
    validator: Draft202012Validator,
) -> None:
    plugins, seen = load_plugins({}), set()
    for kind, selecting, options in PARAMS:
        (table, naming), free = selecting.split("."), options.partition(".")[2]
        for entry in plugins.registered(kind):
            for name, field in (entry.spec.load_params() or BaseModel).model_fields.items():
                if field.annotation in (int, float, str, bool):
                    wrong = {table: {naming: entry.spec.name, free: {field.alias or name: {"no": "such value"}}}}
                    assert not validator.is_valid(wrong), wrong
                    seen.add(options)
    assert {"data.options", "sft.options", "data.sampler_params", "algorithm.advantage_params"} <= seen


def test_no_word_of_ours_is_in_it(schema: dict[str, Any]) -> None:
    for definition in schema["$defs"].values():
        for content in definition.get("properties", {}).values():
            assert not {"names", "selects", "reads", "needs", "is_path", "free_on_resume"} & content.keys()


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
