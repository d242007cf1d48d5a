"""Configurations of a shadow that are refused before anything loads."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins
from retrain.tasks.scoring.build import NO_REWARD, brings_tasks, has_verifier
from retrain.tasks.scoring.shadow import NAME, PARAMS, shadow_config, shadow_name, shadow_params

OF_THE_RUN = ("type", "weights", "shadow", "shadow_params")  # keys of [reward] that no shadow has


def shadow_problems(config: Config, plugins: Plugins) -> Iterator[Problem]:
    """Every problem with `[reward] shadow` but an unknown name, which is reported as that of any part."""
    name, params = shadow_name(config), shadow_params(config)
    if not name:
        if params:
            what, fix = "are the keys of a shadow, and there is none", 'set shadow = "NAME", or remove them'
            yield Problem(where=config.place(PARAMS), what=what, fix=fix)
        return
    where = config.place(NAME)
    if name == NO_REWARD:
        fix = "name a reward that judges, or remove the key"
        yield Problem(where=where, what=f"reward {NO_REWARD!r} judges nothing", fix=fix)
    elif brings_tasks(config, plugins):
        provider = config.environment.provider
        what = f"environment {provider!r} scores its own episodes, and gives no text that a shadow could score"
        yield Problem(where=where, what=what, fix="remove the shadow, or let [data] and [reward] give tasks and scores")
    elif not has_verifier(config):
        what = f"reward {NO_REWARD!r} is trained on no score, so there is none that a shadow could stand beside"
        yield Problem(where=where, what=what, fix="remove the shadow")
    if of_run := [key for key in OF_THE_RUN if key in params]:
        fix = "remove it: `shadow` names the shadow's reward"
        yield Problem(where=f"{config.place(PARAMS)}.{of_run[0]}", what="is not a key of a shadow", fix=fix)
        return
    try:
        shadow_config(config)
    except ValidationError as error:
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"])
            what = "unknown key" if detail["type"] == "extra_forbidden" else detail["msg"].removeprefix("Value error, ")
            yield Problem(where=f"{config.place(PARAMS)}.{key}", what=what, fix="give it as [reward] takes it")
