"""Findings of this distribution for `retrain doctor`: PyTorch, its devices, and the weights of the model."""

from __future__ import annotations

import shutil
from pathlib import Path

from retrain.api import Config, ConfigError, Diagnosis, Plugins, RetrainError

GIB = 2**30


def diagnose(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    if config is not None and config.backend.backend != "local":
        return []  # importing PyTorch takes seconds
    needed = config is not None
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries is missing or broken
        detail = f"cannot be imported: {type(error).__name__}: {error}"
        fix = "pip install torch  (https://pytorch.org/get-started says which build)"
        return [Diagnosis(name="torch", status="failed", detail=detail, fix=fix, needed=needed)]
    found = [Diagnosis(name="torch", status="ok", detail=torch.__version__, needed=needed)]
    for index in range(torch.cuda.device_count()):
        try:
            free, total = torch.cuda.mem_get_info(index)
            detail = f"{torch.cuda.get_device_name(index)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
            found.append(Diagnosis(name=f"gpu:{index}", status="ok", detail=detail))
        except RuntimeError as error:
            detail = f"does not answer: {str(error).splitlines()[0]}"
            fix = "look at nvidia-smi: another process may use it, or the driver is too old"
            found.append(Diagnosis(name=f"gpu:{index}", status="failed", detail=detail, fix=fix))
    if torch.cuda.is_available():
        found.append(_triton())
    if torch.backends.mps.is_available():
        detail = "Apple GPU; the local backend does not use it, it trains on the CPU"
        found.append(Diagnosis(name="mps", status="ok", detail=detail))
    found.append(Diagnosis(name="cpu", status="ok", detail=f"{torch.get_num_threads()} threads for PyTorch"))
    return found if config is None else [*found, _chosen(config), *_weights(config, plugins)]


def _triton() -> Diagnosis:
    """Launch a kernel on the first GPU, which compiles it and Triton's own launcher."""
    import torch

    from retrain_local.devices.kernel_trials import numbers

    try:
        from retrain_local.model.operations_triton import OPERATIONS

        with torch.no_grad():
            OPERATIONS.swiglu(numbers((16, 64), torch.float32, torch.device("cuda", 0)))
        torch.cuda.synchronize(0)
    # Kernel compilers and launchers raise exceptions of any class.
    except Exception as error:
        if isinstance(error, ImportError):
            fix = "pip install triton"
        elif not (shutil.which("gcc") or shutil.which("clang")):
            fix = "apt install gcc: there is no C compiler, and Triton needs one"
        else:
            fix = "if Python.h is missing: apt install python3-dev"
        detail = f"no kernel runs, so steps take longer: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        return Diagnosis(name="triton", status="warn", detail=detail, fix=fix)
    return Diagnosis(name="triton", status="ok", detail="a kernel compiles and runs")


def _chosen(config: Config) -> Diagnosis:
    from retrain_local.devices.torch_devices import examine_devices

    try:
        devices, fallback = examine_devices(config)
    except ConfigError as error:
        problem = error.problems[0]
        detail = f"{problem.where}: {problem.what}" + (f": {problem.why}" if problem.why else "")
        return Diagnosis(name="device", status="missing", detail=detail, fix=problem.fix, needed=True)
    if fallback:
        detail, fix = f"{fallback}: it trains on the CPU", 'set devices = "cpu"'
        return Diagnosis(name="device", status="warn", detail=detail, fix=fix, needed=True)
    samples = f", samples on {', '.join(map(str, devices.samplers))}" if devices.is_split else ""
    return Diagnosis(name="device", status="ok", detail=f"trains on {devices.trainer}{samples}", needed=True)


def _weights(config: Config, plugins: Plugins) -> list[Diagnosis]:
    from retrain_local.model.model_files import KEY, check_folder

    try:
        located = plugins.locate_model(config.model.model)
        folder = Path(located or config.model.model).expanduser()
        if located is None and not folder.is_dir():
            return []
        check_folder(folder, config.place(KEY))
    except RetrainError as error:
        problem = error.problems[0]
        detail = f"{problem.where}: {problem.what}"
        return [Diagnosis(name="weights", status="missing", detail=detail, fix=problem.fix, needed=True)]
    return [Diagnosis(name="weights", status="ok", detail=str(folder), needed=True)]
