"""Trained weights and optimizer on disk, read and written: safetensors and JSON, nothing pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from retrain.api import BackendError, Config, ConfigError, Problem, locate_adapter
from retrain_local.devices.group import ALONE, Group
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model.adapter import file_names
from retrain_local.model.model_files import MASTER_FILE, save_model, save_tensors
from retrain_local.model.pair import Pair
from retrain_local.model.whole import gathered, like, put
from retrain_local.options import ModelKeys

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "backend_state.json"
PUBLISHED_FILE, EARLIER_FILE = "published_adapter.safetensors", "published_adapter_v{}.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
FORMAT = 1
Adapter = Mapping[str, Tensor]
Moments = dict[nn.Parameter, dict[str, Tensor]]  # of each parameter that was updated, by name of the moment
log = logging.getLogger("retrain")


class PublishedHistory:
    """Copies, in CPU memory, of the adapter published last and of the `earlier` ones before it, by version.

    With overlap a step trains on completions sampled from an earlier adapter, while coming steps are sampled from later
    ones. A resumed run samples them again, so the earlier adapters are part of a checkpoint.
    """

    def __init__(self, pair: Pair, earlier: int = 1) -> None:
        self._most = earlier + 1
        self.kept: dict[int, Adapter] = {0: _copied(pair.adapter)}  # the oldest first

    def record(self, pair: Pair, version: int) -> None:
        """Note that the trained adapter was published as `version`."""
        self.kept.pop(version, None)
        self.reset({**self.kept, version: _copied(pair.adapter)})

    def reset(self, published: Mapping[int, Adapter]) -> None:
        """Start again from the adapters that an interrupted run had published."""
        self.kept = dict(list(published.items())[-self._most :])

    def find(self, version: int) -> Adapter:
        """The adapter published as `version`; BackendError when it is not kept."""
        if version not in self.kept:
            what = f"policy version {version} is not kept, only {', '.join(map(str, self.kept))}"
            fix = "resume with the [training] max_staleness of the run"
            raise BackendError(Problem(where="sampling", what=what, fix=fix))
        return self.kept[version]


def save_adapter(pair: Pair, folder: Path, *, writes: bool = True) -> None:
    """Write the trained adapter as plain PEFT files; where all weights are trained, a model of transformers.

    A rank that does not write gives the others its part of sharded weights.
    """
    adapter = gathered(pair.adapter, keep=writes)
    if writes:
        _write_adapter(pair, adapter, folder)


def _write_adapter(pair: Pair, adapter: Mapping[str, Tensor], folder: Path) -> None:
    if pair.files is not None:
        save_model(pair.files, adapter, folder)
        return
    save_tensors(adapter, folder / ADAPTER_FILE)
    text = json.dumps(dict(pair.adapter_config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def save_state(
    pair: Pair,
    moments: Moments,
    version: int,
    folder: Path,
    limits: MemoryLimits | None = None,
    published: Mapping[int, Adapter] | None = None,
    *,
    group: Group = ALONE,
) -> None:
    """Write all that a resume needs: adapter, AdamW moments by parameter name, step count, limits, older adapters."""
    is_writer = not group.rank
    adapter = gathered(pair.adapter, keep=is_writer)
    updated = ((name, p) for name, p in pair.parameters.items() if p in moments)
    parts = {f"{name}.{moment}": moments[p][moment] for name, p in updated for moment in MOMENTS}
    whole = gathered(parts, keep=is_writer)
    if not is_writer:
        return
    _write_adapter(pair, adapter, folder)
    if pair.files is not None and not pair.files.is_exact:
        save_tensors(adapter, folder / MASTER_FILE)
    save_tensors(whole, folder / OPTIMIZER_FILE)
    state: dict[str, Any] = {"format": FORMAT, "policy_version": version}
    state |= {"memory_limits": asdict(limits or MemoryLimits()), "ranks": group.size}
    if published:
        *earlier, last = published
        save_tensors(published[last], folder / PUBLISHED_FILE)
        state |= {"published_version": last} | ({"earlier_versions": earlier} if earlier else {})
        for each in earlier:
            save_tensors(published[each], folder / EARLIER_FILE.format(each))
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_state(
    pair: Pair, moments: Moments, folder: Path, limits: MemoryLimits | None = None
) -> tuple[int, dict[int, Adapter], int]:
    """Restore parameters, moments and limits from what `save_state` wrote; publishing is left to the caller.

    Returns the number of optimizer steps in the adapter, the adapters published before it, the oldest first, and the
    number of processes that trained it. BackendError, and nothing changed, when a file is missing, broken, or does not
    fit this model and rank.
    """
    weights_file = folder / (ADAPTER_FILE if pair.files is None else pair.files.weights_file)
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        version, found = int(state["policy_version"]), state["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unusable(folder, f"{type(error).__name__}: {error}") from error
    if found != FORMAT:
        raise _unusable(folder, f"{STATE_FILE} has format {found}, this version reads {FORMAT}")
    targets, published = file_names(pair.parameters), dict[int, Adapter]()
    adapter = _loaded(weights_file, targets)
    wanted = {f"{name}.{m}": p if m != "step" else None for name, p in pair.parameters.items() for m in MOMENTS}
    stored = _loaded(folder / OPTIMIZER_FILE, wanted, may_be_empty=True)
    files = {EARLIER_FILE.format(version): version for version in state.get("earlier_versions", ())}
    for name, each in (files | {PUBLISHED_FILE: state.get("published_version")}).items():
        if each is not None:
            published[int(each)] = _loaded(folder / name, targets)
    with torch.no_grad():
        for name, target in targets.items():
            put(target, adapter[name])
    moments.clear()
    for name, p in pair.parameters.items() if stored else ():
        loaded = {m: stored[f"{name}.{m}"] for m in MOMENTS}
        moments[p] = {m: t if m == "step" else like(p, t) for m, t in loaded.items()}
    if limits is not None:
        limits.restore(state.get("memory_limits", {}))
    return version, published, int(state.get("ranks", 1))


def beginning_of(pair: Pair) -> Mapping[str, Tensor]:
    """A copy of the adapter before training; of a whole model none is kept, which would hold it twice."""
    return {} if pair.files is not None else _copied(pair.adapter)


def load_weights(pair: Pair, folder: Path | None, beginning: Mapping[str, Tensor]) -> None:
    """Give the trained parameters the numbers in `folder`, or those of `beginning` where it is None.

    BackendError, and nothing changed, when they cannot be read or do not fit.
    """
    if folder is None and not beginning:
        what, fix = "all weights were trained, so the base model is not here", "open the base model by its name"
        raise BackendError(Problem(what=what, fix=fix))
    file = (folder or Path()) / (ADAPTER_FILE if pair.files is None else pair.files.weights_file)
    tensors = _loaded(file, file_names(pair.parameters)) if folder else beginning
    if misfit := set_adapter(pair, tensors):
        raise _unusable(file, misfit)


def set_adapter(pair: Pair, tensors: Mapping[str, Tensor]) -> str:
    """Copy these tensors into the trained adapter; returns why they do not fit, with nothing changed, or ""."""
    targets = file_names(pair.parameters)
    if misfit := _misfit(targets, tensors):
        return misfit
    with torch.no_grad():
        for name, target in targets.items():
            put(target, tensors[name])
    return ""


def _loaded(file: Path, wanted: Mapping[str, Tensor | None], *, may_be_empty: bool = False) -> dict[str, Tensor]:
    """The tensors of a file; BackendError unless they are those that are wanted."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file, f"{type(error).__name__}: {error}") from error
    if (tensors or not may_be_empty) and (misfit := _misfit(wanted, tensors)):
        raise _unusable(file, misfit)
    return tensors


def _misfit(wanted: Mapping[str, Tensor | None], found: Mapping[str, Tensor]) -> str:
    """How the tensors found differ from those wanted in name or shape, or that one is not finite; else ""."""
    if odd := sorted(wanted.keys() ^ found.keys()):
        return f"{len(odd)} tensors are missing or unknown, first {odd[0]}"
    for name, tensor in wanted.items():
        if tensor is not None and tensor.shape != found[name].shape:
            return f"{name} has shape {list(found[name].shape)}, this run needs {list(tensor.shape)}"
        if not torch.isfinite(found[name]).all():
            return f"{name} holds a number that is not finite"
    return ""


def _unusable(path: Path, what: str) -> BackendError:
    fix = "resume with the model and [lora] settings of the saved run, from a complete checkpoint"
    return BackendError(Problem(where=str(path), what=what, fix=fix))


def _copied(adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in adapter.items()}


def load_start(pair: Pair, config: Config, *, told: str = "Starting from the adapter in") -> None:
    """Give the adapter the numbers of `[model] adapter`, and publish them; ConfigError when they do not fit.

    `told` is how the console's line about it begins.
    """
    file = locate_adapter(config.table("model", ModelKeys).adapter) / ADAPTER_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        what = f"{file} cannot be read: {type(error).__name__}: {error}"
        problem = Problem(where=config.place("model.adapter"), what=what, fix="give a complete adapter folder")
        raise ConfigError(problem) from error
    if misfit := set_adapter(pair, tensors):
        fix = "start from an adapter of this model that has a matrix for every linear layer except the head"
        raise ConfigError(Problem(where=config.place("model.adapter"), what=f"{file}: {misfit}", fix=fix))
    pair.trained.keep_reference()
    pair.publish()
    log.info("%s %s", told, file.parent)
