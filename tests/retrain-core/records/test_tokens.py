"""Token records are read back as they were written, with their rows; damaged files are reported, not guessed at."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.completions import RowRecord, TokenRecord, read_tokens, row_arrays, rows_of, write_tokens
from retrain.records.record_names import token_file
from tests.kit.problems import codes_in

# one letter per token: prompt or environment, or sampled; the first token of a row is never sampled
SHAPES = st.lists(st.text("ea", max_size=12).map(lambda rest: "e" + rest), min_size=1, max_size=5)
OPTIONAL = ("entropies_T", "engine_logprobs_T", "reference_logprobs_T", "rewards_T")


def row_of(shape: str, first: int = 7) -> RowRecord:
    action_T = np.array([letter == "a" for letter in shape])
    starts = (0, *(number for number in range(1, len(shape)) if shape[number - 1 : number + 1] == "ae"))
    return RowRecord(tokens_T=np.arange(first, first + len(shape)), action_T=action_T, starts=starts)


def make(shape: str, seed: int, has_extras: bool, has_row: bool) -> TokenRecord:
    """A record of random content that float32 holds exactly, but for its rewards."""
    row, stream = row_of(shape), np.random.default_rng(seed)
    length = int(row.action_T.sum())
    numbers = {
        name: np.round(stream.normal(size=length) * 64) / 64 for name in ("logprobs_T", "advantages_T", *OPTIONAL)
    }
    numbers["rewards_T"] += 1e-12
    kept = numbers if has_extras else {name: numbers[name] for name in ("logprobs_T", "advantages_T")}
    planning_T = stream.integers(0, 2, length).astype(np.bool_) if has_extras else None
    own = row if has_row else None
    kl_coef = 0.25 * seed * has_extras
    return TokenRecord(tokens_T=row.tokens_T[row.action_T], planning_T=planning_T, kl_coef=kl_coef, row=own, **kept)


def assert_same(before: object, after: object) -> None:
    for field in fields(before):  # type: ignore[arg-type]
        was, now = getattr(before, field.name), getattr(after, field.name)
        assert (was is None) == (now is None), field.name
        if isinstance(was, RowRecord):
            assert_same(was, now)
        elif was is not None:
            np.testing.assert_array_equal(was, now)


@settings(max_examples=40)
@given(SHAPES, st.integers(0, 2), st.booleans(), st.booleans())
def test_records_come_back_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[str], repeated: int, has_extras: bool, has_rows: bool
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    shapes = shapes + shapes[:1] * repeated
    records = [make(shape, seed, has_extras, has_rows) for seed, shape in enumerate(shapes)]
    write_tokens(folder, 7, records)
    for before, after in zip(records, read_tokens(folder, 7), strict=True):
        assert_same(before, after)


@pytest.mark.parametrize("content", [None, b"", b"not safetensors", b"\xff" * 64])
def test_missing_or_damaged_records_are_a_config_error(content: bytes | None, tmp_path: Path) -> None:
    file = token_file(tmp_path, 3)
    if content is not None:
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_tokens(tmp_path, 3)
    assert (codes_in(caught), caught.value.problems[0].where) == (["record.tokens-unreadable"], str(file))


def test_a_prompt_is_stored_once() -> None:
    arrays = row_arrays([row_of("eeeeaa", 3), row_of("eeeeaaaa", 3), row_of("eeeea", 4)])
    assert len(arrays["prompts"]) == 2 * 4
    assert arrays["prompt_of"].tolist() == [0, 0, 1]
    assert not len(arrays["environment"])


def test_arrays_that_do_not_fit_are_refused() -> None:
    row = row_of("eeaea", 0)
    arrays = row_arrays([row])
    with pytest.raises(ValueError, match="do not add up"):
        rows_of({**arrays, "prompt_lengths": arrays["prompt_lengths"] + 1}, [row.tokens_T[row.action_T]])
    with pytest.raises(ValueError, match="mask"):
        rows_of(arrays, [row.tokens_T])
