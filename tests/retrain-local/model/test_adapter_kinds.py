"""rsLoRA and DoRA against PEFT, which reads what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from torch import Tensor

from retrain.api import SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.checks import adapter_kind_problems, start_problems
from retrain_local.memory import sizes
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.pair import Pair
from tests.kit.random_models import random_model

MakePair = Callable[..., Pair]


@pytest.mark.parametrize("kind", ["rslora", "dora"])
@pytest.mark.parametrize("merge_limit", [sizes.MERGE_LIMIT, 0])
def test_logits_and_gradients_are_those_of_peft(
    kind: str,
    merge_limit: int,
    make_pair: MakePair,
    agrees_with: Callable[..., None],
    shaken: Callable[[Pair], None],
    ids_N: Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model = random_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    pair = make_pair(tmp_path / "model", lora={kind: True})
    shaken(pair)
    pair.publish()
    (tmp_path / "adapter").mkdir()
    save_adapter(pair, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["use_rslora"], written["use_dora"]) == (kind == "rslora", kind == "dora")
    peft = PeftModel.from_pretrained(model, str(tmp_path / "adapter"), is_trainable=True).eval()
    theirs = {name: p for name, p in peft.named_parameters() if p.requires_grad}
    assert theirs.keys() == pair.parameters.keys()
    assert any("magnitude" in name for name in theirs) == (kind == "dora")
    agrees_with(peft, theirs, pair, ids_N)


@pytest.mark.parametrize("kind", ["rslora", "dora"])
def test_a_step_is_on_policy_and_resumes(
    kind: str,
    make_backend: Callable[..., LocalBackend],
    requests: Sequence[SampleRequest],
    roll: Callable[..., TrainBatch],
    tmp_path: Path,
) -> None:
    first, resumed = make_backend(lora={kind: True}), make_backend(lora={kind: True}, seed=99)
    first.train(roll(first, requests))
    first.publish()
    first.save(tmp_path)
    resumed.load(tmp_path)
    rows = roll(first, requests, step=1).rows
    for row, found_T in zip(rows, resumed.logprobs(rows, 1.0), strict=True):
        assert np.abs(found_T - row.logprobs_T)[row.action_T].max() < 1e-4


def test_what_would_scale_otherwise_is_refused(make_context: Callable[..., Any], tmp_path: Path) -> None:
    asked = {"rslora": True, "dora": True}
    config = make_context(lora=asked, quantize="int8", inference={"engine": "sglang"}).config
    found = [problem.what for problem in adapter_kind_problems(config)]
    engines = [f"engine = 'sglang' does not go with [lora] {kind}" for kind in asked]
    assert found == [*engines, "does not go with dora = true"]
    assert adapter_kind_problems(make_context(inference={"engine": "sglang"}).config) == []
    document = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    found = [problem.fix for problem in start_problems(make_context(lora=asked, adapter=tmp_path).config)]
    assert found == ["set rslora = false", "set dora = false"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(document | {"use_rslora": True}))
    assert [problem.fix for problem in start_problems(make_context(adapter=tmp_path).config)] == ["set rslora = true"]
    assert start_problems(make_context(lora={"rslora": True}, adapter=tmp_path).config) == []
