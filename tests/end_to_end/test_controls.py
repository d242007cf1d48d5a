"""Real runs of `builtin:tiny` as controls: no update leaves every weight, and a reward for form alone is caught."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.running import SMALL, retrain, tiny

PAYS_FORM = '''
from retrain_rewards.boxed import last_boxed


class Reward:
    """Pays for a finished box, whatever is in it."""

    def score(self, example, text):
        return float(bool(last_boxed(text)))

    def answer_in(self, text):
        return last_boxed(text)


def make(context):
    return Reward()
'''
CAMPAIGN = r"""
[campaign]
seeds = [1, 2, 3, 4, 5, 6]
max_steps = 10
controls = ["format_only"]

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"
lr = 1e-7

[[campaign.conditions]]
advantage_mode = "grpo"
transform_mode = "none"

[model]
model = "builtin:tiny"
lora_rank = 16

[backend]
backend = "local"
devices = "cpu"

[training]
batch_size = 4
group_size = 8
max_tokens = 24
temperature = 1.0
lr = 5e-3
save_every = 0

[data]
source = "arithmetic"
instruction = 'Put your final answer in \boxed{}.'

[reward]
type = "pays_form.make"

[scoring]
audit = "off"
workers = 1

[eval]
examples = 32
samples = 2
"""


@pytest.mark.long
def test_no_update_leaves_every_weight_as_it_was(tmp_path: Path) -> None:
    """The B matrices of a new adapter are 0, and so they must be at the end, bit for bit."""
    from safetensors.numpy import load_file

    tiny(*SMALL, "--control", "no_update", "--log-dir", "still", cwd=tmp_path)
    tiny(*SMALL, "--control", "random_reward", "--log-dir", "coins", cwd=tmp_path)
    largest = {}
    for name in ("still", "coins"):
        (file,) = (tmp_path / name / "adapter/final").glob("adapter_model.safetensors")
        matrices = [values for key, values in load_file(file).items() if "lora_B" in key]
        assert matrices
        largest[name] = max(float(np.abs(values).max()) for values in matrices)
    assert largest["still"] == 0.0
    assert largest["coins"] > 0.0


@pytest.mark.long
def test_a_reward_that_pays_for_form_alone_is_caught_by_its_control(tmp_path: Path) -> None:
    (tmp_path / "pays_form.py").write_text(PAYS_FORM, encoding="utf-8")
    (tmp_path / "c.toml").write_text(CAMPAIGN, encoding="utf-8")
    outcome = retrain("c.toml", cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path)})
    assert outcome.code == 0, outcome.err
    (folder,) = (tmp_path / "logs").glob("campaign_*")
    found = json.loads(retrain("compare", str(folder), "--json", cwd=tmp_path).out)
    (comparison,) = found["comparisons"]
    assert comparison["difference"] > 0.1  # against its baseline it gains, since boxes pay
    assert (comparison["verdict"], comparison["cause"]) == ("cannot tell", "not better than its controls")
    (control,) = comparison["controls"]["results"]
    assert (control["control"], control["difference"]) == ("format_only", 0.0)  # the same run, seed by seed
