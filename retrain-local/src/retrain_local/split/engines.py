"""The configured engine, once for each device that samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from retrain.api import ConfigError, Engine, Found, Kind, PluginContext, resolve
from retrain_local.checks import ENGINE, foreign_engine
from retrain_local.devices import Devices, working_on
from retrain_local.policy import LocalPolicy
from retrain_local.split.dealer import Dealer, Seat, Torn


def find_engine(context: PluginContext, devices: Devices) -> Found:
    """The engine of `[inference]`; ConfigError when it cannot sample on devices of its own."""
    config = context.config
    name, where = config.value("inference.engine", ENGINE), config.place("inference.engine")
    found = resolve(context.plugins, Kind.INFERENCE_ENGINE, name, where=where, search_paths=config.plugins.search_paths)
    if devices.is_split and name != ENGINE:
        raise ConfigError(foreign_engine(config))
    return found


def create_engine(context: PluginContext, found: Found, policies: Sequence[LocalPolicy], threads: int) -> Engine:
    """The engine on the one policy, or one for each behind a `Dealer`."""
    if len(policies) == 1:
        engine: Engine = found.target(context, policies[0])
        return engine
    torn = Torn()
    seats = []
    for policy in policies:
        at_work = partial(working_on, policy.device, threads)
        with at_work():
            engine = found.target(replace(context, check_stop=torn.check), policy)
        seats.append(Seat(engine=engine, at_work=at_work))
    return Dealer(seats, torn)
