"""Rows in two parts on two threads: the same completions, whatever the machine and its load."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import SampleRequest, SamplingParams
from retrain_local.sampling import gathered_decoding
from tests.kit.local_engines import Engines, all_same

PARAMS = SamplingParams(max_tokens=24, temperature=0.8, entropy=True)


@pytest.fixture
def many() -> list[SampleRequest]:
    """Enough rows for two parts until some of them end."""
    rng = np.random.default_rng(3)
    return [
        SampleRequest(prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + 4)))
        for length in (7, 33, 17, 2, 9)
    ]


@pytest.fixture
def threads_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and PyTorch's threads of every decoding step, as they come."""
    seen: list[tuple[int, int]] = []
    plain = gathered_decoding.decode_step

    def watched(decoder: Any, attend: Any, batch: Any, **options: Any) -> None:
        seen.append((len(batch.ids_B), torch.get_num_threads()))
        plain(decoder, attend, batch, **options)

    monkeypatch.setattr(gathered_decoding, "decode_step", watched)
    return seen


def test_two_parts_draw_what_one_draws(
    engines: Engines, many: list[SampleRequest], threads_seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = engines.decoder()
    parts = engines.make(decoder)
    found = parts.sample(many, PARAMS)
    assert {rows for rows, _ in threads_seen} >= {10}  # half of the 20
    parts.close()
    again = engines.make(decoder)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    all_same(again.sample(many, PARAMS), found, atol=0.0)
    monkeypatch.setattr(gathered_decoding, "PART_ROWS", 11)
    threads_seen.clear()
    all_same(engines.make(decoder).sample(many, PARAMS), found)
    assert max(rows for rows, _ in threads_seen) == 20


def test_the_parts_share_the_threads(
    engines: Engines, many: list[SampleRequest], threads_seen: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        engine = engines.make(stop_ids=frozenset())
        engine.sample(many, SamplingParams(max_tokens=2, temperature=1.0))
        assert set(threads_seen) == {(10, 2)}
        assert torch.get_num_threads() == 4
        threads_seen.clear()
        engine.sample(many[:2], SamplingParams(max_tokens=2, temperature=1.0))
        assert set(threads_seen) == {(8, 4)}
        engine.close()
    finally:
        torch.set_num_threads(before)


def test_an_error_of_either_part_ends_the_call_and_leaves_nothing_behind(
    engines: Engines, many: list[SampleRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    engine = engines.make()
    wanted = engine.sample(many, PARAMS)
    plain = gathered_decoding.decode_step

    for is_main in (True, False):

        def failing(*given: Any, at: bool = is_main, **options: Any) -> None:
            if (threading.current_thread() is threading.main_thread()) == at:
                raise ValueError("broken")
            plain(*given, **options)

        monkeypatch.setattr(gathered_decoding, "decode_step", failing)
        with pytest.raises(ValueError, match="broken"):
            engine.sample(many, PARAMS)
    monkeypatch.setattr(gathered_decoding, "decode_step", plain)
    all_same(engine.sample(many, PARAMS), wanted)
    engine.close()
