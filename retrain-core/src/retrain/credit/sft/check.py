"""Configurations of `[sft]` that are refused before anything loads."""

from __future__ import annotations

from retrain.credit.check_loss import applicable_losses
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

LIKELIHOOD = "likelihood"


def problems_of(config: Config, plugins: Plugins) -> list[Problem]:
    """A backend that cannot train on given answers, and keys of a source that is not named."""
    table, backend = config.sft, config.backend.backend
    problems = []
    if plugins.find(Kind.BACKEND, backend) and LIKELIHOOD not in applicable_losses(plugins, backend):
        what = f"backend {backend!r} cannot train on given answers"
        why = f"it does not apply the loss {LIKELIHOOD!r}"
        backends = [entry.spec.name for entry in plugins.registered(Kind.BACKEND)]
        able = [name for name in backends if LIKELIHOOD in applicable_losses(plugins, name)]
        fix = "set steps = 0, or use [backend] backend = " + " or ".join(f'"{name}"' for name in able)
        problems.append(Problem(where=config.place("sft.steps"), what=what, why=why, fix=fix))
    for name in ("path", "options"):
        if getattr(table, name) and not table.source:
            what, fix = "says where another source is read, but source is empty", "set [sft] source, or remove it"
            problems.append(Problem(where=config.place(f"sft.{name}"), what=what, fix=fix))
    return problems
