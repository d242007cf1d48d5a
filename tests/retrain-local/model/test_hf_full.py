"""All weights of architectures that transformers computes: gradients, publication, reference and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.api import ConfigError
from retrain_local.model.checkpoint import save_adapter
from retrain_local.model.hf_model import HfFullDecoder
from retrain_local.training.head import selected_logprobs
from tests.kit.hf_models import SERVED, hf_model
from tests.kit.local_backend import Local
from tests.kit.local_pairs import IDS_N, hidden_of, logits_of, own_logits, relative
from tests.kit.problems import codes_in

KINDS = ["GPT2", "GptOss", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("Gemma2", "Granite", "OPT"))]


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_trained_published_and_saved(kind: str, local: Local, tmp_path: Path) -> None:
    """The gradient is that of transformers, by the head that makes its logits again; the file is its model."""
    if kind not in SERVED:
        pytest.skip("another version of transformers")
    model = hf_model(kind, SERVED[kind])
    model.save_pretrained(tmp_path / "model")
    pair = local.pair(tmp_path / "model", rank=0)
    assert isinstance(pair.trained, HfFullDecoder)
    theirs = dict(model.named_parameters())
    assert theirs.keys() == pair.parameters.keys()
    weights_T = torch.randn(16, generator=torch.Generator().manual_seed(1))
    alone_T = IDS_N[-17:]
    logits = model(input_ids=alone_T[None], use_cache=False).logits[0, :-1]
    expected_T = logits.log_softmax(-1).gather(1, alone_T[1:, None])[:, 0]
    wanted = torch.autograd.grad((expected_T * weights_T).sum(), list(theirs.values()))
    for recompute in (False, True, False):
        pair.trained.recompute = recompute
        given = pair.trained.logits, 2**22 // 5  # five rows of logits at a time
        hidden_TD = hidden_of(pair.trained)[-17:-1]
        found_T = selected_logprobs(hidden_TD, alone_T[1:], *given, 1.0, parameters=pair.trained.head_parameters)
        assert relative(found_T.detach(), expected_T.detach()) < 1e-5
        found = torch.autograd.grad((found_T * weights_T).sum(), list(pair.parameters.values()))
        for name, mine, other in zip(theirs, found, wanted, strict=True):
            assert (mine - other).norm() < 1e-4 * other.norm() + 1e-6, (
                name
            )  # OPT's keys have biases that change nothing
    with torch.no_grad():
        before = logits_of(pair.trained)
        for p in pair.parameters.values():
            p.mul_(1.1)
        assert relative(logits_of(pair.sampler), before) < 1e-5
        pair.publish()
        after = logits_of(pair.trained)
        assert relative(after, before) > 1e-2
        assert relative(logits_of(pair.sampler), after) < 1e-5
        with pair.trained.as_reference():
            assert torch.equal(logits_of(pair.trained), before)
        assert torch.equal(logits_of(pair.trained), after)
        (tmp_path / "saved").mkdir()
        save_adapter(pair, tmp_path / "saved")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", attn_implementation="eager")
        assert relative(own_logits(again), after) < 1e-5


def test_what_would_not_be_trained_as_it_is_is_refused(
    local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain_local.model.load.bf16_refusal", lambda: None)
    hf_model("GPT2", SERVED["GPT2"]).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        local.pair(tmp_path, rank=0, dtype="bf16")
    assert codes_in(caught) == ["model.fp32-only"]
