"""`[deadlines]`: how long each phase of a run may take."""

from __future__ import annotations

from retrain.kernel.config.keys import Table, key


class DeadlinesTable(Table):
    """How long each phase may take; 0 = no limit."""

    sampling_s: float = key(0.0, "Seconds that sampling a step may take.", ge=0.0, free_on_resume=True)
    scoring_s: float = key(0.0, "Seconds that scoring a step may take.", ge=0.0, free_on_resume=True)
    training_s: float = key(0.0, "Seconds that an optimizer step may take.", ge=0.0, free_on_resume=True)
    eval_s: float = key(0.0, "Seconds that an evaluation may take.", ge=0.0, free_on_resume=True)
    checkpoint_s: float = key(0.0, "Seconds that writing a checkpoint may take.", ge=0.0, free_on_resume=True)
    heartbeat_s: float = key(
        10.0, "Seconds between two writes of heartbeat.json; 0 = never.", ge=0.0, free_on_resume=True
    )
