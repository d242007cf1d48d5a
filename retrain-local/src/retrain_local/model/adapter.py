"""LoRA matrices: one A and one B per linear layer except the head, named and initialised as PEFT does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from retrain_local.model.weights import Linear

PREFIX, ADAPTER = "base_model.model.", "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Settings of the adapter; `name` is the base in adapter_config.json.

    `rslora` divides alpha by the root of the rank (arXiv:2312.03732), `dora` trains magnitudes too (arXiv:2402.09353);
    `targets` names the layers as `[lora] targets` does.
    """

    rank: int
    alpha: int
    seed: int = 0
    name: str = ""
    targets: tuple[str, ...] = ("all-linear",)
    rslora: bool = False
    dora: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """The sum that the fused matrices of a `Linear` get: scale B_p A_p for part p.

    `a` [parts x rank, inputs] and `b` [sum of outputs, rank] are the memory of all parts. `parts_a` and `parts_b`, the
    trained tensors, are views of it, one pair for each original matrix.
    """

    a: Tensor
    b: Tensor
    parts_a: tuple[Tensor, ...]
    parts_b: tuple[Tensor, ...]
    scale: float
    linear: Linear

    @property
    def rank(self) -> int:
        return int(self.b.shape[1])

    def named(self) -> dict[str, nn.Parameter]:
        found = {}
        for name, a, b in zip(self.linear.names, self.parts_a, self.parts_b, strict=True):
            assert isinstance(a, nn.Parameter)
            assert isinstance(b, nn.Parameter)
            found[f"{PREFIX}{name}.lora_A.{ADAPTER}.weight"] = a
            found[f"{PREFIX}{name}.lora_B.{ADAPTER}.weight"] = b
        return found

    def copied(self) -> Adapter:
        """Return a copy without a gradient."""
        a, b = self.a.detach().clone(), self.b.detach().clone()
        return replace(self, a=a, b=b, parts_a=a.split(self.rank), parts_b=b.split(self.linear.sizes))

    def holding(self, tensors: Mapping[str, Tensor]) -> Adapter:
        """Return the adapter with other values, by their names in adapter_model.safetensors."""
        parts_a = tuple(tensors[f"{PREFIX}{name}.lora_A.weight"] for name in self.linear.names)
        parts_b = tuple(tensors[f"{PREFIX}{name}.lora_B.weight"] for name in self.linear.names)
        return replace(self, a=torch.cat(parts_a), b=torch.cat(parts_b), parts_a=parts_a, parts_b=parts_b)


def create_adapters(linears: Iterable[Linear], lora: Lora) -> list[Adapter]:
    """Create an adapter for each, in fp32 on the device of its matrices; A depends on the seed only and B is zero."""
    generator, rank = torch.Generator().manual_seed(lora.seed), lora.rank
    adapters = []
    for linear in linears:
        inputs, device = linear.weight.shape[1], linear.weight.device
        sampled = []
        for outputs in linear.sizes:
            # PEFT's numbers: each of its layers initialises two linear layers, before A gets its values
            torch.empty(rank, inputs).uniform_(generator=generator)
            torch.empty(outputs, rank).uniform_(generator=generator)
            # kaiming_uniform with a = sqrt(5), as PEFT initialises A.
            bound = math.sqrt(3.0) * math.sqrt(2.0 / 6.0) / math.sqrt(inputs)
            sampled.append(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        a, b = torch.cat(sampled).to(device), torch.zeros(sum(linear.sizes), rank, device=device)
        adapters.append(
            Adapter(
                a=a,
                b=b,
                parts_a=tuple(nn.Parameter(part) for part in a.split(rank)),
                parts_b=tuple(nn.Parameter(part) for part in b.split(linear.sizes)),
                scale=lora.alpha / (math.sqrt(rank) if lora.rslora else rank),
                linear=linear,
            )
        )
    return adapters


def merged(adapter: Adapter, frozen: Tensor) -> Tensor:
    """Return frozen + scale B A of every part."""
    out, sizes = torch.empty_like(frozen), adapter.linear.sizes
    parts = zip(out.split(sizes), frozen.split(sizes), adapter.parts_a, adapter.parts_b, strict=True)
    for rows, before, a, b in parts:
        a, b = a.detach().to(out.device), b.detach().to(out.device)
        torch.addmm(before, b, a, alpha=adapter.scale, out=rows)
    return out


def file_names(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the same parameters by their names in adapter_model.safetensors."""
    # DoRA's magnitudes: PEFT's files have their names without an ending.
    magnitude = f".lora_magnitude_vector.{ADAPTER}.weight"
    names = {name: name.replace(magnitude, ".lora_magnitude_vector") for name in sorted(parameters)}
    return {file_name.replace(f".{ADAPTER}.", "."): parameters[name] for name, file_name in names.items()}


def adapter_config(names: Iterable[str], lora: Lora, *, fan_in_fan_out: bool = False) -> dict[str, Any]:
    return {
        "base_model_name_or_path": lora.name,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(set(names)),
        "task_type": "CAUSAL_LM",
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    }
