from __future__ import annotations

import torch

from retrain_local.kv_cache import GrowingLayer


def states(length: int, seed: int, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, 2, length, 4, generator=torch.Generator().manual_seed(seed))


def test_appending_equals_concatenation() -> None:
    layer = GrowingLayer()
    pieces = [states(5, 0), *(states(1, seed) for seed in range(1, 200))]
    for piece in pieces:
        keys, values = layer.update(piece, -piece)
    assert torch.equal(keys, torch.cat(pieces, dim=2))
    assert torch.equal(values, -keys)
    assert layer.get_seq_length() == 204
    assert layer.get_mask_sizes(1) == layer.get_mask_sizes(torch.arange(1)) == (205, 0)


def test_growth_is_not_per_token() -> None:
    layer = GrowingLayer()
    layer.update(states(1, 0), states(1, 0))
    buffers = {layer.update(states(1, seed), states(1, seed))[0].data_ptr() for seed in range(1, 3000)}
    assert len(buffers) < 12


def test_prompts_are_copied_out_and_moved_to_the_right() -> None:
    layer = GrowingLayer()
    prompts = states(4, 0, rows=2)
    layer.update(prompts, prompts)
    layer.right_align(torch.tensor([1, 0, 1]), torch.tensor([0, 2, 0]))
    keys, _ = layer.update(states(1, 1), states(1, 1))
    assert torch.equal(keys[0, :, :4], prompts[1])
    assert torch.equal(keys[2, :, :4], prompts[1])
    assert torch.equal(keys[1, :, 2:4], prompts[0][:, :2])
    assert torch.equal(keys[:, :, 4:], states(1, 1))


def test_dropped_rows_are_gone() -> None:
    layer = GrowingLayer()
    whole = states(4, 0)
    layer.update(whole, whole)
    layer.update(states(1, 1), states(1, 1))
    layer.keep(torch.tensor([2, 0]))
    keys, _ = layer.update(states(1, 2, rows=2), states(1, 2, rows=2))
    assert torch.equal(keys[:, :, :4], whole[[2, 0]])
    assert keys.shape == (2, 2, 6, 4)
