"""Every kernel variant that a run launches, compiled ahead of time for two generations of cards: nothing is spilled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fake_gpu.conftest import MakeFolder
from tests.kit.fake_gpu.backends import Load, on_card
from tests.kit.fake_gpu.build_guard import PRELOAD
from tests.kit.fake_gpu.card import H100, RTX_4090, Card
from tests.kit.fake_gpu.compiled import Compiled, compile_for
from tests.kit.fake_gpu.specialisation import Specialisation, specialisations

pytestmark = [pytest.mark.fake_gpu, pytest.mark.slow]
CARDS = {89: RTX_4090, 90: H100}
# Many rows, whose keys are in one stretch, and few, whose keys are in several.
SAMPLED = Load(prompts=8, group=16, prompt=256, new=8), Load(prompts=1, group=8, prompt=300, new=8)
SAMPLED_ONE = Load(prompts=1, group=1, prompt=300, new=8)
PRODUCTS = {"attend", "_gates_back", "_heads", "_swiglu"}  # which multiply tiles, on tensor cores


@pytest.fixture(autouse=True)
def _without_the_guard(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compilers are many short processes, each of which would load PyTorch with the guard."""
    monkeypatch.delenv(PRELOAD)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def launched(qwen3: MakeFolder, card: Card, **options: Any) -> dict[Specialisation, Any]:
    """Return the variants that two layers of Qwen3-4B launch in a step, without those of the trials at its start."""
    with on_card(qwen3("4B", num_hidden_layers=2), card, **options) as opened:
        for load in SAMPLED:
            opened.sample(load)
        opened.sample(SAMPLED_ONE)
        opened.train(Load(prompts=2, group=4, prompt=100, new=200))
        return specialisations(launch for launch in opened.gpu.record.launches if launch.phase != "start")


def compiled(variants: dict[Specialisation, Any], capability: int) -> Iterator[Compiled]:
    for variant, kernel in variants.items():
        yield compile_for(variant, kernel, capability)


@pytest.mark.parametrize("capability", CARDS)
def test_nothing_is_spilled(qwen3: MakeFolder, capability: int) -> None:
    variants = launched(qwen3, CARDS[capability])
    found = list(compiled(variants, capability))
    assert [each for each in found if not each.fits] == []
    assert {each.name for each in found if each.uses_tensor_cores} == PRODUCTS & {each.name for each in found}


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_nothing_is_spilled_with_8_bit_keys(qwen3: MakeFolder, kind: str) -> None:
    variants = launched(qwen3, H100, inference={"kv_cache_dtype": kind})
    eight_bit = {variant: kernel for variant, kernel in variants.items() if variant.name in ("attend", "store")}
    assert {variant.name for variant in eight_bit} == {"attend", "store"}
    for capability in CARDS:
        assert [each for each in compiled(eight_bit, capability) if not each.fits] == []
