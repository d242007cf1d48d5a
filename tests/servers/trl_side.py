"""TRL's half of the comparison with TRL: `python trl_side.py FOLDER`, in an environment with TRL, without retrain.

FOLDER holds a model, a PEFT adapter, `samples.json` and `cases.json`; loss and gradient of each case, by TRL's own code
in float64, are written there. Only the log-probabilities are computed here, plainly. Advantages come from the lines of
`GRPOTrainer` that compute them, run as they stand; losses from its `_compute_loss`.
"""

from __future__ import annotations

import collections
import inspect
import json
import math
import sys
import textwrap
import types
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer
from trl.trainer.utils import nanstd

CONSTANTS = {  # as TRL has them unless set
    name: field.default
    for name, field in GRPOConfig.__dataclass_fields__.items()
    if name.startswith(("sapo_", "vespo_"))
}


class Accelerator:
    """One process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction="sum"):
        return value


def advantages_of(rewards, case):
    """By the lines of TRL that turn rewards, one column per reward function, into advantages."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start, last = source.index("unscorable_mask = torch.isnan("), "advantages = torch.nan_to_num(advantages, nan=0.0)"
    start = source.rindex("\n", 0, start) + 1
    lines = textwrap.dedent(source[start : source.index(last) + len(last)])
    settings = types.SimpleNamespace(
        multi_objective_aggregation=case.get("multi_objective_aggregation", "sum_then_normalize"),
        scale_rewards=case.get("scale_rewards", "group"),
        reward_weights=torch.tensor(case["reward_weights"]),
        reward_funcs=case["reward_weights"],
    )
    names = {
        "self": settings,
        "rewards_per_func": rewards,
        "device": "cpu",
        "num_generations": case["num_generations"],
        "torch": torch,
        "nanstd": nanstd,
    }
    exec(lines, names)
    return names["advantages"]


def weights_of(old, sampled, mask, case):
    """By the lines of TRL that weigh tokens by p of the trainer before the step / p of the sampler."""
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    start = source.rindex("\n", 0, source.index("per_token_logps_diff = (old_per_token_logps")) + 1
    lines = textwrap.dedent(source[start : source.index("# Compute the per-token log probabilities for the reference")])
    low, high = case["is_bounds"]
    settings = types.SimpleNamespace(
        vllm_importance_sampling_mode=case["is_mode"],
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
    )
    names = {"self": settings, "old_per_token_logps": old, "sampling_per_token_logps": sampled, "mask": mask}
    names |= {"torch": torch, "math": math}
    exec(lines, names)
    return names["vllm_importance_sampling_ratio"]


def padded(rows, value=0.0):
    longest = max(map(len, rows))
    return torch.tensor([list(row) + [value] * (longest - len(row)) for row in rows])


def logprobs_of(model, samples):
    """Of every completion's tokens, a row at a time, with plain logits."""
    rows = []
    for sample in samples:
        ids = torch.tensor(sample["prompt"] + sample["completion"])[None]
        logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        rows.append(logps[len(sample["prompt"]) - 1 :])
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])


def loss_of(case, samples, new):
    """`GRPOTrainer._compute_loss` on these log-probabilities, with what it reads of a trainer."""
    mask = padded([[1.0] * len(s["completion"]) for s in samples]).long()
    if case.get("mask_truncated_completions"):
        mask = mask * torch.tensor([[0 if s["is_truncated"] else 1] for s in samples])
    trainer = types.SimpleNamespace(
        accelerator=Accelerator(),
        model=types.SimpleNamespace(training=True),
        args=types.SimpleNamespace(
            delta=case.get("delta"), use_bias_correction_kl=True, steps_per_generation=1, **CONSTANTS
        ),
        loss_type=case["loss_type"],
        importance_sampling_level=case.get("importance_sampling_level", "token"),
        epsilon_low=case.get("epsilon", 0.2),
        epsilon_high=case.get("epsilon_high", 0.2),
        beta=case.get("beta", 0.0),
        max_completion_length=case["max_completion_length"],
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=case.get("off_policy_mask_threshold"),
        aux_loss_enabled=False,
        use_vllm="is_mode" in case,
        vllm_importance_sampling_correction="is_mode" in case,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
    )
    rewards = torch.tensor([s["rewards"] for s in samples])
    none = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": none[:, :1],
        "prompt_mask": none[:, :1] + 1,
        "completion_ids": none,
        "completion_mask": mask,
        "advantages": advantages_of(rewards, case),
        "old_per_token_logps": padded([s["old"] for s in samples]),
        "ref_per_token_logps": padded([s["reference"] for s in samples]),
        "num_items_in_batch": mask.sum(),
    }
    if "is_mode" in case:
        before = new.detach()
        weights = weights_of(before, inputs["old_per_token_logps"], mask, case)
        inputs |= {"old_per_token_logps": before, "importance_sampling_ratio": weights}
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(trainer, name, getattr(GRPOTrainer, name))
    kind = GMPOTrainer if case["loss_type"] == "gmpo" else GRPOTrainer
    return kind._compute_loss(trainer, None, inputs)


def main(folder):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    batches = json.loads((folder / "samples.json").read_text())
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, str(folder / "adapter"), is_trainable=True).eval()
    losses = {}
    for name, case in cases.items():
        model.zero_grad()
        loss = loss_of(case, batches[case["samples"]], logprobs_of(model, batches[case["samples"]]))
        loss.backward()
        losses[name] = loss.item()
        gradients = {n: p.grad.contiguous() for n, p in model.named_parameters() if p.grad is not None}
        save_file(gradients, str(folder / f"{name}.safetensors"))
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
