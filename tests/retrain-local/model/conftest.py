"""Small models of several architectures on disk, and pairs made from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain.api import PluginContext
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Decoder
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.model.pair import Pair

CPU = torch.device("cpu")
SPANS = Spans(lengths=(4, 9, 6, 17), prefixes=(-1, 0, 0, -1))


def rows(ids_N: Tensor) -> list[Tensor]:
    """The three whole rows of `SPANS`."""
    shared, first, second, alone = ids_N.split(SPANS.lengths)
    return [torch.cat([shared, first]), torch.cat([shared, second]), alone]


@pytest.fixture
def ids_N() -> Tensor:
    return torch.randint(0, 200, (SPANS.num_tokens,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def hidden_of() -> Callable[[Decoder, Tensor], Tensor]:
    """Hidden states of the packed row of `SPANS`."""

    def hidden(decoder: Decoder, ids_N: Tensor) -> Tensor:
        attend = PaddedAttend(SPANS, decoder.device)
        return decoder.hidden(ids_N, torch.from_numpy(SPANS.positions()), attend)

    return hidden


@pytest.fixture(scope="session")
def logits_of(hidden_of: Callable[[Decoder, Tensor], Tensor]) -> Callable[[Decoder, Tensor], Tensor]:
    """Logits of the packed row of `SPANS`."""
    return lambda decoder, ids_N: decoder.logits(hidden_of(decoder, ids_N))


@pytest.fixture(scope="session")
def own_logits() -> Callable[[Any, Tensor], Tensor]:
    """What a model of transformers says of the same tokens, row by row: where a prefix is shared, of the first row."""

    def logits(model: Any, ids_N: Tensor) -> Tensor:
        first, second, alone = (model(input_ids=row[None], use_cache=False).logits[0] for row in rows(ids_N))
        return torch.cat([first, second[SPANS.lengths[0] :], alone])

    return logits


@pytest.fixture
def make_pair(make_context: Callable[..., PluginContext]) -> Callable[..., Pair]:
    def make(
        folder: str | Path,
        *,
        rank: int = 4,
        alpha: int = 0,
        seed: int = 3,
        dtype: str = "auto",
        quantize: str = "none",
        lora: dict[str, bool] | None = None,
        **places: Any,
    ) -> Pair:
        context = make_context(folder, rank=rank, alpha=alpha, dtype=dtype, quantize=quantize, lora=lora)
        source = find_source(context.config.model.model, KEY, context.plugins)
        return create_pair(context.config, source, trainer_device=CPU, seed=seed, **places)

    return make


def shake(pair: Pair, size: float = 0.05) -> None:
    """An adapter that is no longer zero."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in pair.parameters.values():
            p.copy_(torch.randn(p.shape, generator=generator) * size)


@pytest.fixture(scope="session")
def agrees_with(
    logits_of: Callable[[Decoder, Tensor], Tensor], own_logits: Callable[[Any, Tensor], Tensor]
) -> Callable[..., None]:
    """Logits of trainer and sampler, and gradients, equal those of a model of PEFT with the parameters `theirs`."""

    def relative(found: Tensor, expected: Tensor) -> float:
        return float((found - expected).float().norm() / expected.float().norm())

    def check(peft: Any, theirs: Mapping[str, Tensor], pair: Pair, ids_N: Tensor) -> None:
        weights = torch.randn(len(ids_N), 200, generator=torch.Generator().manual_seed(1))
        expected, found = own_logits(peft, ids_N), logits_of(pair.trained, ids_N)
        assert relative(found.detach(), expected.detach()) < 1e-5
        wanted = torch.autograd.grad((expected * weights).sum(), list(theirs.values()))
        gradients = torch.autograd.grad((found * weights).sum(), [pair.parameters[name] for name in theirs])
        for name, gradient, other in zip(theirs, gradients, wanted, strict=True):
            assert relative(gradient, other) < 1e-4, name
        with torch.no_grad():
            assert relative(logits_of(pair.sampler, ids_N), found) < 1e-5

    return check


@pytest.fixture(scope="session")
def shaken() -> Callable[[Pair], None]:
    return shake
