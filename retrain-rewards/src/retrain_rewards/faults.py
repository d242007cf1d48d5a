"""Makes the errors of this distribution that a user meets before the run starts."""

from __future__ import annotations

from retrain.api import ConfigError, Problem


def refused(where: str, *, code: str, what: str, why: str = "", fix: str = "") -> ConfigError:
    return ConfigError(Problem(code=code, where=where, what=what, why=why, fix=fix))
