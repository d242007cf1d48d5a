"""rsLoRA and DoRA against PEFT, which reads what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from retrain_local.checks import adapter_kind_problems, start_problems
from retrain_local.memory import sizes
from tests.kit.local_backend import Local
from tests.kit.local_pairs import check_peft_agrees, shake
from tests.kit.random_models import random_model


@pytest.mark.parametrize("kind", ["rslora", "dora"])
@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_logits_and_gradients_are_those_of_peft(
    kind: str, merge_limit: int, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model = random_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", lora={kind: True})
    shake(pair)
    names = check_peft_agrees(pair, model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["use_rslora"], written["use_dora"]) == (kind == "rslora", kind == "dora")
    assert any("magnitude" in name for name in names) == (kind == "dora")


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_a_step_is_on_policy_and_resumes(kind: str, local: Local, tmp_path: Path) -> None:
    first, resumed = local.make(lora={kind: True}), local.make(lora={kind: True}, seed=99)
    first.train(local.roll(first))
    first.publish()
    first.save(tmp_path)
    resumed.load(tmp_path)
    rows = local.roll(first, step=1).rows
    for row, found_T in zip(rows, resumed.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4


def test_what_would_scale_otherwise_is_refused(local: Local, tmp_path: Path) -> None:
    asked = {"rslora": True, "dora": True}
    config = local.context(lora=asked, quantize="int8", inference={"engine": "sglang"}).config
    found = [problem.code for problem in adapter_kind_problems(config)]
    assert found == ["engine.adapter-kind", "engine.adapter-kind", "model.dora-quantised"]
    assert adapter_kind_problems(local.context(inference={"engine": "sglang"}).config) == []
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    found = [problem.fix for problem in start_problems(local.context(lora=asked, adapter=tmp_path).config)]
    assert found == ["set rslora = false", "set dora = false"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(document | {"use_rslora": True}))
    assert [problem.fix for problem in start_problems(local.context(adapter=tmp_path).config)] == ["set rslora = true"]
    assert start_problems(local.context(lora={"rslora": True}, adapter=tmp_path).config) == []
