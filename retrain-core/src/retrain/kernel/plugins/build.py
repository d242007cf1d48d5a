"""Resolves the name of a part and calls its factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, PluginError, Problem, RetrainError
from retrain.kernel.plugins.params import validated_params
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.types import Kind


def build_part(
    kind: Kind,
    name: str,
    path: str,
    context: PluginContext,
    options: Mapping[str, Any] | None = None,
    options_path: str = "",
) -> Any:
    """What the factory of `name` returns; whatever it raises is told with the plugin's name.

    `path` and `options_path` are the keys (`table.key`) that named the part and its options, for messages.
    """
    config = context.config
    where = config.place(path)
    found = resolve(context.plugins, kind, name, where=where, search_paths=config.plugins.search_paths)
    params, problems = validated_params(found.params, options or {}, where=config.place(options_path))
    if problems:
        raise ConfigError(*problems)
    try:
        return found.target(replace(context, params=params))
    except RetrainError:
        raise
    except Exception as error:
        what = f"{kind} {name!r} of {found.owner} could not be built: {type(error).__name__}: {error}"
        raise PluginError(Problem(where=where, what=what, fix=f"repair {found.owner.distribution}")) from error
