"""From `[backend] devices` to one torch device."""

from __future__ import annotations

import logging
import re

import torch

from retrain.api import Config, ConfigError, Problem

KEY = "backend.devices"
_GPU = re.compile(r"gpu:(\d+)")
log = logging.getLogger("retrain")


def choose_device(config: Config) -> torch.device:
    """The device that `cpu` or `gpu:N` names; without CUDA every `gpu:N` becomes the CPU, with one warning.

    ConfigError on any other text, on several devices, and on an index past the last GPU.
    """
    names = [name.strip() for name in config.backend.devices.split(",")]
    if len(names) > 1:
        what = f"{len(names)} devices given: split mode is not built yet"
        raise ConfigError(Problem(where=config.place(KEY), what=what, fix=f"keep one, {names[0] or 'gpu:0'!r}"))
    if names[0] == "cpu":
        return torch.device("cpu")
    match = _GPU.fullmatch(names[0])
    if match is None:
        what = f"{names[0]!r} is not a device"
        raise ConfigError(Problem(where=config.place(KEY), what=what, fix='write "cpu" or "gpu:0"'))
    if not torch.cuda.is_available():
        log.warning("%s asked for, but PyTorch sees no CUDA device: training on the CPU instead.", names[0])
        return torch.device("cpu")
    index, count = int(match[1]), torch.cuda.device_count()
    if index >= count:
        what = f"there is no {names[0]}: this machine has {count} GPU{'s' if count > 1 else ''}"
        fix = f'write "gpu:0" ... "gpu:{count - 1}", or "cpu"'
        raise ConfigError(Problem(where=config.place(KEY), what=what, fix=fix))
    return torch.device("cuda", index)
