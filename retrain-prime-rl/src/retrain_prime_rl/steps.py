"""The number of the trainer's next step: its steps are consecutive, even if ours are skipped or repeated."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from retrain.api import ConfigError, Problem
from retrain_prime_rl.broadcasts import BROADCASTS, STABLE, numbered
from retrain_prime_rl.transport import ROLLOUTS

LEDGER = "retrain_steps.json"
WHERE = "[backend.options] output_dir"


def find_next_step(output_dir: Path, names: Sequence[str], *, first_step: int = -1, resumes: bool = False) -> int:
    """The number of the next batch: one more than the highest ever sent to this folder.

    Derived from the batch files, the broadcast weights, and the ledger, which records what was sent over a socket.
    ConfigError when a new run would continue in the folder of another one, when a step lacks a file of `names`, or when
    `first_step` is given and later steps exist.
    """
    sent, returned = numbered(output_dir / ROLLOUTS), numbered(output_dir / BROADCASTS)
    stable = [step for step, folder in returned.items() if (folder / STABLE).exists()]
    if first_step >= 0:
        _refuse_later(first_step, sent, {step: returned[step] for step in returned if step > first_step})
        return first_step
    if sent:
        _refuse_holes(sent[max(sent)], names)
    found = max([0, _ledger(output_dir), *(step + 1 for step in sent), *stable])
    if found and not resumes:
        what = f"{output_dir} belongs to an earlier run: its trainer was sent {found} steps"
        fix = f"empty it and restart the trainer, resume that run, or set first_step = {found} to keep its weights"
        raise ConfigError(Problem(where=WHERE, what=what, why="a trainer would read the old batches", fix=fix))
    return found


def record(output_dir: Path, next_step: int) -> None:
    """Record what has been sent, so that a run over a socket can be resumed."""
    draft = output_dir / f".{LEDGER}.tmp"
    draft.write_text(json.dumps({"next_step": next_step}), encoding="utf-8")
    os.replace(draft, output_dir / LEDGER)


def _ledger(output_dir: Path) -> int:
    file = output_dir / LEDGER
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["next_step"])
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "remove it and set first_step to the step that the trainer waits for"
        raise ConfigError(Problem(where=str(file), what=what, fix=fix)) from error


def _refuse_holes(newest: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (newest / name).is_file()]
    if missing:
        what = f"lacks {', '.join(missing)}, which the trainer is waiting for"
        fix = "remove this folder, or set data_world_size and wire as they were when it was written"
        raise ConfigError(Problem(where=str(newest), what=what, fix=fix))


def _refuse_later(first_step: int, sent: dict[int, Path], returned: dict[int, Path]) -> None:
    later = [path for step, path in sent.items() if step >= first_step] + list(returned.values())
    if later:
        what = f"first_step = {first_step}, but {len(later)} folders of later steps exist, such as {later[0]}"
        fix = "restart the trainer from its checkpoint of that step, then remove them"
        raise ConfigError(Problem(where="[backend.options] first_step", what=what, fix=fix))
