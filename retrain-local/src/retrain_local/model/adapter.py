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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """What is added to the fused matrices of a `Linear`: part p gets scale B_p A_p.

    `a` [parts x rank, inputs] and `b` [sum of outputs, rank] are the memory of all parts; `parts_a` and `parts_b` are
    views of it, one pair for each original matrix, and these are what is trained.
    """

    a: Tensor
    b: Tensor
    parts_a: tuple[Tensor, ...]
    parts_b: tuple[Tensor, ...]
    scale: float
    linear: Linear

    @property
    def rank(self) -> int:
        """Rows of each A."""
        return int(self.b.shape[1])

    def named(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by PEFT's names."""
        found = {}
        for name, a, b in zip(self.linear.names, self.parts_a, self.parts_b, strict=True):
            assert isinstance(a, nn.Parameter)
            assert isinstance(b, nn.Parameter)
            found[f"{PREFIX}{name}.lora_A.{ADAPTER}.weight"] = a
            found[f"{PREFIX}{name}.lora_B.{ADAPTER}.weight"] = b
        return found

    def copied(self) -> Adapter:
        """The same numbers in memory of their own, with no gradient."""
        a, b = self.a.detach().clone(), self.b.detach().clone()
        return replace(self, a=a, b=b, parts_a=a.split(self.rank), parts_b=b.split(self.linear.sizes))

    def holding(self, tensors: Mapping[str, Tensor]) -> Adapter:
        """The same adapter with other values, given by their names in adapter_model.safetensors."""
        parts_a = tuple(tensors[f"{PREFIX}{name}.lora_A.weight"] for name in self.linear.names)
        parts_b = tuple(tensors[f"{PREFIX}{name}.lora_B.weight"] for name in self.linear.names)
        return replace(self, a=torch.cat(parts_a), b=torch.cat(parts_b), parts_a=parts_a, parts_b=parts_b)


def create_adapters(
    linears: Iterable[Linear], *, rank: int, alpha: int, seed: int, rslora: bool = False
) -> list[Adapter]:
    """An adapter for each, in fp32 on the device of its matrices; A is drawn from `seed` alone and B is zero.

    The numbers are those that PEFT draws after `torch.manual_seed(seed)`: each of its layers makes two linear layers,
    whose own initialisation is drawn and thrown away, before A gets its values.
    """
    generator = torch.Generator().manual_seed(seed)
    adapters = []
    for linear in linears:
        inputs, device = linear.weight.shape[1], linear.weight.device
        drawn = []
        for outputs in linear.sizes:
            torch.empty(rank, inputs).uniform_(generator=generator)
            torch.empty(outputs, rank).uniform_(generator=generator)
            bound = math.sqrt(3.0) * math.sqrt(2.0 / 6.0) / math.sqrt(inputs)  # kaiming_uniform with a = sqrt(5)
            drawn.append(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        a, b = torch.cat(drawn).to(device), torch.zeros(sum(linear.sizes), rank, device=device)
        adapters.append(
            Adapter(
                a=a,
                b=b,
                parts_a=tuple(nn.Parameter(part) for part in a.split(rank)),
                parts_b=tuple(nn.Parameter(part) for part in b.split(linear.sizes)),
                scale=alpha / (math.sqrt(rank) if rslora else rank),
                linear=linear,
            )
        )
    return adapters


def merge(adapter: Adapter, frozen: Tensor, out: Tensor) -> Tensor:
    """frozen + scale B A of every part, written into `out`."""
    rows, frozen_rows = out.split(adapter.linear.sizes), frozen.split(adapter.linear.sizes)
    parts = zip(rows, frozen_rows, adapter.parts_a, adapter.parts_b, strict=True)
    for merged, before, a, b in parts:
        a, b = a.detach().to(out.device), b.detach().to(out.device)
        torch.addmm(before, b, a, alpha=adapter.scale, out=merged)
    return out


def file_names(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The same parameters by the names that they have in adapter_model.safetensors."""
    magnitude = f".lora_magnitude_vector.{ADAPTER}.weight"  # of DoRA, which PEFT's file has without an ending
    names = {name: name.replace(magnitude, ".lora_magnitude_vector") for name in sorted(parameters)}
    return {file_name.replace(f".{ADAPTER}.", "."): parameters[name] for name, file_name in names.items()}


def adapter_config(
    names: Iterable[str],
    *,
    rank: int,
    alpha: int,
    base: str,
    fan_in_fan_out: bool = False,
    rslora: bool = False,
    dora: bool = False,
) -> dict[str, Any]:
    """The adapter_config.json that PEFT needs to read the adapter; all other fields have their defaults."""
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(set(names)),
        "task_type": "CAUSAL_LM",
        "use_dora": dora,
        "use_rslora": rslora,
    }
