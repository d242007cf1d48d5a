"""PRIME-RL's own `train()` as a process, on a CPU: `python -m tests.prime_rl.trainer_process TRAINER_TOML`.

Several ranks are started as torchrun starts them, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Everything is the
checkout's code; what differs from a GPU is set here: the device, gloo, float32 in forward passes, and PyTorch's own
attention.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tests.prime_rl.checkout import theirs

CUDA_CALLS = {
    "set_device": None,
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "synchronize": None,
    "max_memory_reserved": 0,
    "current_device": 0,
}


class OnCpu(TorchFunctionMode):
    """Every call that names a CUDA device gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def main() -> None:
    settings = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _replace_device()
    config = theirs("prime_rl.configs.trainer").TrainerConfig.model_validate(settings)
    vars(config.model).update(attn="sdpa", impl="hf", compile=None, ac_offloading=None)  # its own choices need a GPU
    train = theirs("prime_rl.trainer.rl.train")
    theirs("prime_rl.trainer.parallel_dims").device_type = "cpu"
    model = theirs("prime_rl.trainer.model")
    policy = model.MixedPrecisionPolicy
    model.MixedPrecisionPolicy = lambda **options: policy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    theirs("prime_rl.trainer.utils").torch_clip_grad_norm_ = _clip_grad_norm
    theirs("prime_rl.trainer.perf").PerfCounter.get_step_mfu = lambda *_: 0.0  # the share of a GPU's peak
    with OnCpu():
        train.train(config)


def _clip_grad_norm(parameters: Any, *, max_norm: float, ep_enabled: bool) -> torch.Tensor:
    """In place of torchtitan's, which is PyTorch's with a gathered norm."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _replace_device() -> None:
    for name, answer in CUDA_CALLS.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    rope = Qwen3RotaryEmbedding.compute_default_rope_parameters  # in later Transformers without a device
    Qwen3RotaryEmbedding.compute_default_rope_parameters = staticmethod(lambda config, *_: rope(config))
    start = dist.init_process_group
    dist.init_process_group = lambda **options: start(backend="gloo", timeout=options["timeout"])


if __name__ == "__main__":
    main()
