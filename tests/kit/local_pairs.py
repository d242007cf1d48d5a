"""A packed row of three rows, two of which share a prefix, through our decoders and through transformers' models."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Decoder
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.pair import Pair
from retrain_local.model.projection import Plain, Prepacked, SampledMerged

SPANS = Spans(lengths=(4, 9, 6, 17), prefixes=(-1, 0, 0, -1))
IDS_N = torch.randint(0, 200, (SPANS.num_tokens,), generator=torch.Generator().manual_seed(0))


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).float().norm() / expected.float().norm())


def hidden_of(decoder: Decoder, ids_N: Tensor = IDS_N) -> Tensor:
    attend = PaddedAttend(SPANS, decoder.device)
    return decoder.hidden(ids_N, torch.from_numpy(SPANS.positions()), attend)


def logits_of(decoder: Decoder, ids_N: Tensor = IDS_N) -> Tensor:
    return decoder.logits(hidden_of(decoder, ids_N))


def own_logits(model: Any, ids_N: Tensor = IDS_N) -> Tensor:
    """Logits of a model of transformers for the same tokens, row by row; of the shared prefix in the first row."""
    shared, first, second, alone = ids_N.split(SPANS.lengths)
    rows = torch.cat([shared, first]), torch.cat([shared, second]), alone
    first, second, alone = (model(input_ids=row[None], use_cache=False).logits[0] for row in rows)
    return torch.cat([first, second[SPANS.lengths[0] :], alone])


SHARED = (Plain, Prepacked, SampledMerged)  # what training multiplies by and sampling holds


def held(root: object, *, besides: tuple[type, ...] = ()) -> dict[int, Tensor]:
    """Every tensor that can be reached from an object, by the address of its memory; prepacked ones have none.

    What only objects of the classes `besides` hold is left out.
    """
    found, seen, open_ = dict[int, Tensor](), set[int](), [root]
    while open_:
        each = open_.pop()
        if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType, BuiltinFunctionType, *besides)):
            continue  # functions, classes and modules lead to the rest of the program
        seen.add(id(each))
        if not isinstance(each, Tensor):
            open_ += gc.get_referents(each)
        elif not each.is_mkldnn:
            found[each.untyped_storage().data_ptr()] = each
    return found


def own_tensors(pair: Pair) -> dict[int, Tensor]:
    """The tensors of the sampler, less those of the trained decoder, to whose layers the sampler's refer.

    Matrices that training shares with the sampler are the sampler's.
    """
    trained = held(pair.trained, besides=SHARED)
    return {address: tensor for address, tensor in held(pair.sampler).items() if address not in trained}


def num_bytes(tensors: dict[int, Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())


def shake(pair: Pair, size: float = 0.05) -> None:
    """Draw other numbers for everything that is trained."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in pair.parameters.values():
            p.copy_(torch.randn(p.shape, generator=generator) * size)


def check_peft_agrees(pair: Pair, model: Any, folder: Path) -> set[str]:
    """Publish, let PEFT read the saved adapter around `model`, and check that both compute the same.

    That is the logits of trainer and sampler, and the gradients, whether activations are kept or recomputed. Returns
    the names of the trained parameters.
    """
    pair.publish()
    folder.mkdir()
    save_adapter(pair, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(model, str(folder), is_trainable=True).eval()
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    assert theirs.keys() == pair.parameters.keys()
    weights = torch.randn(len(IDS_N), 200, generator=torch.Generator().manual_seed(1))
    expected = own_logits(peft)
    wanted = torch.autograd.grad((expected * weights).sum(), list(theirs.values()))
    for recompute in (False, True, False):
        pair.trained.recompute = recompute
        found = logits_of(pair.trained)
        assert relative(found.detach(), expected.detach()) < 1e-5
        gradients = torch.autograd.grad((found * weights).sum(), [pair.parameters[name] for name in theirs])
        for name, gradient, other in zip(theirs, gradients, wanted, strict=True):
            assert relative(gradient, other) < 1e-4, name
    with torch.no_grad():
        assert relative(logits_of(pair.sampler), expected) < 1e-5
    return set(theirs)
