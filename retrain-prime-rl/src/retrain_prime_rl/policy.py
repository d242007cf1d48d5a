"""The policy as this backend shares it with the engine that samples for it: its weights are on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.api import ActionRow, BackendError, Floats, PluginContext, Problem
from retrain_prime_rl.adapter_files import copy_adapter
from retrain_prime_rl.broadcasts import Broadcast


@dataclass(slots=True, kw_only=True, eq=False)
class RemotePolicy:
    """The policy as last published, a `retrain.api.Policy`; `weights` is its broadcast, None before any step."""

    model_path: str
    stop_ids: frozenset[int]
    context_limit: int | None
    version: int = 0
    weights: Broadcast | None = None

    def save_adapter(self, folder: Path) -> None:
        """Copy the adapter that the trainer wrote, under PEFT's names; nothing before its first step.

        BackendError when the trainer writes full weights, the adapter has been removed, or would change nothing.
        """
        if self.weights is None:
            return
        if not self.weights.is_adapter:
            what = "there is no adapter: the trainer trains all weights"
            fix = "set LoRA in the trainer's configuration, or take the weights from its own checkpoints"
            raise BackendError(Problem(where=str(self.weights.folder), what=what, fix=fix))
        try:
            copy_adapter(self.weights.folder, folder, self.model_path)
        except (OSError, ValueError) as error:
            what = f"the adapter of step {self.weights.step} cannot be copied: {error}"
            fix = "let the trainer keep more than one broadcast"
            raise BackendError(Problem(where=str(self.weights.folder), what=what, fix=fix)) from error

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats] | None:
        """None: the training model is in the trainer's process."""
        return None


def model_path(context: PluginContext) -> str:
    """The base model as a server loads it: the folder of a model shipped by a plugin, else as configured."""
    name = context.config.model.model
    return context.plugins.locate_model(name) or name


def stop_ids(path: str, tokenizer: Any) -> frozenset[int]:
    """Every end-of-sequence id of the model's generation config, if it has one, and the tokenizer's."""
    from transformers import GenerationConfig  # slow to import

    try:
        configured = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError):  # many models come without one
        configured = None
    ids = configured if isinstance(configured, list | tuple) else [configured]
    return frozenset(int(id_) for id_ in [*ids, tokenizer.eos_token_id] if id_ is not None)
