"""Configurations that the engine `pytorch` refuses, checked before anything heavy is imported."""

from __future__ import annotations

import json
from pathlib import Path

from retrain.api import Config, Problem

ENGINE = "pytorch"
GPU_ONLY = {
    ("dtype", "fp8"): "a CPU has no matrix product of 8-bit weights",
    ("attention_kernel", "flash"): "PyTorch's flash attention over packed rows runs on CUDA alone",
    ("attention_kernel", "triton"): "Triton compiles for GPUs",
    ("attention_kernel", "tk"): "its kernels are CUDA's",
    ("attention_kernel", "cutlass"): "its kernels are CUDA's",
}
ON_A_CPU = {"dtype": 'or use dtype = "bf16"', "attention_kernel": 'or use "default"'}


def problems_of(config: Config) -> list[Problem]:
    """Values of `[inference]` that no device supports, or that a CPU named in the configuration does not.

    Whatever depends on a GPU's generation or on an installed package is checked when the engine is created.
    """
    if config.value("inference.engine", ENGINE) != ENGINE:
        return []
    problems = []
    if config.value("inference.dtype", "auto") == "fp4":
        what, why = "dtype = 'fp4' is refused", "PyTorch has no kernel that computes with 4-bit weights"
        fix = 'use "fp8" on a GPU that has it, or "auto"'
        problems.append(Problem(where=config.place("inference.dtype"), what=what, why=why, fix=fix))
    if not _is_cpu(config.backend.devices):
        return problems
    for (name, value), why in GPU_ONLY.items():
        if config.value(f"inference.{name}", "") == value:
            what = f"{name} = {value!r} is refused with devices = {config.backend.devices!r}"
            fix = f'set [backend] devices = "gpu:0", {ON_A_CPU[name]}'
            problems.append(Problem(where=config.place(f"inference.{name}"), what=what, why=why, fix=fix))
    return problems


def rank_problems(config: Config) -> list[Problem]:
    """Why `--resume-anyway` cannot continue with another rank; a plain resume names the differing key itself."""
    run = config.value("resume.from_", "")
    if not run or not config.value("resume.anyway", False):
        return []
    saved = Path(config.backend.adapter_path or Path(run, "adapter")).expanduser()
    for file in sorted(saved.glob("*/adapter_config.json")):
        try:
            rank = json.loads(file.read_text(encoding="utf-8")).get("r") if file.is_file() else None
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # resuming verifies the checkpoint that it uses
        if isinstance(rank, int) and rank != config.model.lora_rank:
            what = f"is {config.model.lora_rank}, and the adapter of this run has rank {rank}"
            why, fix = "--resume-anyway cannot change that", f"set it to {rank}, or start a new run"
            return [Problem(where=config.place("model.lora_rank"), what=what, why=why, fix=fix)]
    return []


def foreign_engine(config: Config) -> Problem:
    """Why another engine cannot be used when several devices sample and train at once.

    Checked when the backend is created: a campaign lists several devices to distribute its runs over them.
    """
    name = config.value("inference.engine", ENGINE)
    what = f"{config.backend.devices!r} lists several devices, but engine {name!r} does not sample on any of them"
    why = "it samples elsewhere, and checks its log-probabilities against a model that would be training meanwhile"
    return Problem(where=config.place("backend.devices"), what=what, why=why, fix="list one device, the trainer's")


def _is_cpu(devices: str) -> bool:
    """Whether the sampling devices (all but the last of several) are CPUs."""
    names = [name.strip() for name in devices.split(",")]
    return all(name == "cpu" for name in names[:-1] or names)
