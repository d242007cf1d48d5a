"""The checks of every kind, and how they are bound to a part."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Kind
from retrain.testing.check import Check, Run

ANY_KIND = "retrain.testing.announcement:ANY_KIND"
SUITES: Mapping[Kind, str] = {
    Kind.ADVANTAGE: "retrain.testing.credit:ADVANTAGE",
    Kind.TRANSFORM: "retrain.testing.credit:TRANSFORM",
    Kind.UNCERTAINTY: "retrain.testing.credit:UNCERTAINTY",
    Kind.ALGORITHM: "retrain.testing.credit:ALGORITHM",
    Kind.RECIPE: "retrain.testing.recipes:RECIPE",
    Kind.LOSS: "retrain.testing.losses:LOSS",
    Kind.REWARD: "retrain.testing.rewards:REWARD",
    Kind.DATA_SOURCE: "retrain.testing.data_sources:DATA_SOURCE",
    Kind.ENVIRONMENT: "retrain.testing.environments:ENVIRONMENT",
    Kind.PLANNING_DETECTOR: "retrain.testing.detectors:PLANNING_DETECTOR",
    Kind.CONTROLLER: "retrain.testing.controllers:CONTROLLER",
    Kind.BACKEND: "retrain.testing.backends:BACKEND",
    Kind.INFERENCE_ENGINE: "retrain.testing.sampling:SAMPLING",
    Kind.RECORDER: "retrain.testing.recorders:RECORDER",
    Kind.HEALTH_MONITOR: "retrain.testing.monitors:HEALTH_MONITOR",
    Kind.PACER: "retrain.testing.pacers:PACER",
    Kind.SAMPLER: "retrain.testing.samplers:SAMPLER",
    Kind.LAUNCHER: "retrain.testing.launchers:LAUNCHER",
    Kind.CONFIG_TABLE: "retrain.testing.tables:CONFIG_TABLE",
    Kind.COMMAND: "retrain.testing.commands:COMMAND",
    Kind.TEMPLATE: "retrain.testing.init_templates:TEMPLATE",
}


def conformance(
    kind: Kind | str, name: str, *, config: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Check, ...]:
    """The checks of a kind, bound to a registered name or a dotted path; the part is loaded when a check is called.

    `config` is merged over the toy configuration, table by table as TOML has them: `{"backend": {"options": {...}}}`.
    ConfigError for a kind that does not exist.
    """
    wanted = kind_of(kind)
    given = dict(config or {})
    return tuple(
        Check(kind=wanted, name=run.__name__, purpose=_purpose(run), subject=name, run=run, config=given)
        for run in (*_load(ANY_KIND), *_load(SUITES[wanted]))
    )


def kind_of(kind: Kind | str) -> Kind:
    """A kind by its name, `data source` or `data-source` or `data_source`; ConfigError names the nearest."""
    text = str(kind).replace("-", " ").replace("_", " ").lower()
    known = [member.value for member in Kind]
    if text in known:
        return Kind(text)
    near = get_close_matches(text, known, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"use one of: {', '.join(known)}"
    raise ConfigError(Problem(where="conformance()", what=f"no kind of plugin is called {str(kind)!r}", fix=fix))


def _load(target: str) -> tuple[Run, ...]:
    module, _, attribute = target.partition(":")
    checks: tuple[Run, ...] = getattr(importlib.import_module(module), attribute)
    return checks


def _purpose(run: Run) -> str:
    return (inspect.getdoc(run) or "").partition("\n")[0]
