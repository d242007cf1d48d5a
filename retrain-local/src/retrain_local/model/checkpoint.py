"""Trained weights and optimizer on disk, read and written: safetensors and JSON, nothing pickled."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

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


class Optimizer(Protocol):
    """The saved part of an optimizer: the moments of each parameter that was updated, by name of the moment."""

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """By parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published:
    """The adapter that the sampler used when it was not the trained one, and how many steps were in it."""

    adapter: Mapping[str, Tensor]
    version: int


class PublishedHistory:
    """Copies, in CPU memory, of the adapter published last and of the `earlier` ones before it; the oldest first.

    With overlap a step trains on completions sampled from an earlier adapter, while coming steps are sampled from later
    ones. A resumed run samples them again, so the earlier adapters are part of a checkpoint.
    """

    def __init__(self, pair: Pair, earlier: int = 1) -> None:
        self._most = earlier + 1
        self.kept: tuple[Published, ...] = (Published(adapter=_copied(pair.adapter), version=0),)

    def record(self, pair: Pair, version: int) -> None:
        """Note that the trained adapter was published as `version`."""
        others = (each for each in self.kept if each.version != version)
        self.kept = (*others, Published(adapter=_copied(pair.adapter), version=version))[-self._most :]

    def reset(self, published: Sequence[Published]) -> None:
        """Start again from what an interrupted run had published."""
        self.kept = tuple(published)[-self._most :]

    def find(self, version: int) -> Published:
        """The adapter published as `version`; BackendError when it is not kept."""
        for each in self.kept:
            if each.version == version:
                return each
        what = f"policy version {version} is not kept, only {', '.join(str(each.version) for each in self.kept)}"
        raise BackendError(
            Problem(where="sampling", what=what, fix="resume with the [training] max_staleness of the run")
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """Number of optimizer steps in the trained adapter, and the adapters published before it, the oldest first.

    `ranks` is how many processes trained it.
    """

    version: int
    published: tuple[Published, ...]
    ranks: int


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
    optimizer: Optimizer,
    version: int,
    folder: Path,
    limits: MemoryLimits | None = None,
    published: Sequence[Published] = (),
    *,
    group: Group = ALONE,
) -> None:
    """Write all that a resume needs: adapter, AdamW moments by parameter name, step count, limits, older adapters."""
    is_writer = not group.rank
    adapter = gathered(pair.adapter, keep=is_writer)
    parts = {
        f"{name}.{moment}": optimizer.state[p][moment]
        for name, p in pair.parameters.items()
        if p in optimizer.state
        for moment in MOMENTS
    }
    moments = gathered(parts, keep=is_writer)
    if not is_writer:
        return
    _write_adapter(pair, adapter, folder)
    if pair.files is not None and not pair.files.is_exact:
        save_tensors(adapter, folder / MASTER_FILE)
    save_tensors(moments, folder / OPTIMIZER_FILE)
    limited = asdict(limits or MemoryLimits())
    state: dict[str, Any] = {"format": FORMAT, "policy_version": version, "memory_limits": limited}
    state["ranks"] = group.size
    if published:
        *earlier, last = published
        save_tensors(last.adapter, folder / PUBLISHED_FILE)
        state["published_version"] = last.version
        for each in earlier:
            save_tensors(each.adapter, folder / EARLIER_FILE.format(each.version))
        if earlier:
            state["earlier_versions"] = [each.version for each in earlier]
    (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_state(pair: Pair, optimizer: Optimizer, folder: Path, limits: MemoryLimits | None = None) -> Loaded:
    """Restore parameters, optimizer and limits from what `save_state` wrote; publishing is left to the caller.

    BackendError, and nothing changed, when a file is missing, broken, or does not fit this model and rank.
    """
    weights_file = ADAPTER_FILE if pair.files is None else pair.files.weights_file
    adapter, moments, state = _read(folder, weights_file)
    targets, published = file_names(pair.parameters), list[Published]()
    _check_fit(targets, adapter, folder / weights_file)
    wanted = {f"{name}.{m}": p if m != "step" else None for name, p in pair.parameters.items() for m in MOMENTS}
    if moments:
        _check_fit(wanted, moments, folder / OPTIMIZER_FILE)
    files = {EARLIER_FILE.format(version): version for version in state.get("earlier_versions", ())}
    for name, version in (files | {PUBLISHED_FILE: state.get("published_version")}).items():
        if version is not None:
            published.append(Published(adapter=_read_published(folder / name), version=int(version)))
            _check_fit(targets, published[-1].adapter, folder / name)
    with torch.no_grad():
        for name, target in targets.items():
            put(target, adapter[name])
    optimizer.state.clear()
    for name, p in pair.parameters.items() if moments else ():
        loaded = {m: moments[f"{name}.{m}"] for m in MOMENTS}
        optimizer.state[p] = {m: t if m == "step" else like(p, t) for m, t in loaded.items()}
    if limits is not None:
        limits.restore(state.get("memory_limits", {}))
    ranks = int(state.get("ranks", 1))
    return Loaded(version=int(state["policy_version"]), published=tuple(published), ranks=ranks)


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
    try:
        tensors = load_file(file) if folder else beginning
    except (OSError, SafetensorError) as error:
        raise _unusable(file, f"{type(error).__name__}: {error}") from error
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


def _read(folder: Path, weights_file: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise _unusable(folder, f"{STATE_FILE} has format {state['format']}, this version reads {FORMAT}")
        state["policy_version"] = int(state["policy_version"])
        return load_file(folder / weights_file), load_file(folder / OPTIMIZER_FILE), state
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unusable(folder, f"{type(error).__name__}: {error}") from error


def _read_published(file: Path) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _unusable(file.parent, f"{type(error).__name__}: {error}") from error
    return tensors


def _check_fit(wanted: Mapping[str, Tensor | None], found: Mapping[str, Tensor], file: Path) -> None:
    if misfit := _misfit(wanted, found):
        raise _unusable(file, misfit)


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


log = logging.getLogger("retrain")


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
