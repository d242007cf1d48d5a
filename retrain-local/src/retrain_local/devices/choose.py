"""Turns `[backend] devices` into torch devices: those that sample, and the one that trains."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from retrain.api import Config, ConfigError, Problem
from retrain_local.checks import GPU, device_problems
from retrain_local.devices.torch_modes import limited_threads

KEY = "backend.devices"
NOT_SET = "[backend] devices is not set"
SPLIT = "split"
VISIBLE = "CUDA_VISIBLE_DEVICES"
log = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The sampling devices and the training device: one and the same, or, split, the last listed one trains.

    Split devices work concurrently. A device may be listed twice. `ranks` are the devices that all sample and train,
    each in a process of its own; then the others are that of this process, the first. Empty where it is alone.
    """

    samplers: tuple[torch.device, ...]
    trainer: torch.device
    is_split: bool = False
    ranks: tuple[torch.device, ...] = ()

    def of_rank(self, rank: int) -> Devices:
        """The one device of a rank."""
        return Devices(samplers=(self.ranks[rank],), trainer=self.ranks[rank])


def steps_ahead(config: Config, devices: Devices) -> int:
    """`[training] max_staleness`, or what it is by default: one step on split devices, none on one."""
    most: int = config.training.max_staleness
    return int(devices.is_split) if most < 0 else most


def choose_devices(config: Config) -> Devices:
    """Devices named by `cpu`, `gpu:N` or a comma-separated list of one of them.

    Without CUDA every `gpu:N` of the default becomes the CPU, with one warning; a split run stays split. ConfigError
    when somebody set a GPU that is not there, on other text, and on a list that mixes CPU and GPU.
    """
    devices, fallback = examine_devices(config)
    if fallback:
        log.warning("%s: training on the CPU.", fallback)
    return devices


def find_devices(config: Config) -> tuple[str, str]:
    """`[backend] devices` as a run here uses them, and why if nobody set the key; errors as in `choose_devices`."""
    devices, fallback = examine_devices(config)
    if fallback:
        return ",".join("cpu" for _ in config.backend.devices.split(",")), fallback
    seen = f"{NOT_SET}, and PyTorch {torch.__version__} sees {torch.cuda.get_device_name(devices.trainer)}"
    return config.backend.devices, "" if _is_set(config) else seen


def examine_devices(config: Config) -> tuple[Devices, str]:
    """`choose_devices` without its warning, which is returned: why CPUs replace the GPUs of the default."""
    if problems := device_problems(config):
        raise ConfigError(*problems)
    found, fallback = _found([name.strip() for name in config.backend.devices.split(",")], config)
    if len(found) > 1 and parallel_mode(config) != SPLIT:
        return Devices(samplers=found[:1], trainer=found[0], ranks=found), fallback
    return Devices(samplers=found[:-1] or found, trainer=found[-1], is_split=len(found) > 1), fallback


def parallel_mode(config: Config) -> str:
    """`[backend.options] parallel`: what several devices do."""
    return str(config.backend.options.get("parallel", SPLIT))


def missing_cuda() -> tuple[str, str]:
    """Why PyTorch cannot use a GPU here, and what to do about it."""
    name = f"PyTorch {torch.__version__}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"{name} is built without CUDA", "install a build with CUDA (https://pytorch.org/get-started)"
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return f"{VISIBLE} = {visible!r} hides every GPU from {name}", f"unset {VISIBLE}"
    try:
        torch.cuda.init()
        reason = "the driver reports no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
    return f"{name} finds no usable GPU: {reason}", "repair the driver (`nvidia-smi` shows what it sees)"


@contextmanager
def working_on(device: torch.device, threads: int) -> Iterator[None]:
    """Make `device` current in this thread, and let CPU operations use `threads` threads."""
    with limited_threads(threads):
        if device.type != "cuda":
            yield
            return
        with torch.cuda.device(device):
            yield


def _found(names: list[str], config: Config) -> tuple[tuple[torch.device, ...], str]:
    indices = [int(match[1]) for match in map(GPU.fullmatch, names) if match is not None]
    cpus = tuple(torch.device("cpu") for _ in names)
    if not indices:
        return cpus, ""
    if not torch.cuda.is_available():
        why, fix = missing_cuda()
        if not _is_set(config):
            return cpus, f"{NOT_SET}, and {why}"
        what, fix = f"{config.backend.devices!r} cannot be used", f'write "cpu" to train on the CPU, or {fix}'
        raise ConfigError(Problem(where=config.place(KEY), what=what, why=why, fix=fix))
    count = torch.cuda.device_count()
    for index in indices:
        if index >= count:
            what = f"there is no gpu:{index}: this machine has {count} GPU{'s' if count > 1 else ''}"
            fix = f'write "gpu:0" ... "gpu:{count - 1}", or "cpu"'
            raise ConfigError(Problem(where=config.place(KEY), what=what, fix=fix))
    return tuple(torch.device("cuda", index) for index in indices), ""


def _is_set(config: Config) -> bool:
    return config.origin(KEY).layer != "default"
