"""How many steps the trainer has been sent: its steps are consecutive, even if ours are skipped or repeated.

The trainer numbers its steps itself: from 1 on the per-token wire, from 0 on the older one (`first` here). Version N of
the policy has N steps in it on both, so step number `first + N` makes version N + 1 of version N.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from retrain.api import ConfigError, Problem
from retrain_prime_rl.broadcasts import BROADCASTS, complete, numbered, put_back, put_back_fix
from retrain_prime_rl.transport import ROLLOUTS

LEDGER = "retrain_steps.json"
SENT = "steps_sent"
WHERE = "[backend.options] output_dir"
# Written by PRIME-RL's own orchestrator up to 0.8.0 into each `run_*` folder that its trainer looks for.
CHECKPOINTS = "checkpoints"
OLD_RUNS = "run_*/control/orch.toml"


def find_sent(
    output_dir: Path, names: Sequence[str], *, first: int, first_step: int = -1, resumes: bool = False
) -> int:
    """The number of steps sent to the trainer of this folder; the next one is number `first` plus that.

    Derived from the batch files, the broadcast weights, and the ledger, which records what was sent over a socket.
    `first_step`, if it is given, is the number of the step that the trainer waits for. ConfigError when a new run would
    continue in the folder of another one, when a step that the trainer has yet to read lacks a file of `names`, or when
    `first_step` is given and later steps exist.
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
            raise ConfigError(Problem(where="[backend.options] first_step", what=what, fix=fix))
        return first_step - first
    if (step := put_back(output_dir)) is not None:
        what = f"the trainer was put back to step {step}: it has written that step after all others"
        raise ConfigError(Problem(where=str(output_dir / BROADCASTS), what=what, fix=put_back_fix(step)))
    # all steps from the one that the trainer waits for must be there; those before it may have been removed
    for step in range(max(waits_for, min(files, default=0)), max(files, default=-1) + 1):
        folder = output_dir / ROLLOUTS / f"step_{step}"
        if missing := [name for name in names if not (folder / name).is_file()]:
            what = f"lacks {', '.join(missing)}, which the trainer is waiting for"
            fix = "remove this folder and those of later steps, or restore the earlier data_world_size and wire"
            raise ConfigError(Problem(where=str(folder), what=what, fix=fix))
    found = max([0, _ledger(output_dir), version, *(step + 1 - first for step in files)])
    if found and not resumes:
        what = f"{output_dir} belongs to an earlier run: its trainer was sent {found} steps"
        own = f"first_step = {found + first}, the step that the trainer waits for, to keep its weights"
        fix = f"empty it and restart the trainer, resume that run, or set {own}"
        raise ConfigError(Problem(where=WHERE, what=what, why="a trainer would read the old batches", fix=fix))
    return found


def record(output_dir: Path, sent: int) -> None:
    """Record how many steps have been sent, so that a run over a socket can be resumed."""
    draft = output_dir / f".{LEDGER}.tmp"
    draft.write_text(json.dumps({SENT: sent}), encoding="utf-8")
    os.replace(draft, output_dir / LEDGER)


def last_needless(output_dir: Path, version: int) -> int:
    """How many of the first steps no trainer of this folder will read again, once it has written weights of `version`.

    Restarted from its newest checkpoint, it reads the steps after that one again; the last step is always kept.
    """
    checkpoints = numbered(output_dir / CHECKPOINTS)
    complete = [step for step, folder in checkpoints.items() if (folder / "trainer" / ".metadata").is_file()]
    return max(0, min(version - 1, max(complete, default=version)))


def refuse_other_trainer(output_dir: Path, wire: str) -> None:
    """ConfigError where a trainer of 0.8.0 or before would not read the per-token wire, or one of 0.5 not look here."""
    found = next(iter(output_dir.glob(OLD_RUNS)), None)
    if wire == "per_token" and found is not None:
        what = f"{found} is of PRIME-RL 0.8.0 or earlier, whose trainer does not read these batches"
        fix = 'install PRIME-RL v0.8.1.dev3 or later; with 0.4 or 0.5 set wire = "scalar"'
        raise ConfigError(Problem(where=WHERE, what=what, fix=fix))
    if wire == "scalar" and output_dir / "control" / "orch.toml" not in output_dir.parent.glob(OLD_RUNS):
        what = f"a trainer of PRIME-RL 0.4 or 0.5 does not look for batches in {output_dir}"
        why = f"it takes them from the folders of {OLD_RUNS}, an orchestrator's configuration, in its own output_dir"
        fix = "set output_dir to such a folder run_NAME in the trainer's output_dir"
        raise ConfigError(Problem(where=WHERE, what=what, why=why, fix=fix))


def _ledger(output_dir: Path) -> int:
    file = output_dir / LEDGER
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))[SENT]) if file.exists() else 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"cannot be read: {type(error).__name__}: {error}"
        fix = "remove it and set first_step to the step that the trainer waits for"
        raise ConfigError(Problem(where=str(file), what=what, fix=fix)) from error
