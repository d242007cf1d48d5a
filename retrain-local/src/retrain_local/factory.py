"""Creates backend `local` as configured: in this process, or in one process for each of several devices."""

from __future__ import annotations

from retrain.api import Backend, PluginContext
from retrain_local.backend import create_local
from retrain_local.devices.torch_devices import choose_devices


def create_backend(context: PluginContext) -> Backend:
    devices = choose_devices(context.config)
    if not devices.ranks:
        return create_local(context, devices)
    # imported here, since few runs need PyTorch's process groups
    from retrain_local.ranks.backend import create_ranked

    return create_ranked(context, devices)
