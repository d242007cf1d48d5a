"""Hybrids and mixtures of transformers' own modules on the CUDA path: what waits, and what a graph records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_gpu.test_counts import SEGMENT, WAITS_OF_A_SEGMENT, growth
from tests.kit.fake_gpu.backends import Load, on_card

pytestmark = pytest.mark.fake_gpu
PROMPT = 9
EXPERTS = {"sampling/engine.py PytorchEngine._segment: copy cuda to cpu": 1}
# A hybrid copies its states to a dense batch and back, by index, and decodes without a graph.
STATES = {"model/states.py States.index: copy cpu to cuda": 1}
MORE_WAITS_OF_A_SEGMENT = {"qwen3_moe": EXPERTS, "lfm2": STATES, "qwen3_5_text": STATES}
IS_CAPTURED = {"qwen3_moe"}
KINDS = [pytest.param(k, marks=() if k == "qwen3_moe" else pytest.mark.slow) for k in MORE_WAITS_OF_A_SEGMENT]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hosted_model_waits_once_a_segment_and_never_in_a_layer(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")  # PEFT imports it, and with a card it would import kernels for it
    from tests.kit.fake_gpu.hosted_models import hosted_folder, probed_on_the_host

    with probed_on_the_host(), on_card(hosted_folder(tmp_path, kind), rank=4) as card:
        for phase, segments in (("few", 1), ("many", 3)):
            card.sample(Load(prompt=PROMPT, new=segments * SEGMENT), phase)
        record = card.gpu.record
        found = growth(record.waits_in("many"), record.waits_in("few"), units=2)
        assert found == WAITS_OF_A_SEGMENT | MORE_WAITS_OF_A_SEGMENT[kind]
        assert record.replays == (4 * SEGMENT if kind in IS_CAPTURED else 0)
        card.step(Load(prompt=PROMPT, new=SEGMENT))
        assert not record.waits_in("publish")
        assert not card.faults()
