"""The adapter on the frozen model, and the twin that sampling uses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

ADAPTER = "default"
MERGE_LIMIT = 2**28  # elements of adapted fp32 matrices (1 GiB) up to which sampling gets merged copies


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Twins:
    """One set of frozen weights under two modules: `peft` is trained, `sampler` is what was last published.

    `publish()` brings the trained adapter into the sampler.
    """

    peft: PeftModel
    sampler: Any
    publish: Callable[[], None]


def attach_lora(base: Any, *, rank: int, alpha: int, seed: int, name: str) -> Twins:
    """Put LoRA on every linear layer except the head; `alpha` 0 means 2 * rank.

    A is drawn from `seed` alone and B is zero; the global random state of torch is left as it was. Training must not
    change what sampling sees before `publish`, and neither may need the base weights twice, so the sampler is a copy
    of the modules that shares every frozen tensor. For small fp32 models it holds merged matrices W + scale B A, which
    saves three operations per layer and token; they are computed afresh from the untouched W each time, so nothing
    drifts. In bf16 merging would round the update away: there the sampler has its own small copies of A and B.
    """
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha or 2 * rank,
        lora_dropout=0.0,
        target_modules="all-linear",
        bias="none",
        task_type="CAUSAL_LM",
    )
    plain = _sharing_copy(base, keep_apart=())
    with _seeded(seed, next(base.parameters()).device), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between PEFT and transformers, nothing a user can act on
        peft = get_peft_model(base, lora)
    peft.peft_config[ADAPTER].base_model_name_or_path = name
    peft.eval()
    adapted = list(_lora_layers(peft))
    matrices = [layer.get_base_layer().weight for _, layer in adapted]
    if all(w.dtype == torch.float32 for w in matrices) and sum(w.numel() for w in matrices) <= MERGE_LIMIT:
        return Twins(peft=peft, sampler=plain, publish=_merger(plain, adapted))
    trained = [p for p in peft.parameters() if p.requires_grad]
    sampler = _sharing_copy(peft.get_base_model(), keep_apart=trained)
    return Twins(peft=peft, sampler=sampler, publish=_copier(peft.get_base_model(), sampler))


def trainable(peft: PeftModel) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in a fixed order."""
    return {name: p for name, p in peft.named_parameters() if p.requires_grad}


def _lora_layers(peft: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    for name, module in peft.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def _merger(plain: nn.Module, adapted: list[tuple[str, LoraLayer]]) -> Callable[[], None]:
    pairs: list[tuple[Tensor, LoraLayer]] = []
    for name, layer in adapted:
        twin = plain.get_submodule(name)
        twin.weight = nn.Parameter(layer.get_base_layer().weight.detach().clone(), requires_grad=False)
        pairs.append((twin.weight, layer))

    def publish() -> None:
        with torch.no_grad():
            for merged, layer in pairs:
                torch.add(layer.get_base_layer().weight, layer.get_delta_weight(ADAPTER), out=merged)

    return publish


def _copier(trained: nn.Module, sampler: nn.Module) -> Callable[[], None]:
    copies = dict(sampler.named_parameters())
    pairs = [(copies[name], p) for name, p in trained.named_parameters() if p.requires_grad]
    for mine, _ in pairs:
        mine.requires_grad_(False)

    def publish() -> None:
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)

    return publish


def _sharing_copy(model: nn.Module, *, keep_apart: Sequence[nn.Parameter]) -> Any:
    """Other modules around the same tensors, except those in `keep_apart`, which get copies."""
    apart = {id(p) for p in keep_apart}
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in apart}
    return copy.deepcopy(model, shared)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Runs a block on a random state of its own and brings the caller's back."""
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
