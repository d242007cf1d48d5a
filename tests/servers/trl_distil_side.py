"""TRL's half of the comparison of `[distil]`: `python trl_distil_side.py FOLDER`, with TRL and without retrain.

FOLDER holds a model, the adapters of policy and average, `samples.json` and `cases.json`. Loss and gradient of each
case, by the `compute_loss` of `SDPOTrainer` or `SDFTTrainer` in float64, are written there.
"""

from __future__ import annotations

import collections
import json
import sys
import types
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl.experimental.sdft import SDFTTrainer
from trl.experimental.sdpo import SDPOTrainer
from trl_side import Accelerator

OURS = {"sampled_token": "sampled_token", "topk": "topk_logits", "full": "full_logits"}


class Unwrapped(Accelerator):
    def unwrap_model(self, model):
        return model


def padded(rows, *, left=False):
    longest = max(map(len, rows))
    fill = [[0] * (longest - len(row)) for row in rows]
    ids = [[*pad, *row] if left else [*row, *pad] for row, pad in zip(rows, fill, strict=True)]
    mask = [
        [0] * len(p) + [1] * len(r) if left else [1] * len(r) + [0] * len(p) for r, p in zip(rows, fill, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(mask)


def inputs_of(samples):
    prompt_ids, prompt_mask = padded([s["prompt"] for s in samples], left=True)
    completion_ids, completion_mask = padded([s["completion"] for s in samples])
    # A row without a teacher is shown its own prompt, as TRL does, and its mask is 0.
    context_ids, context_mask = padded([s["context"] or s["prompt"] for s in samples], left=True)
    longest = completion_ids.size(1)
    old = [s["old"] + [0.0] * (longest - len(s["old"])) for s in samples]
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "teacher_input_ids": torch.cat([context_ids, completion_ids], dim=1),
        "teacher_attention_mask": torch.cat([context_mask, completion_mask], dim=1),
        "old_per_token_logps": torch.tensor(old),
        "advantages": torch.tensor([s["advantage"] for s in samples]),
        "self_distillation_mask": torch.tensor([float(bool(s["context"])) for s in samples]),
    }


def loss_of(model, case, samples):
    kind = SDFTTrainer if case["trainer"] == "sdft" else SDPOTrainer
    trainer = object.__new__(kind)
    is_average = case["teacher"] == "ema"
    args = types.SimpleNamespace(
        teacher_model_kind=case["teacher"],
        distillation_weight=case.get("weight", 1.0),
        distillation_mode=OURS[case.get("mode", "sampled_token")],
        distillation_topk=case.get("top_k", 100),
        distillation_add_tail=case.get("tail", False),
        distillation_alpha=case.get("alpha", 1.0),
        distillation_is_clip=2.0,
    )
    vars(trainer).update(
        args=args,
        model=model,
        teacher_model=model,
        accelerator=Unwrapped(),
        temperature=case["temperature"],
        model_kwarg_keys=set(),
        use_teacher_server=False,
        num_loss_tokens_to_skip=case.get("skip_tokens", 0),
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="dapo",
        current_gradient_accumulation_steps=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _log_self_distillation_metric=lambda *_: None,
        _use_peft_ema_teacher_adapter=lambda: is_average,
    )
    return trainer.compute_loss(model, inputs_of(samples))


def main(folder):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    samples = json.loads((folder / "samples.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True)
    model.load_adapter(str(folder / "average"), adapter_name="teacher")
    model.set_adapter("default")
    losses = {}
    for name, case in cases.items():
        model.zero_grad()
        loss = loss_of(model, case, samples[case["samples"]])
        loss.backward()
        losses[name] = loss.item()
        own = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
        save_file(own, str(folder / f"{name}.safetensors"))
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
