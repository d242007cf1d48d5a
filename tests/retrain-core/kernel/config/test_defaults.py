"""Defaults that tests/plugins/test_names_stay.py does not compare; the documented file is accepted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import TableEntry, all_keys, load_config
from retrain.kernel.registry import Plugins
from retrain.run.check import check_names, check_options

FULL = Path(__file__).with_name("full_annotated.toml")
CONTAINERS = {  # a JSON schema, as test_names_stay.py reads it, has no defaults for these
    **{f"algorithm.{name}": {} for name in ("params", "advantage_params", "transform_params")},
    "backend.options": {},
    "environment.args": {},
    "plugins.search_paths": ["plugins"],
    "squeeze.target_ranks": [],
    "campaign.seeds": [42, 101, 202, 303, 404, 505, 606, 707],
}
CONDITIONS = ["grpo+none", "maxrl+none", "maxrl+gtpo", "maxrl+gtpo_hicra", "maxrl+gtpo_sepa"]


def test_defaults_are_valid_and_explained_and_the_containers_as_documented(tables: Mapping[str, TableEntry]) -> None:
    config, problems = load_config(None, tables=tables)
    assert problems == []
    found = config.as_dict()
    assert {path: found[path.partition(".")[0]][path.partition(".")[2]] for path in CONTAINERS} == CONTAINERS
    conditions = found["campaign"]["conditions"]
    assert [f"{each['advantage_mode']}+{each['transform_mode']}" for each in conditions] == CONDITIONS
    for name, entry in tables.items():
        defaults = entry.model().model_dump(by_alias=True)
        assert entry.model.model_validate(defaults).model_dump(by_alias=True) == defaults, name
    for key in all_keys(tables):
        assert len(key.description) > 4, key.path
        assert key.description.endswith("."), key.path
    config.backend.options["x"] = 1
    assert load_config(None, tables=tables)[0].backend.options == {}, "configurations share no container"


def test_the_documented_full_file_is_accepted(
    tables: Mapping[str, TableEntry], plugins: Plugins, command: Callable[..., Any]
) -> None:
    config, problems = load_config(FULL, tables=tables)
    assert problems == []
    assert check_names(config, plugins, tables) + check_options(config, plugins) == []
    assert config.backend.adapter_path == "/tmp/retrain_adapter"
    assert config.origin("training.lr").place == f"{FULL}:42"
    result = command("explain", str(FULL), "--json")
    assert result.code == 0, result.err
    assert '"mode": "single"' in result.out
    assert '"condition": "maxrl+gtpo_sepa"' in result.out
