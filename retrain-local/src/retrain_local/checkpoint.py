"""Adapter and optimizer on disk: safetensors and JSON, nothing pickled."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retrain.api import BackendError, Problem
from retrain_local.lora import ADAPTER
from retrain_local.memory import MemoryLimits

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "backend_state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
FORMAT = 1


def save_adapter(peft: PeftModel, folder: Path) -> None:
    """Write the adapter as PEFT does, apart from the model card and the question it asks the hub about the base."""
    save_file(_adapter(peft), folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = copy.copy(peft.peft_config[ADAPTER])
    config.inference_mode = True
    config.save_pretrained(str(folder))
    path = folder / CONFIG_FILE
    document = json.loads(path.read_text(encoding="utf-8"))
    document["target_modules"] = sorted(document["target_modules"])  # a set: its order changes from run to run
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_state(
    peft: PeftModel,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    version: int,
    folder: Path,
    limits: MemoryLimits | None = None,
) -> None:
    """Write everything that continuing needs: adapter, AdamW moments by parameter name, step count and limits."""
    save_adapter(peft, folder)
    moments = {
        f"{name}.{moment}": optimizer.state[p][moment].detach().cpu().contiguous()
        for name, p in parameters.items()
        if p in optimizer.state
        for moment in MOMENTS
    }
    save_file(moments, folder / OPTIMIZER_FILE, metadata={"format": "pt"})
    limited = asdict(limits or MemoryLimits())
    state = json.dumps({"format": FORMAT, "policy_version": version, "memory_limits": limited}, indent=2) + "\n"
    (folder / STATE_FILE).write_text(state, encoding="utf-8")


def load_state(
    peft: PeftModel,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    folder: Path,
    limits: MemoryLimits | None = None,
) -> int:
    """Bring back what `save_state` wrote; returns the policy version.

    BackendError, and nothing changed, when a file is missing, broken, or does not fit this model and rank.
    """
    adapter, moments, state = _read(folder)
    targets = _adapter(peft)
    _check_fit(targets, adapter, folder / ADAPTER_FILE)
    wanted = {f"{name}.{m}": p if m != "step" else None for name, p in parameters.items() for m in MOMENTS}
    if moments:
        _check_fit(wanted, moments, folder / OPTIMIZER_FILE)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(adapter[name])
    optimizer.state.clear()
    for name, p in parameters.items() if moments else ():
        loaded = {m: moments[f"{name}.{m}"] for m in MOMENTS}
        optimizer.state[p] = {m: t if m == "step" else t.to(p.device) for m, t in loaded.items()}
    if limits is not None:
        limits.restore(state.get("memory_limits", {}))
    return int(state["policy_version"])


def _adapter(peft: PeftModel) -> dict[str, Tensor]:
    tensors = get_peft_model_state_dict(peft, adapter_name=ADAPTER, save_embedding_layers=False)
    return {name: tensor.detach() for name, tensor in sorted(tensors.items())}


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise _unusable(folder, f"{STATE_FILE} has format {state['format']}, this version reads {FORMAT}")
        state["policy_version"] = int(state["policy_version"])
        return load_file(folder / ADAPTER_FILE), load_file(folder / OPTIMIZER_FILE), state
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unusable(folder, f"{type(error).__name__}: {error}") from error


def _check_fit(wanted: Mapping[str, Tensor | None], found: Mapping[str, Tensor], file: Path) -> None:
    if odd := sorted(wanted.keys() ^ found.keys()):
        raise _unusable(file, f"{len(odd)} tensors are missing or unknown, first {odd[0]}")
    for name, tensor in wanted.items():
        if tensor is not None and tensor.shape != found[name].shape:
            raise _unusable(file, f"{name} has shape {list(found[name].shape)}, this run needs {list(tensor.shape)}")
        if not torch.isfinite(found[name]).all():
            raise _unusable(file, f"{name} holds a number that is not finite")


def _unusable(path: Path, what: str) -> BackendError:
    fix = "resume with the model and [lora] settings of the saved run, from a complete checkpoint"
    return BackendError(Problem(where=str(path), what=what, fix=fix))
