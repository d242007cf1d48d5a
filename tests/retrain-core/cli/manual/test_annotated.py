"""The annotated file names every key, and loading it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retrain.cli.manual.keys import annotated
from retrain.kernel.config.load import all_keys
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables


def test_it_is_the_defaults(plugins: Plugins, load: Callable[..., Any]) -> None:
    text = annotated(plugins).removeprefix("```toml\n").removesuffix("```")
    config, problems = load(text)
    assert not problems
    empty, _ = load("")
    assert config.as_dict() == empty.as_dict()


def test_it_names_every_key_of_a_run(plugins: Plugins) -> None:
    text = annotated(plugins)
    tables = registered_tables(plugins)
    for key in all_keys(tables):
        if not tables[key.table].traits.starts_runs:
            section = text.partition(f"[{key.table}]\n")[2].partition("\n\n")[0]
            assert f"{key.name} = " in section, key.path
            assert key.description in section, key.path
