"""The torch devices of `[backend] devices`, the threads of CPU operations, and PyTorch's deterministic mode."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from retrain.api import Config, ConfigError, Problem
from retrain_local.checks import GPU, device_problems
from retrain_local.memory.sizes import MOST_PACKS_AT_A_TIME, PACKS_AT_A_TIME
from retrain_local.memory.sizes import ONE_THREAD_BELOW as ONE_THREAD_BELOW


def threads_for(parameters: int, device: torch.device) -> int:
    """Return one thread for small models on a CPU, PyTorch's own setting for all others.

    The operations of a small model take microseconds, and each would end in a barrier of all threads. On an idle
    machine several threads gain little. Next to a busy process every barrier waits for a descheduled thread, and a step
    was measured to take a hundred times as long. With one thread the numbers do not depend on the number of cores.
    """
    return 1 if _is_small(parameters, device) else torch.get_num_threads()


def _is_small(parameters: int, device: torch.device) -> bool:
    return device.type == "cpu" and parameters < ONE_THREAD_BELOW


def packs_at_a_time(parameters: int, device: torch.device) -> int:
    """Return the divisor of a step's number of packs: 2 for a small model on a CPU, a pack per core for others."""
    # so the results of a small model do not depend on the number of cores
    if _is_small(parameters, device):
        return PACKS_AT_A_TIME
    return min(MOST_PACKS_AT_A_TIME, torch.get_num_threads()) if device.type == "cpu" else 1


def pack_workers(parameters: int, device: torch.device) -> int:
    """Return the number of packs that are computed concurrently, each by one thread, to use several cores.

    Unlike threads inside an operation these never wait for each other, so a busy machine costs them no more than its
    share. Gradients are summed in the order of the packs, so results do not depend on its load. Two packs at a time
    also multiply faster than one with two threads, by 1.4 to 2 on two cores.
    """
    return min(packs_at_a_time(parameters, device), os.cpu_count() or 1)


def training_threads(threads: int, parameters: int, device: torch.device) -> int:
    """Return the threads inside an operation of training, if sampling has `threads`, minus those that packs use."""
    return max(1, threads // pack_workers(parameters, device)) if device.type == "cpu" else threads


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Run a block with deterministic operations; those without a deterministic form raise, or warn with `warn_only`."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    # Filling costs time, and no memory is read before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills


KEY = "backend.devices"
NOT_SET = "[backend] devices is not set"
VISIBLE = "CUDA_VISIBLE_DEVICES"
log = logging.getLogger("retrain")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The sampling devices and the training device: the same one, or, split, the last listed one trains.

    Split devices work concurrently. A device may be listed twice. `ranks` are the devices that all sample and train,
    each in its own process; then `samplers` and `trainer` are the first of them.
    """

    samplers: tuple[torch.device, ...]
    trainer: torch.device
    is_split: bool = False
    ranks: tuple[torch.device, ...] = ()

    def of_rank(self, rank: int) -> Devices:
        return Devices(samplers=(self.ranks[rank],), trainer=self.ranks[rank])


def steps_ahead(config: Config, devices: Devices) -> int:
    """Return `[training] max_staleness`; its default is one step on split devices, and none on one."""
    most: int = config.training.max_staleness
    return int(devices.is_split) if most < 0 else most


def choose_devices(config: Config) -> Devices:
    """Return the devices of `cpu`, `gpu:N` or a list of one of them; ConfigError for others.

    Without CUDA every `gpu:N` of the default becomes the CPU, with one warning; a split run stays split.
    """
    devices, fallback = examine_devices(config)
    if fallback:
        log.warning("%s: training on the CPU.", fallback)
    return devices


def find_devices(config: Config) -> tuple[str, str]:
    """Return `[backend] devices` as a run on this machine uses them, and why if the key is not set."""
    devices, fallback = examine_devices(config)
    if fallback:
        return ",".join("cpu" for _ in config.backend.devices.split(",")), fallback
    seen = f"{NOT_SET}, and PyTorch {torch.__version__} sees {torch.cuda.get_device_name(devices.trainer)}"
    return config.backend.devices, "" if _is_set(config) else seen


def examine_devices(config: Config) -> tuple[Devices, str]:
    """Return the result of `choose_devices`, and its warning: why CPUs replace the GPUs of the default."""
    if problems := device_problems(config):
        raise ConfigError(*problems)
    found, fallback = _found([name.strip() for name in config.backend.devices.split(",")], config)
    if len(found) > 1 and parallel_mode(config) != "split":
        return Devices(samplers=found[:1], trainer=found[0], ranks=found), fallback
    return Devices(samplers=found[:-1] or found, trainer=found[-1], is_split=len(found) > 1), fallback


def parallel_mode(config: Config) -> str:
    return str(config.backend.options.get("parallel", "split"))


def missing_cuda() -> tuple[str, str]:
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
    return f"{name} finds no usable GPU: {reason}", "repair the driver (`nvidia-smi` lists its GPUs)"


@contextmanager
def working_on(device: torch.device, threads: int) -> Iterator[None]:
    """Make `device` current in this thread, and let CPU operations use `threads` threads."""
    with limited_threads(threads), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
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
        raise ConfigError(Problem(code="device.no-gpu", where=config.place(KEY), what=what, why=why, fix=fix))
    count = torch.cuda.device_count()
    for index in indices:
        if index >= count:
            what = f"there is no gpu:{index}: this machine has {count} GPU{'s' if count > 1 else ''}"
            fix = f'write "gpu:0" ... "gpu:{count - 1}", or "cpu"'
            raise ConfigError(Problem(code="device.no-such-gpu", where=config.place(KEY), what=what, fix=fix))
    return tuple(torch.device("cuda", index) for index in indices), ""


def _is_set(config: Config) -> bool:
    return config.origin(KEY).layer != "default"
