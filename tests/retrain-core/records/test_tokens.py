"""Token records are read back as they were written, and damaged files are reported, not guessed at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.completions import TokenRecord, read_tokens, write_tokens
from retrain.records.record_names import token_file

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def make(length: int, seed: int, extras: bool) -> TokenRecord:
    """A record of random content that float32 holds exactly."""
    stream = np.random.default_rng(seed)
    numbers = [np.round(stream.normal(size=length) * 64) / 64 for _ in range(3)]
    return TokenRecord(
        tokens_T=stream.integers(0, 2**31 - 1, length),
        logprobs_T=numbers[0],
        advantages_T=numbers[1],
        entropies_T=numbers[2] if extras else None,
        planning_T=stream.integers(0, 2, length).astype(np.bool_) if extras else None,
    )


@settings(max_examples=40)
@given(LENGTHS, st.booleans())
def test_records_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], extras: bool
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    records = [make(length, seed, extras) for seed, length in enumerate(lengths)]
    write_tokens(folder, 7, records)
    again = read_tokens(folder, 7)
    assert len(again) == len(records)
    for before, after in zip(records, again, strict=True):
        for name in TokenRecord.__dataclass_fields__:
            was, now = getattr(before, name), getattr(after, name)
            assert (was is None) == (now is None)
            if was is not None:
                np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\xff" * 64])
def test_missing_or_damaged_records_are_a_config_error(content: bytes | None, tmp_path: Path) -> None:
    file = token_file(tmp_path, 3)
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="no readable token records"):
        read_tokens(tmp_path, 3)
