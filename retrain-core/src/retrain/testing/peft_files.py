"""The files of a PEFT adapter: writes a toy one, and checks those that a backend wrote."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from retrain.testing.check import expect

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


def write_toy_adapter(folder: Path) -> None:
    """An adapter of rank 2 on one layer."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    tensors = {f"{LAYER}.lora_A.weight": np.ones((2, 8), "f4"), f"{LAYER}.lora_B.weight": np.zeros((8, 2), "f4")}
    save_file(tensors, folder / WEIGHTS)


def expect_peft_files(folder: Path) -> None:
    """Expect configuration and weights that PEFT, vLLM and SGLang can read, and nothing that needs unpickling."""
    why = "PEFT, inference servers, squeeze and the hub read exactly these two files"
    fix = "write what peft's save_pretrained(folder, safe_serialization=True) writes"
    found = sorted(path.name for path in folder.rglob("*"))
    for name in (CONFIG, WEIGHTS):
        expect((folder / name).is_file(), f"save_adapter wrote {found}, and no {name}", why=why, fix=fix)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        rank = config["r"] if config["peft_type"] == "LORA" else 1
    except (ValueError, KeyError, TypeError) as error:
        expect(False, f"{CONFIG} is not a PEFT configuration: {error!r}", why=why, fix=fix)
        return
    expect(isinstance(rank, int) and rank > 0, f"{CONFIG} has r = {rank!r}", why=why, fix=fix)
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            names = list(file.keys())
    except (SafetensorError, OSError) as error:
        expect(False, f"{WEIGHTS} cannot be read: {error}", why=why, fix=fix)
        return
    expect(names, f"{WEIGHTS} contains no tensor", why=why, fix=fix)
    expect(
        all(".lora_" in name for name in names) or config["peft_type"] != "LORA",
        f"{WEIGHTS} contains {names[:2]}, which are not tensors of a LoRA adapter",
        why=why,
        fix=fix,
    )
