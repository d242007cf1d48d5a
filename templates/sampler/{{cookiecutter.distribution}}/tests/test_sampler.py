"""The conformance checks for samplers, and tests of its preferences."""

from __future__ import annotations

{% if cookiecutter.form == "file" %}
import sys
{% endif %}
from collections import Counter
{% if cookiecutter.form == "file" %}
from pathlib import Path
{% endif %}

import pytest
from retrain.api import GroupOutcome, PromptRequest, Seeds
from retrain.testing import Check, conformance

{% if cookiecutter.form == "file" %}
sys.path.insert(0, str(Path(__file__).parents[1]))  # the folder where `retrain` runs

{% endif %}
from {{ cookiecutter.path }} import Mistakes, Params

IDS = ["right", "wrong", "new"]


@pytest.mark.parametrize("check", conformance("sampler", "{{ cookiecutter.selected }}"), ids=str)
def test_conforms(check: Check) -> None:
    check()


def test_prompts_are_drawn_in_proportion_to_their_weights() -> None:
    sampler = Mistakes(IDS, Params(floor=0.2), Seeds(1))
    sampler.observe(
        0,
        [
            GroupOutcome(example_id="right", correct=4, judged=4, is_informative=False),
            GroupOutcome(example_id="wrong", correct=0, judged=4, is_informative=False),
            GroupOutcome(example_id="new", correct=0, judged=0, is_informative=False),
        ],
    )
    requests = (PromptRequest(step=step, cursor=step, count=1) for step in range(2000))
    drawn = Counter(sampler.choose(request)[0].example_id for request in requests)
    shares = [drawn[each] / 2000 for each in IDS]
    assert shares == pytest.approx([0.2 / 2.2, 1 / 2.2, 1 / 2.2], abs=0.04)
