"""Values as a person may copy them into a TOML file."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.toml_text import toml_text

NAMES = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=20)
SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner), max_leaves=10)


@given(VALUES)
def test_toml_reads_it_back(value: Any) -> None:
    assert tomllib.loads(f"value = {toml_text(value)}") == {"value": value}


@pytest.mark.parametrize(("value", "text"), [(True, "true"), ([], "[]"), ({}, "{}"), (None, "(unset)")])
def test_plain_forms(value: object, text: str) -> None:
    assert toml_text(value) == text
