"""Configurations of `[sft]` that are refused before anything loads."""

from __future__ import annotations

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.types import Kind
from retrain.rooms.session.check_loss import applicable_losses
from retrain.rooms.sft.table import SftTable

LIKELIHOOD = "likelihood"


def problems_of(config: Config, plugins: Plugins) -> list[Problem]:
    """A backend that cannot train on given answers, and keys of a source that is not named."""
    table, backend = config.table("sft", SftTable), config.backend.backend
    problems = []
    if plugins.find(Kind.BACKEND, backend) and LIKELIHOOD not in applicable_losses(plugins, backend):
        what = f"backend {backend!r} cannot train on given answers"
        why = f"it does not apply the loss {LIKELIHOOD!r}"
        fix = 'use [backend] backend = "local", or steps = 0 and [model] adapter with an adapter trained elsewhere'
        problems.append(Problem(where=config.place("sft.steps"), what=what, why=why, fix=fix))
    for name in ("path", "options"):
        if getattr(table, name) and not table.source:
            what, fix = "says where another source is read, and source is empty", "set [sft] source, or remove it"
            problems.append(Problem(where=config.place(f"sft.{name}"), what=what, fix=fix))
    return problems
