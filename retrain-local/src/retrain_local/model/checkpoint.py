"""Reads and writes trained weights and the optimizer: safetensors and JSON, nothing pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from retrain.api import BackendError, Config, ConfigError, Problem, locate_adapter
from retrain_local.devices.group import Group, gathered, like, put
from retrain_local.memory.limits import MemoryLimits
from retrain_local.model.adapter import file_names
from retrain_local.model.model_files import MASTER_FILE, save_model, save_tensors, write_json
from retrain_local.model.pair import Pair
from retrain_local.options import ModelKeys

ADAPTER_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "backend_state.json"
PUBLISHED_FILE, EARLIER_FILE = "published_adapter.safetensors", "published_adapter_v{}.safetensors"
AVERAGE_FILE = "teacher_average.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")
FORMAT = 1
Adapter = Mapping[str, Tensor]
Moments = dict[nn.Parameter, dict[str, Tensor]]  # of each parameter that was updated, by name of the moment
log = logging.getLogger("retrain")


class PublishedHistory:
    """Copies in CPU memory of the adapter published last and of the `earlier` ones before it, by version.

    With overlap a resumed run samples coming steps again from earlier adapters, so they are part of a checkpoint.
    """

    def __init__(self, pair: Pair, earlier: int = 1) -> None:
        self._most = earlier + 1
        self.kept: dict[int, Adapter] = {0: _copied(pair.adapter)}  # the oldest first

    def record(self, pair: Pair, version: int) -> None:
        self.kept.pop(version, None)
        self.reset({**self.kept, version: _copied(pair.adapter)})

    def reset(self, published: Mapping[int, Adapter]) -> None:
        """Keep the last of these, the adapters that an interrupted run had published."""
        self.kept = dict(list(published.items())[-self._most :])

    def find(self, version: int) -> Adapter:
        if version not in self.kept:
            what = f"policy version {version} is not kept, only {', '.join(map(str, self.kept))}"
            fix = "resume with the [training] max_staleness of the run"
            raise BackendError(Problem(code="resume.version-not-kept", where="sampling", what=what, fix=fix))
        return self.kept[version]


def save_adapter(pair: Pair, folder: Path, *, writes: bool = True) -> None:
    """Write PEFT files, or all trained weights as a model; a rank that does not write contributes its shards."""
    adapter = gathered(pair.adapter, keep=writes)
    if writes:
        _write_adapter(pair, adapter, folder)


def _write_adapter(pair: Pair, adapter: Mapping[str, Tensor], folder: Path) -> None:
    if pair.files is not None:
        save_model(pair.files, adapter, folder)
        return
    save_tensors(adapter, folder / ADAPTER_FILE)
    write_json(folder / CONFIG_FILE, pair.adapter_config)


def save_state(
    pair: Pair,
    moments: Moments,
    version: int,
    folder: Path,
    limits: MemoryLimits,
    published: Mapping[int, Adapter],
    *,
    group: Group,
) -> None:
    """Write everything that a resume needs: weights, AdamW's moments by parameter name, step count, limits."""
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
    state |= {"memory_limits": asdict(limits), "ranks": group.size}
    if published:
        *earlier, last = published
        save_tensors(published[last], folder / PUBLISHED_FILE)
        state |= {"published_version": last} | ({"earlier_versions": earlier} if earlier else {})
        for each in earlier:
            save_tensors(published[each], folder / EARLIER_FILE.format(each))
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_state(pair: Pair, moments: Moments, folder: Path, limits: MemoryLimits) -> tuple[int, dict[int, Adapter], int]:
    """Restore parameters, moments and limits from the files of `save_state`; the caller publishes.

    Returns the number of optimizer steps in the adapter, the adapters published before it, the oldest first, and the
    number of processes that trained it. BackendError, with nothing changed, when a file is missing, broken or unfit.
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
    adapter = _loaded(weights_file, targets, besides=_fixed(pair))
    moment_of = {f"{name}.{m}": p if m != "step" else None for name, p in pair.parameters.items() for m in MOMENTS}
    # A parameter that has got no gradient yet has no moments: of an expert, or of a layer that this model skips.
    stored = _loaded(folder / OPTIMIZER_FILE, moment_of, some_of=MOMENTS)
    files = {EARLIER_FILE.format(version): version for version in state.get("earlier_versions", ())}
    for name, each in (files | {PUBLISHED_FILE: state.get("published_version")}).items():
        if each is not None:
            published[int(each)] = _loaded(folder / name, targets)
    for name, target in targets.items():
        put(target, adapter[name])
    moments.clear()
    for name, p in pair.parameters.items():
        if f"{name}.{MOMENTS[0]}" not in stored:
            continue
        loaded = {m: stored[f"{name}.{m}"] for m in MOMENTS}
        moments[p] = {m: t if m == "step" else like(p, t) for m, t in loaded.items()}
    limits.restore(state.get("memory_limits", {}))
    return version, published, int(state.get("ranks", 1))


def load_average(average: Adapter, folder: Path) -> None:
    stored = _loaded(folder / AVERAGE_FILE, average)
    for name, target in average.items():
        put(target, stored[name])


def beginning_of(pair: Pair) -> Mapping[str, Tensor]:
    """Return a copy of the adapter before training; {} for a whole model, to hold it only once."""
    return {} if pair.files is not None else _copied(pair.adapter)


def load_weights(pair: Pair, folder: Path | None, beginning: Mapping[str, Tensor]) -> None:
    """Copy the numbers in `folder`, or `beginning`, into the trained parameters; BackendError, unchanged, if unfit."""
    if folder is None and not beginning:
        what, fix = "all weights were trained, so the base model is not kept", "open the base model by its name"
        raise BackendError(Problem(code="checkpoint.base-not-kept", what=what, fix=fix))
    file = (folder or Path()) / (ADAPTER_FILE if pair.files is None else pair.files.weights_file)
    tensors = _loaded(file, file_names(pair.parameters), besides=_fixed(pair)) if folder else beginning
    if misfit := set_adapter(pair, tensors):
        raise _unusable(file, misfit)


def set_adapter(pair: Pair, tensors: Mapping[str, Tensor]) -> str:
    """Copy these tensors into the trained adapter; return why they do not fit, with nothing changed, or ""."""
    targets = file_names(pair.parameters)
    if misfit := _misfit(targets, tensors):
        return misfit
    for name, target in targets.items():
        put(target, tensors[name])
    return ""


def _fixed(pair: Pair) -> Collection[str]:
    return () if pair.files is None else {*pair.files.fixed, *pair.files.others}


def _loaded(
    file: Path, wanted: Mapping[str, Tensor | None], *, besides: Collection[str] = (), some_of: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Read tensors of these names and shapes, ignoring the names `besides` in the file.

    With `some_of`, the endings of a group's names, whole groups may be missing.
    """
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file, f"{type(error).__name__}: {error}") from error
    tensors = {name: tensor for name, tensor in tensors.items() if name not in besides}
    if some_of:
        groups = {name.rpartition(".")[0] for name in tensors}
        wanted = {name: target for name, target in wanted.items() if name.rpartition(".")[0] in groups}
    if misfit := _misfit(wanted, tensors):
        raise _unusable(file, misfit)
    return tensors


def _misfit(wanted: Mapping[str, Tensor | None], found: Mapping[str, Tensor]) -> str:
    """Return how the tensors found differ from the wanted ones in name or shape, or which is not finite, or ""."""
    if odd := sorted(wanted.keys() ^ found.keys()):
        return f"{len(odd)} tensors are missing or unknown, first {odd[0]}"
    for name, tensor in wanted.items():
        if tensor is not None and tensor.shape != found[name].shape:
            return f"{name} has shape {list(found[name].shape)}, this run needs {list(tensor.shape)}"
        if not torch.isfinite(found[name]).all():
            return f"{name} holds a number that is not finite"
    return ""


def _unusable(path: Path, what: str) -> BackendError:
    what = f"cannot be restored: {what}"
    fix = "resume with the model and [lora] settings of the saved run, from a complete checkpoint"
    return BackendError(Problem(code="checkpoint.unusable", where=str(path), what=what, fix=fix))


def _copied(adapter: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in adapter.items()}


def load_start(pair: Pair, config: Config, *, line: str = "Starting from the adapter in") -> None:
    """Copy `[model] adapter` into the adapter, publish it, and log `line` and its folder; ConfigError if unfit."""
    file, where = locate_adapter(config.table("model", ModelKeys).adapter) / ADAPTER_FILE, config.place("model.adapter")
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        what, fix = f"{file} cannot be read: {type(error).__name__}: {error}", "give a complete adapter folder"
        raise ConfigError(Problem(code="model.adapter-unreadable", where=where, what=what, fix=fix)) from error
    if misfit := set_adapter(pair, tensors):
        what = f"{file} does not fit: {misfit}"
        fix = "start from an adapter of this model that has a matrix for every linear layer except the head"
        raise ConfigError(Problem(code="model.adapter-misfit", where=where, what=what, fix=fix))
    pair.trained.keep_reference()
    pair.publish()
    log.info("%s %s", line, file.parent)
