"""Values as TOML text that users can copy into a file, and values parsed from free text."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.config.toml_file import parse_free, toml_text, unquoted

NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=10)


@settings(max_examples=50)
@given(VALUES)
def test_toml_reads_it_back(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_text(value)}") == {"value": value}


@pytest.mark.parametrize(("value", "text"), [(True, "true"), ([], "[]"), ({}, "{}"), (None, "(unset)")])
def test_plain_forms(value: object, text: str) -> None:
    assert toml_text(value) == text


@pytest.mark.parametrize(
    ("value", "default", "meant"),
    [
        *(("70", 500, "70"), ("1e-4", 4e-5, "1e-4"), ("true", False, "true"), ("7.5", 1, "7.5")),
        *(("many", 500, ""), ("true", 1, ""), ("1", True, ""), ("[1]", 1, ""), ("70", "grpo", ""), (70, 500, "")),
    ],
)
def test_a_number_or_boolean_in_quotes_is_recognised(value: object, default: object, meant: str) -> None:
    assert unquoted(value, default) == meant


@given(st.text(max_size=12))
def test_free_values_never_fail_and_are_never_nan(text: str) -> None:
    value = parse_free(text)
    assert value == value or isinstance(value, list | dict)  # NaN alone differs from itself
