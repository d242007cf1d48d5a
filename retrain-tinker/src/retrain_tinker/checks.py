"""What a configuration must not ask of a service that decides it by itself; told before anything is sent."""

from __future__ import annotations

from retrain.api import Config, Problem


def problems_of(config: Config) -> list[Problem]:
    """Every key that the service would not heed."""
    return [*_alpha(config), *_inference(config)]


def _alpha(config: Config) -> list[Problem]:
    if not config.lora.alpha:
        return []
    what, fix = "a Tinker service sets LoRA's alpha itself", "remove it; scale [training] lr instead"
    return [Problem(where=config.place("lora.alpha"), what=what, fix=fix)]


def _inference(config: Config) -> list[Problem]:
    table = config.tables.get("inference")
    if table is None:
        return []
    problems = []
    for name, value in table:
        default = getattr(type(table)(), name)
        if value != default:
            what = f"{name} = {value!r} would have no effect: the service samples from what it trains"
            fix = f"remove it, or keep the default {default!r}; [model] base_url names the service"
            problems.append(Problem(where=config.place(f"inference.{name}"), what=what, fix=fix))
    return problems
