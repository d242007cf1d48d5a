"""The trainer's adapter as engines and PEFT read it: the same tensors, under vLLM's names or PEFT's.

PRIME-RL writes `model.layers.0.self_attn.q_proj.lora_A.weight`, as vLLM reads it. PEFT expects its prefix before that,
and otherwise loads the base model with a warning.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.api import ActionRow, BackendError, Floats, Problem
from retrain_prime_rl.trainer_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Broadcast, safetensors_header

PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# From its layer on, a module has the same name in a checkpoint and in memory; the part before may be renamed.
LAYER = re.compile(r".*?\b(?=(?:layers|blocks|h)\.\d+\.)")
ALIGNMENT = 8  # of the tensors in a safetensors file
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


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
            raise BackendError(Problem(where=str(self.weights.folder), what=what, fix=fix))
        try:
            copy_adapter(self.weights.folder, folder, self.model_path)
        except (OSError, ValueError) as error:
            what = f"the adapter of step {self.weights.step} cannot be copied: {error}"
            fix = "let the trainer keep more than one broadcast"
            raise BackendError(Problem(where=str(self.weights.folder), what=what, fix=fix)) from error

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
            if stream.read(end - first).strip(b"\0"):
                break
        else:
            if factors:
                return  # a new adapter changes nothing anyway
    what = "the adapter would change nothing in PEFT: none of its tensors belongs to a module of the base model"
    why = f"it holds {next(iter(header), 'no tensor')}; the base model is {model_path}"
    fix = "train the model of [model] model, with [model.lora] target_modules that PEFT knows"
    raise BackendError(Problem(where=str(file), what=what, why=why, fix=fix))


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
