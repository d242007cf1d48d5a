"""Two ranks on the CUDA path: data parallel sums the gradients in buckets, FSDP keeps half of each weight."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_gpu.conftest import MakeFolder
from tests.kit.fake_gpu.backends import Load, on_card

pytestmark = [pytest.mark.fake_gpu, pytest.mark.slow]


@pytest.mark.parametrize("options", [{"rank": 32}, {"rank": 0}], ids=["adapter", "all weights"])
def test_replicated_ranks_sum_their_gradients(qwen3: MakeFolder, options: dict[str, Any]) -> None:
    from tests.kit.fake_gpu.fake_ranks import rank_of_two

    folder, load = qwen3("tiny"), Load()
    with rank_of_two(folder, "replicate", **options) as card:
        for step in range(2):
            card.step(load, step=step)
        assert card.gpu.record.operations_in("train")["c10d::allreduce_"] == 2  # one bucket a step
        assert not card.faults()
        ranked = card.gpu.record.waits_in("sample", "publish")
    with on_card(folder, **options) as card:
        for step in range(2):
            card.step(load, step=step)
        assert card.gpu.record.waits_in("sample", "publish") == ranked


def test_sharded_ranks_hold_half_of_the_weights(qwen3: MakeFolder) -> None:
    from tests.kit.fake_gpu.fake_ranks import rank_of_two

    folder = qwen3("tiny", num_hidden_layers=4)
    with on_card(folder, rank=0) as card:
        card.step()
        whole, weights = card.gpu.memory.live, card.backend._pair.total
    with rank_of_two(folder, "fsdp", rank=0) as card:
        card.step()
        # fp32 weights and both moments are halved, the sampler's copy and the pool are not
        assert whole - card.gpu.memory.live == pytest.approx(12 * weights / 2, rel=0.06)
        assert not card.faults()
