"""The sizes of the run that `retrain init` writes, fitted to this machine by a short measurement."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.cli.start import speed as measuring
from retrain.cli.start.first_run import Sizes, Speed, fit
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import RetrainError
from retrain.kernel.types import Tokens
from retrain.text.amounts import counted

KEYS = {
    "training.batch_size": "batch_size",
    "training.group_size": "group_size",
    "training.max_tokens": "max_tokens",
    "training.max_steps": "max_steps",
    "eval.examples": "eval_examples",
    "eval.samples": "eval_samples",
    "eval.every": "eval_every",
}
TOO_LONG_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Values by `table.key`, empty where nothing was measured, the seconds that they take, and both in words."""

    text: str
    values: Mapping[str, int] = field(default_factory=dict)
    times_s: Mapping[str, float] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        """The same for programs."""
        return {"is_measured": bool(self.values), "text": self.text, **self.times_s}


def fit_to_machine(text: str, config: Config, prompts_PT: Sequence[Tokens], *, keep_steps: bool) -> Fitted:
    """Measure the model of the configuration in `text` on some encoded prompts, and fit the sizes of the run.

    Without prompts, because the model is still to be fetched, or where it fails to load, the sizes stay unchanged.
    """
    if not prompts_PT:
        return Fitted(text="unknown until the model is on this machine; then see: retrain capacity --pilot 3")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "retrain.toml"
        file.write_text(text, encoding="utf-8")
        try:
            speed = measuring.measured_speed(file, prompts_PT)
        except RetrainError as error:
            return Fitted(text=f"not measured, because {error.problems[0].what}; see: retrain capacity --pilot 1")
    sizes = fit(Sizes(**{name: config.value(path, 0) for path, name in KEYS.items()}), speed, keep_steps=keep_steps)
    times_s = {
        "run_s": sizes.run_s(speed),
        "training_s": sizes.training_s(speed),
        "evaluation_s": sizes.evaluations_s(speed),
        "first_step_s": sizes.first_step_s(speed),
    }
    values = {path: getattr(sizes, name) for path, name in KEYS.items()}
    return Fitted(text=_in_words(sizes, speed), values=values, times_s=times_s)


def _in_words(sizes: Sizes, speed: Speed) -> str:
    parts = f"training {minutes(sizes.training_s(speed))}, evaluation {minutes(sizes.evaluations_s(speed))}"
    first = f"first step after {minutes(sizes.first_step_s(speed))}"
    words = f"about {minutes(sizes.run_s(speed))} on this machine (measured): {parts}; {first}"
    is_long = sizes.run_s(speed) > TOO_LONG_S
    return f"{words}. Fewer steps, or a smaller model, would end within 30 minutes" if is_long else words


def minutes(seconds: float) -> str:
    """`1 minute`, `22 minutes`, rounded up."""
    return counted(max(1, math.ceil(seconds / 60)), "minute")
