"""The conformance checks for recipes."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
from pathlib import Path

{% endif %}
import pytest
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}

@pytest.mark.parametrize("check", conformance("recipe", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()
