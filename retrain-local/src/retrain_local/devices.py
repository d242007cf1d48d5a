"""Turns `[backend] devices` into torch devices: those that sample, and the one that trains."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from retrain.api import Config, ConfigError, Problem
from retrain_local.torch_modes import limited_threads

KEY = "backend.devices"
_GPU = re.compile(r"gpu:(\d+)")
log = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The sampling devices and the training device: one and the same, or, split, the last listed one trains.

    Split devices work concurrently. A device may be listed twice.
    """

    samplers: tuple[torch.device, ...]
    trainer: torch.device
    is_split: bool = False


def choose_devices(config: Config) -> Devices:
    """Devices named by `cpu`, `gpu:N` or a comma-separated list of one of them.

    Without CUDA every `gpu:N` becomes the CPU, with one warning; a split run stays split. ConfigError on other text, on
    a list that mixes CPU and GPU, and on an index beyond the last GPU.
    """
    names = [name.strip() for name in config.backend.devices.split(",")]
    for name in names:
        _check_name(name, config)
    if len(names) > 1 and len({name == "cpu" for name in names}) > 1:
        what = f"{config.backend.devices!r} names a CPU and a GPU, which do not compute the same policy"
        raise ConfigError(Problem(where=config.place(KEY), what=what, fix='list GPUs alone, "gpu:0,gpu:1"'))
    devices = _found(names, config)
    return Devices(samplers=devices[:-1] or devices, trainer=devices[-1], is_split=len(devices) > 1)


@contextmanager
def working_on(device: torch.device, threads: int) -> Iterator[None]:
    """Make `device` current in this thread, and let CPU operations use `threads` threads."""
    with limited_threads(threads):
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield


def _check_name(name: str, config: Config) -> None:
    if name != "cpu" and _GPU.fullmatch(name) is None:
        what = f"{name!r} is not a device"
        fix = 'write "cpu" or "gpu:0", or several: "gpu:0,gpu:1" samples on the first and trains on the last'
        raise ConfigError(Problem(where=config.place(KEY), what=what, fix=fix))


def _found(names: list[str], config: Config) -> tuple[torch.device, ...]:
    indices = [int(match[1]) for match in map(_GPU.fullmatch, names) if match is not None]
    if not indices:
        return tuple(torch.device("cpu") for _ in names)
    if not torch.cuda.is_available():
        log.warning("%s asked for, but PyTorch sees no CUDA device: training on the CPU instead.", ", ".join(names))
        return tuple(torch.device("cpu") for _ in names)
    count = torch.cuda.device_count()
    for index in indices:
        if index >= count:
            what = f"there is no gpu:{index}: this machine has {count} GPU{'s' if count > 1 else ''}"
            fix = f'write "gpu:0" ... "gpu:{count - 1}", or "cpu"'
            raise ConfigError(Problem(where=config.place(KEY), what=what, fix=fix))
    return tuple(torch.device("cuda", index) for index in indices)
