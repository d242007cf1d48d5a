"""The trainer's weight broadcasts: `<output_dir>/broadcasts/step_<N>/`, complete once it is marked so.

Step N is the policy after the trainer's first N optimizer steps. The trainer writes step 0, or that of the checkpoint
it resumes from, when it starts, and removes step N - 2 after step N. Up to v0.8 it marks complete weights by `STABLE`.
Since its pull request 3357 (August 2026) it offers a step by `.sender_ready`, writes nothing until that is answered by
`.receiver_ready`, and then marks the beginning by `.started` and the end by `.finished`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROADCASTS = "broadcasts"
COMPLETE = (".finished", "STABLE")  # the marks of newer and older trainers
OFFERED, ANSWERED = ".sender_ready", ".receiver_ready"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_HEADER_BYTES = 2**27


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """A complete set of weights: a PEFT adapter, or the whole model."""

    step: int
    folder: Path
    is_adapter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastStatus:
    """The newest complete broadcast, and the faults of newer ones."""

    newest: Broadcast | None
    faults: tuple[str, ...]


def numbered(folder: Path) -> dict[int, Path]:
    """The folders `step_<N>` in a folder, by number, in ascending order."""
    folders = {path.name.removeprefix("step_"): path for path in folder.glob("step_*") if path.is_dir()}
    return dict(sorted((int(n), path) for n, path in folders.items() if n.isascii() and n.isdecimal()))


def complete(output_dir: Path) -> dict[int, Path]:
    """The marks of the broadcasts that are complete, whatever their files hold, by number, in ascending order."""
    found = numbered(output_dir / BROADCASTS)
    marks = {step: next(filter(Path.exists, map(folder.joinpath, COMPLETE)), None) for step, folder in found.items()}
    return {step: mark for step, mark in marks.items() if mark is not None}


def answer_offers(output_dir: Path) -> None:
    """Tell a trainer that offers weights, and waits, to write them; older trainers offer nothing."""
    for folder in numbered(output_dir / BROADCASTS).values():
        if (folder / OFFERED).exists() and not (folder / ANSWERED).exists():
            with suppress(FileNotFoundError):  # the trainer has just removed the folder
                (folder / ANSWERED).touch()


def newest_broadcast(output_dir: Path) -> BroadcastStatus:
    """The newest complete broadcast. A folder that is not marked so is still being written."""
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
    """The step that the trainer was put back to: it wrote a lower number after the highest; None if it was not."""
    written = {step: mark.stat().st_mtime_ns for step, mark in complete(output_dir).items()}
    newest = max(written, key=lambda step: (written[step], step), default=None)
    return None if newest is None or newest == max(written) else newest


def put_back_fix(step: int) -> str:
    """What to do after the trainer was restarted from its checkpoint of `step`, and files of later steps are there."""
    return (
        "remove the files of later steps from rollouts/ and broadcasts/, and resume the run with "
        f"first_step = {step + 1}; or restart the trainer from its latest checkpoint"
    )


def _fault(folder: Path, *, is_adapter: bool) -> str:
    """Why weights marked as complete cannot be used; empty when nothing is wrong. Tensors are not read."""
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
    """The entries of a safetensors file by tensor, and where their data starts; ValueError if there are none."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        if not 2 <= size <= MAX_HEADER_BYTES:
            raise ValueError(f"{file.name} has no safetensors header")
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size
