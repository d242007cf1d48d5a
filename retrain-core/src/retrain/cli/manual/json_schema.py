"""The JSON Schema (draft 2020-12) of a configuration file, from the models of all installed tables.

It covers the loader's rules about keys, types, ranges and choices, so that an editor can complete and check them. Rules
that need the whole configuration (unregistered names, conditions on several keys) are left to the loader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from retrain.kernel.config.load import AUTO, TableEntry
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.records.identity.inputs import PARAMS
from retrain.run.tables import registered_tables

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The content that `key` keeps in json_schema_extra.
OURS = frozenset(
    {"flag", "names", "selects", "pending", "aliases", "free_on_resume", "reads", "needs", "is_path", "auto"}
)
DEFS = "#/$defs/"
Schema = dict[str, Any]


def schema_text(plugins: Plugins) -> str:
    return json.dumps(configuration_schema(plugins), indent=2, ensure_ascii=False) + "\n"


def configuration_schema(plugins: Plugins) -> Schema:
    """The schema of a whole file: one property per table and no others."""
    tables = registered_tables(plugins)
    params = _params_models(plugins)
    models = dict.fromkeys([*(entry.model for entry in tables.values()), *params.values()])
    references, document = models_json_schema([(model, "validation") for model in models])
    found = {model: references[model, "validation"] for model in models}
    definitions: dict[str, Schema] = document.get("$defs", {})
    for definition in definitions.values():
        definition.pop("title", None)
        for name, content in [*definition.get("properties", {}).items()]:
            _clean(definition["properties"], name, content, plugins)
    _bind_params(tables, params, found, definitions)
    return {
        "$schema": DIALECT,
        "title": "Configuration of retrain",
        "description": "A training run, a campaign or a squeeze: `retrain FILE`.",
        "type": "object",
        "properties": {name: {"$ref": found[entry.model]["$ref"]} for name, entry in sorted(tables.items())},
        "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }


def key_schemas(entry: TableEntry) -> dict[str, Schema]:
    """The schema of each key of one table, by its TOML name, with references resolved."""
    document = entry.model.model_json_schema(mode="validation")
    definitions = document.get("$defs", {})
    return {
        name: {**definitions[_name(content)], **content} if "$ref" in content else content
        for name, content in document.get("properties", {}).items()
    }


def _clean(properties: dict[str, Schema], name: str, content: Schema, plugins: Plugins) -> None:
    """Translate the extra fields of `key` into JSON Schema."""
    extra = {word: content.pop(word, None) for word in OURS}
    content.pop("title", None)
    if extra["pending"]:  # the loader refuses any other value
        content["const"] = content.get("default")
        content["description"] = f"{content.get('description', '')} Not yet: {extra['pending']}."
    if extra["auto"]:
        rule = {word: content.pop(word) for word in ("type", "minimum", "exclusiveMinimum") if word in content}
        content["anyOf"] = [rule, {"const": AUTO}]
    if extra["names"]:
        names = [entry.spec.name for entry in plugins.registered(Kind(extra["names"]))]
        if content.get("type") == "string" and names:
            content["examples"] = names
    for alias in extra["aliases"] or ():
        properties[alias] = {**content, "description": f"Another name of {name}."}


def _params_models(plugins: Plugins) -> dict[tuple[Kind, str], type[BaseModel]]:
    """The parameter models of all parts that declare one; parts that fail to import are skipped."""
    found: dict[tuple[Kind, str], type[BaseModel]] = {}
    for kind in dict.fromkeys(kind for kind, *_ in PARAMS):
        for entry in plugins.registered(kind):
            with suppress(Exception):  # a broken plugin; `retrain plugins` reports it
                if model := entry.spec.load_params():
                    found[kind, entry.spec.name] = model
    return found


def _bind_params(
    tables: Mapping[str, TableEntry],
    params: Mapping[tuple[Kind, str], type[BaseModel]],
    found: Mapping[type[BaseModel], Schema],
    definitions: dict[str, Schema],
) -> None:
    """`[backend] backend = "x"` gives `[backend.options]` the keys of x; unknown keys are left to the loader."""
    for kind, selecting, options in PARAMS:
        (table, naming), free = selecting.split("."), options.partition(".")[2]
        if table not in tables:
            continue
        definition = definitions[_name(found[tables[table].model])]
        default = tables[table].model.model_fields[naming].default
        for name, model in sorted((name, model) for (of_kind, name), model in params.items() if of_kind is kind):
            condition: Schema = {"properties": {naming: {"const": name}}}
            if name != default:
                condition["required"] = [naming]
            then = {"properties": {free: {"$ref": found[model]["$ref"]}}}
            definitions[_name(found[model])].pop("additionalProperties", None)
            definition.setdefault("allOf", []).append({"if": condition, "then": then})


def _name(reference: Schema) -> str:
    return str(reference["$ref"]).removeprefix(DEFS)
