"""The trainer's folder: the weights that it broadcasts, the steps that it was sent, and the policy as last published.

Weights are in `<output_dir>/broadcasts/step_<N>/`, complete once they are marked so. Step N is the policy after the
trainer's first N optimizer steps. The trainer writes step 0, or the step it resumes from, when it starts, and removes
step N - 2 after step N. Up to v0.8 it marks complete weights by `STABLE`. Since its pull request 3357 (August 2026) it
offers a step by `.sender_ready`, writes nothing until that is answered by `.receiver_ready`, and then marks the
beginning by `.started` and the end by `.finished`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.api import ActionRow, BackendError, ConfigError, Floats, Problem

BROADCASTS = "broadcasts"
ROLLOUTS, BATCHES = "rollouts", "batches"  # the folder of batches up to v0.8, and of newer trainers
COMPLETE = (".finished", "STABLE")  # the marks of newer and older trainers
OFFERED, ANSWERED = ".sender_ready", ".receiver_ready"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# A larger size is not the size of a header, but the beginning of a torn file.
MAX_HEADER_BYTES = 2**27
LEDGER = "retrain_steps.json"
SENT = "steps_sent"
WHERE = "[backend.options] output_dir"
CHECKPOINTS = "checkpoints"
PUT_BACK = (
    "restart the trainer from its latest checkpoint, or remove the files of later steps from rollouts/ and broadcasts/ "
    "and resume the run with first_step = "
)
# Written by PRIME-RL's own orchestrator up to 0.8.0 into each `run_*` folder that its trainer looks for.
OLD_RUNS = "run_*/control/orch.toml"
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# From its layer on, a module has the same name in a checkpoint and in memory; the part before may be renamed.
LAYER = re.compile(r".*?\b(?=(?:layers|blocks|h)\.\d+\.)")
ALIGNMENT = 8  # of the tensors in a safetensors file
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """A complete set of weights: a PEFT adapter, or the whole model."""

    step: int
    folder: Path
    is_adapter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatus:
    newest: Broadcast | None
    faults: tuple[str, ...]


def numbered(folder: Path) -> dict[int, Path]:
    folders = {path.name.removeprefix("step_"): path for path in folder.glob("step_*") if path.is_dir()}
    return dict(sorted((int(n), path) for n, path in folders.items() if n.isascii() and n.isdecimal()))


def complete(output_dir: Path) -> dict[int, Path]:
    """Return the marks of the complete broadcasts, whatever their files hold, by number, in ascending order."""
    found = numbered(output_dir / BROADCASTS)
    marks = {step: next(filter(Path.exists, map(folder.joinpath, COMPLETE)), None) for step, folder in found.items()}
    return {step: mark for step, mark in marks.items() if mark is not None}


def answer_offers(output_dir: Path) -> None:
    """Accept the weights that a trainer offers and waits with; older trainers offer nothing."""
    for folder in numbered(output_dir / BROADCASTS).values():
        if (folder / OFFERED).exists() and not (folder / ANSWERED).exists():
            # The trainer may remove the folder between the two calls.
            with suppress(FileNotFoundError):
                (folder / ANSWERED).touch()


def newest_broadcast(output_dir: Path) -> BroadcastStatus:
    """Return the newest complete broadcast. A folder without the mark is still being written."""
    faults: list[str] = []
    for step, mark in reversed(complete(output_dir).items()):
        folder = mark.parent
        is_adapter = (folder / ADAPTER_CONFIG).exists()
        fault = _fault(folder, is_adapter=is_adapter)
        if not fault:
            newest = Broadcast(step=step, folder=folder, is_adapter=is_adapter)
            return BroadcastStatus(newest=newest, faults=tuple(faults))
        faults.append(f"{folder}: {fault}")
    return BroadcastStatus(newest=None, faults=tuple(faults))


def wait_for(
    output_dir: Path, step: int, *, wait_s: float, poll_s: float, meanwhile: Callable[[], None] = lambda: None
) -> BroadcastStatus:
    """Poll every `poll_s` seconds for a complete broadcast of `step` or later, for at most `wait_s` seconds.

    Offers are answered meanwhile. A fault may be transient: on a network disk the mark can become visible before the
    other files.
    """
    deadline = time.monotonic() + wait_s
    while True:
        meanwhile()
        answer_offers(output_dir)
        status = newest_broadcast(output_dir)
        remaining_s = deadline - time.monotonic()
        if (status.newest is not None and status.newest.step >= step) or remaining_s <= 0.0:
            return status
        time.sleep(min(poll_s, remaining_s))


def put_back(output_dir: Path) -> int | None:
    """Return the step that the trainer was put back to: it wrote that after a higher one. None otherwise."""
    written = {step: mark.stat().st_mtime_ns for step, mark in complete(output_dir).items()}
    # On a disk with a coarse clock several have the same time; then the later step counts.
    newest = max(written, key=lambda step: (written[step], step), default=None)
    return None if newest is None or newest == max(written) else newest


def _fault(folder: Path, *, is_adapter: bool) -> str:
    """Return why weights marked as complete cannot be used, or "". Tensors are not read."""
    try:
        if is_adapter and not isinstance(json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")), dict):
            return f"{ADAPTER_CONFIG} is not a JSON object"
        files = [folder / ADAPTER_WEIGHTS] if is_adapter else sorted(folder.glob("*.safetensors"))
        for file in files:
            header, start = safetensors_header(file)
            wanted = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if wanted != (size := file.stat().st_size):
                return f"{file.name} has {size} bytes and should have {wanted}"
        return "" if files else "it holds no safetensors file"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def safetensors_header(file: Path) -> tuple[dict[str, dict[str, Any]], int]:
    """Return the entries of a safetensors file by tensor, and where their data starts; ValueError without a header."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def find_sent(
    output_dir: Path, names: Sequence[str], *, first: int, first_step: int = -1, resumes: bool = False
) -> int:
    """Return the number of steps sent to the trainer of this folder; the next one is number `first` plus that.

    Derived from the batch files, the broadcast weights, and the ledger of steps sent over a socket. `first_step`, if
    given, is the step that the trainer waits for. ConfigError when a new run would continue in the folder of another
    one, when a step that the trainer has yet to read lacks a file of `names`, or when `first_step` is given and later
    steps exist.
    """
    files, version = numbered(output_dir / ROLLOUTS), max(complete(output_dir), default=0)
    waits_for = version + first
    if first_step >= 0:
        later = [path for step, path in files.items() if step >= first_step]
        if waits_for > first_step:
            later.append(output_dir / BROADCASTS)
        if later:
            what = f"first_step = {first_step}, but files of later steps exist, such as {later[0]}"
            fix = (
                "leave first_step out if the trainer has gone on; otherwise restart it from its checkpoint of step "
                f"{first_step - 1} and remove the files of later steps in rollouts/ and broadcasts/"
            )
            where = "[backend.options] first_step"
            raise ConfigError(Problem(code="prime-rl.later-steps", where=where, what=what, fix=fix))
        return first_step - first
    if (step := put_back(output_dir)) is not None:
        what = f"the trainer was put back to step {step}: it has written that step after all others"
        where, fix = str(output_dir / BROADCASTS), f"{PUT_BACK}{step + 1}"
        raise ConfigError(Problem(code="prime-rl.trainer-put-back", where=where, what=what, fix=fix))
    # all steps from the one that the trainer waits for must be there; those before it may have been removed
    for step in range(max(waits_for, min(files, default=0)), max(files, default=-1) + 1):
        folder = output_dir / ROLLOUTS / f"step_{step}"
        if missing := [name for name in names if not (folder / name).is_file()]:
            what = f"lacks {', '.join(missing)}, and the trainer is waiting for it"
            fix = "remove this folder and all later ones, or restore the earlier data_world_size and wire"
            raise ConfigError(Problem(code="prime-rl.incomplete-batch", where=str(folder), what=what, fix=fix))
    found = max([0, _ledger(output_dir), version, *(step + 1 - first for step in files)])
    if found and not resumes:
        what = f"{output_dir} belongs to an earlier run: its trainer was sent {found} steps"
        own = f"first_step = {found + first}, the step that the trainer waits for, to keep its weights"
        fix = f"empty it and restart the trainer, resume that run, or set {own}"
        why = "a trainer would read the old batches"
        raise ConfigError(Problem(code="prime-rl.folder-in-use", where=WHERE, what=what, why=why, fix=fix))
    return found


def record(output_dir: Path, sent: int) -> None:
    # By a rename, so that a kill leaves the old number or the new one.
    draft = output_dir / f".{LEDGER}.tmp"
    draft.write_text(json.dumps({SENT: sent}), encoding="utf-8")
    os.replace(draft, output_dir / LEDGER)


def last_needless(output_dir: Path, version: int) -> int:
    """Return how many first steps no trainer of this folder will read again, once it has written weights of `version`.

    Restarted from its newest checkpoint, it reads the steps after that one again; the last step is always kept.
    """
    checkpoints = numbered(output_dir / CHECKPOINTS)
    complete = [step for step, folder in checkpoints.items() if (folder / "trainer" / ".metadata").is_file()]
    return max(0, min(version - 1, max(complete, default=version)))


def refuse_other_trainer(output_dir: Path, wire: str) -> None:
    """Raise ConfigError if a trainer of 0.8.0 or before would not read the wire, or one of 0.5 would not look here."""
    found = next(iter(output_dir.glob(OLD_RUNS)), None)
    if wire == "per_token" and found is not None:
        what = f"{found} is of PRIME-RL 0.8.0 or earlier, whose trainer does not read these batches"
        fix = 'install PRIME-RL v0.8.1.dev3 or later; with 0.4 or 0.5 set wire = "scalar"'
        raise ConfigError(Problem(code="prime-rl.old-trainer", where=WHERE, what=what, fix=fix))
    if wire == "scalar" and output_dir / "control" / "orch.toml" not in output_dir.parent.glob(OLD_RUNS):
        what = f"a trainer of PRIME-RL 0.4 or 0.5 does not look for batches in {output_dir}"
        why = f"it takes them from the folders of {OLD_RUNS}, an orchestrator's configuration, in its own output_dir"
        fix = "set output_dir to such a folder run_NAME in the trainer's output_dir"
        raise ConfigError(Problem(code="prime-rl.other-folder", where=WHERE, what=what, why=why, fix=fix))


def _ledger(output_dir: Path) -> int:
    file = output_dir / LEDGER
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))[SENT]) if file.exists() else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "remove it and set first_step to the step that the trainer waits for"
        raise ConfigError(Problem(code="prime-rl.unreadable-ledger", where=str(file), what=what, fix=fix)) from error


@dataclass(slots=True, kw_only=True, eq=False)
class RemotePolicy:
    """The published policy, a `retrain.api.Policy`; `weights` is its broadcast, None before any step."""

    model_path: str
    stop_ids: frozenset[int]
    context_limit: int | None
    version: int = 0
    weights: Broadcast | None = None

    def save_adapter(self, folder: Path) -> None:
        """Copy the trainer's adapter under PEFT's names; nothing before its first step.

        BackendError when the trainer writes full weights, the adapter has been removed, or would change nothing.
        """
        if self.weights is None:
            return
        if not self.weights.is_adapter:
            what = "there is no adapter: the trainer trains all weights"
            fix = "set LoRA in the trainer's configuration, or take the weights from its own checkpoints"
            raise BackendError(Problem(code="prime-rl.no-adapter", where=str(self.weights.folder), what=what, fix=fix))
        try:
            copy_adapter(self.weights.folder, folder, self.model_path)
        except (OSError, ValueError) as error:
            what = f"the adapter of step {self.weights.step} cannot be copied: {error}"
            fix = "let the trainer keep more than one broadcast"
            where = str(self.weights.folder)
            raise BackendError(Problem(code="prime-rl.adapter-not-copied", where=where, what=what, fix=fix)) from error

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats] | None:
        return None


def stop_ids(path: str, tokenizer: Any) -> frozenset[int]:
    from transformers import GenerationConfig  # slow to import

    try:
        configured = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError):  # many models come without one
        configured = None
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(id_) for id_ in [*ids, tokenizer.eos_token_id] if id_ is not None)


def copy_adapter(source: Path, target: Path, model_path: str) -> None:
    """Write the adapter in `source` into the existing folder `target` under PEFT's names.

    PRIME-RL writes `model.layers.0.self_attn.q_proj.lora_A.weight`, as vLLM reads it. PEFT expects its prefix before
    that, and otherwise loads the base model with a warning.

    OSError or ValueError when a file cannot be read or written. BackendError when no factor belongs to a module of the
    base model (where its files are on this machine) although B is no longer 0: PEFT would load it and change nothing.
    """
    file = source / ADAPTER_WEIGHTS
    header, start = safetensors_header(file)
    _refuse_without_effect(file, header, start, model_path)
    named = {f"{PREFIX}{name.removeprefix(PREFIX)}": entry for name, entry in header.items()}
    content = json.dumps({"__metadata__": {"format": "pt"}, **named}, separators=(",", ":")).encode()
    content += b" " * (-len(content) % ALIGNMENT)
    with file.open("rb") as old, (target / ADAPTER_WEIGHTS).open("wb") as new:
        new.write(len(content).to_bytes(8, "little") + content)
        old.seek(start)
        shutil.copyfileobj(old, new)
    shutil.copyfile(source / ADAPTER_CONFIG, target / ADAPTER_CONFIG)


def _refuse_without_effect(file: Path, header: Mapping[str, Any], start: int, model_path: str) -> None:
    factors = {name: found for name in header if (found := FACTOR.fullmatch(name.removeprefix(PREFIX)))}
    modules = {LAYER.sub("", found["module"]) for found in factors.values()}
    base = {LAYER.sub("", name).removesuffix(".weight") for name in base_names(model_path)}
    if modules and (not base or modules & base):
        return
    with file.open("rb") as stream:
        for name in (name for name in factors if "lora_B" in name):
            first, end = header[name]["data_offsets"]
            stream.seek(start + first)
            # B is zero until the first update.
            if stream.read(end - first).strip(b"\0"):
                break
        else:
            if factors:
                # A new adapter has B = 0 and changes nothing under any name.
                return
    what = "the adapter would change nothing in PEFT: none of its tensors belongs to a module of the base model"
    why = f"it holds {next(iter(header), 'no tensor')}; the base model is {model_path}"
    fix = "train the model of [model] model, with [model.lora] target_modules that PEFT knows"
    raise BackendError(Problem(code="prime-rl.adapter-without-effect", where=str(file), what=what, why=why, fix=fix))


def base_names(model_path: str) -> list[str]:
    """Return the names of the base model's tensors, from its folder or the hub's cache; empty when it is not here."""
    from transformers.utils import cached_file  # slow to import

    for name in (INDEX, WEIGHTS):
        with suppress(OSError, ValueError, KeyError):
            file = Path(cached_file(model_path, name, local_files_only=True))
            if name == INDEX:
                return list(json.loads(file.read_text(encoding="utf-8"))["weight_map"])
            return list(safetensors_header(file)[0])
    return []
