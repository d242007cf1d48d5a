"""Why the weights of a step have not come back, from what lies on disk: what the trainer has done and waits for."""

from __future__ import annotations

from pathlib import Path

from retrain_prime_rl.broadcasts import BROADCASTS, COMPLETE, BroadcastStatus, put_back, put_back_fix
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.transport import ROLLOUTS

SLOW = "raise sync_wait_s if it is only slow, then resume the run"


def missing_weights(output_dir: Path, sent: int, options: PrimeRlOptions, status: BroadcastStatus) -> tuple[str, str]:
    """The reason and the smallest fix, for weights with `sent` steps in them that did not come in time."""
    if status.faults:
        return "; ".join(status.faults), f"check that disk; {SLOW}"
    if (output_dir / BROADCASTS / f"step_{sent}").is_dir():
        why = f"step_{sent} is there, but neither {' nor '.join(COMPLETE)} is: it is still being written"
        return why, SLOW
    if status.newest is None:
        why = "nothing is there, and a trainer that has this output_dir writes step_0 before it reads a batch"
        return why, (
            "start the trainer, of PRIME-RL v0.8.1.dev3 or later, with this output_dir and "
            '[weight_broadcast] type = "filesystem"'
        )
    if (step := put_back(output_dir)) is not None:
        return f"the trainer was put back to step {step}, which was written after all others", put_back_fix(step)
    has = status.newest.step
    waits_for = options.counts_from + has
    if options.transport == "zmq":
        why = f"the newest complete ones have {has}: step {waits_for} was sent to every data rank, and is not done"
        fix = f"check the trainer's log; {SLOW} (with first_step = {waits_for} if it has lost that step)"
        return why, fix
    file = output_dir / ROLLOUTS / f"step_{waits_for}"
    if not file.is_dir():
        why = f"the newest complete ones have {has}, so the trainer waits for {file}, which is not there"
        return why, f"resume the run with first_step = {waits_for}"
    why = f"the newest complete ones have {has}: the trainer should be at work on {file}, which is there"
    fix = (
        'check its log; if it waits for a batch, set [rollout_transport] type = "filesystem" in its TOML (its own '
        f"default is zmq); {SLOW}"
    )
    return why, fix
