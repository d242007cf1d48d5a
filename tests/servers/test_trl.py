"""Loss and gradient of a whole step equal those of TRL 1.16, on the same samples and weights.

`nox -s referee` makes an environment with TRL, whose code reads samples and weights from files (`trl_side.py`).
Ours goes the way of a run: `[algorithm]` of a TOML, credit, rows, packs, the trainer, in fp32; TRL's runs in float64.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from retrain.api import (
    Completion,
    Example,
    Group,
    Outcome,
    PluginContext,
    Sample,
    SampleRequest,
    SamplingParams,
    Score,
    Seeds,
    StopReason,
    TrainBatch,
    load_plugins,
)
from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import build_flow
from retrain.kernel.config.load import load_config
from retrain.run.tables import registered_tables
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.options import LocalOptions

PYTHON = os.environ.get("RETRAIN_TRL_PYTHON", "")
pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not PYTHON, reason="RETRAIN_TRL_PYTHON names no Python with TRL; `nox -s referee` does"),
]
SIDE = Path(__file__).with_name("trl_side.py")
MAX_TOKENS, GROUP_SIZE = 24, 4
WEIGHTS = {"a": 1.0, "b": 0.3}  # of two rewards
KL_COEF = 0.04
STALE = 0.02  # nats by which some completions have become less likely, and others have not
STOP = (500, 501)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One algorithm in both words. TRL's loss is `factor` times ours, where a decision makes them differ."""

    ours: str
    trl: dict[str, Any]
    samples: str = "informative"
    factor: Callable[[TrainBatch, list[dict[str, Any]]], float] = lambda batch, samples: 1.0
    clips: bool = True


def rows_of_all(batch: TrainBatch, samples: list[dict[str, Any]]) -> float:
    """TRL divides by the rows of uninformative groups, too; ours are left out."""
    return (len(batch.rows) + batch.num_masked) / len(samples)


def tokens_of_all(batch: TrainBatch, samples: list[dict[str, Any]]) -> float:
    """TRL divides by the tokens of uninformative groups, too; ours are left out."""
    return batch.num_actions / sum(len(sample["completion"]) for sample in samples)


GRPO = 'advantage_mode = "grpo"\nadvantage_params = {scale = "std", ddof = 1}\n'
CASES = {
    "grpo": Case(ours=GRPO + 'loss = "ppo"\naggregation = "sequence_mean"', trl={"loss_type": "grpo"}),
    "dapo": Case(
        ours=GRPO + 'loss = "ppo"\nclip_eps = 0.2\nclip_eps_high = 0.28\naggregation = "token_mean"',
        trl={"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "dr_grpo": Case(
        ours='advantage_mode = "dr_grpo"\nloss = "ppo"\naggregation = "constant"',
        trl={"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "gspo": Case(
        ours=GRPO + 'loss = "gspo"\nclip_eps = 0.03\nclip_eps_high = 0.04',
        trl={"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    ),
    "cispo": Case(ours=GRPO + 'loss = "cispo"\nclip_eps_high = 1.2', trl={"loss_type": "cispo", "epsilon_high": 1.2}),
    "dual_clip": Case(ours=GRPO + 'loss = "ppo"\ndual_clip = 1.5', trl={"loss_type": "dapo", "delta": 1.5}),
    "gdpo": Case(
        ours='advantage_mode = "gdpo"\nloss = "ppo"',
        trl={"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
    ),
    "mask_grpo": Case(
        ours=GRPO + 'loss = "ppo"\naggregation = "sequence_mean"\n[training]\noverlong = "mask"',
        trl={"loss_type": "grpo", "mask_truncated_completions": True},
    ),
    "mask_dapo": Case(
        ours=GRPO + 'loss = "ppo"\n[training]\noverlong = "mask"',
        trl={"loss_type": "dapo", "mask_truncated_completions": True},
    ),
    "mask_dr_grpo": Case(
        ours='advantage_mode = "dr_grpo"\nloss = "ppo"\naggregation = "constant"\n[training]\noverlong = "mask"',
        trl={"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
    ),
    "kl": Case(
        ours=GRPO + f'loss = "ppo"\n[kl]\ncoef = {KL_COEF}\nestimator = "k3"',
        trl={"loss_type": "dapo", "beta": KL_COEF},
    ),
    "sapo": Case(ours=GRPO + 'loss = "sapo"', trl={"loss_type": "sapo"}, clips=False),
    "gmpo": Case(ours=GRPO + 'loss = "gmpo"', trl={"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.4}),
    "vespo": Case(ours=GRPO + 'loss = "vespo"', trl={"loss_type": "vespo"}, clips=False),
    "luspo": Case(
        ours=GRPO + 'loss = "luspo"\nclip_eps = 0.03\nclip_eps_high = 0.04',
        trl={"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04},
    ),
    "off_policy_mask": Case(
        ours=GRPO + f'loss = "ppo"\noff_policy_mask = {STALE}',
        trl={"loss_type": "dapo", "off_policy_mask_threshold": STALE},
    ),
    "icepop": Case(
        ours=GRPO + 'loss = "ppo"\nis_mode = "mask"\nis_bounds = [0.95, 1.05]',
        trl={"loss_type": "dapo", "is_mode": "token_mask", "is_bounds": [0.95, 1.05]},
    ),
    "uninformative_grpo": Case(
        ours=GRPO + 'loss = "ppo"\naggregation = "sequence_mean"',
        trl={"loss_type": "grpo"},
        samples="partly",
        factor=rows_of_all,
    ),
    "uninformative_dapo": Case(
        ours=GRPO + 'loss = "ppo"', trl={"loss_type": "dapo"}, samples="partly", factor=tokens_of_all
    ),
    "uninformative_dr_grpo": Case(
        ours='advantage_mode = "dr_grpo"\nloss = "ppo"\naggregation = "constant"',
        trl={"loss_type": "dr_grpo", "scale_rewards": "none"},
        samples="partly",
        factor=rows_of_all,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Referee:
    """What both sides read, and what TRL made of it."""

    folder: Path
    groups: dict[str, tuple[Group, ...]]
    samples: dict[str, list[dict[str, Any]]]
    losses: dict[str, float]


@pytest.fixture(scope="module")
def referee(tmp_path_factory: pytest.TempPathFactory) -> Referee:
    """Samples of four prompts, weights that have moved since, and TRL's losses and gradients of every case."""
    folder = tmp_path_factory.mktemp("referee")
    write_model(folder / "model")
    backend = backend_of(folder, "")
    rng = np.random.default_rng(0)
    requests = [
        SampleRequest(prompt_T=rng.integers(0, 500, size=n), seeds_G=tuple(int(x) for x in rng.integers(0, 2**62, 4)))
        for n in (7, 3, 12, 5)
    ]
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    sampled = backend.sample(requests, sampling)
    groups = {
        "informative": groups_of(requests, sampled, [0, 1, 2, 3], rng),
        "partly": groups_of(requests, sampled, [0, 2], rng),
    }
    others = groups_of(requests, sampled, [0, 1, 2, 3], rng)
    for _ in range(2):  # the ratios leave 1, and some are clipped
        backend.train(batch_of(backend_context(folder, GRPO), others))
    (folder / "adapter").mkdir()
    backend.save_adapter(folder / "adapter")
    samples = {name: [sample_of(*pair) for group in given for pair in scored(group)] for name, given in groups.items()}
    common = {"reward_weights": list(WEIGHTS.values()), "num_generations": GROUP_SIZE}
    common |= {"max_completion_length": MAX_TOKENS}
    cases = {name: common | case.trl | {"samples": case.samples} for name, case in CASES.items()}
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run([PYTHON, str(SIDE), str(folder)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Referee(
        folder=folder, groups=groups, samples=samples, losses=json.loads((folder / "losses.json").read_text())
    )


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(referee: Referee, name: str, record_property: Any) -> None:
    case = CASES[name]
    context = backend_context(referee.folder, case.ours, adapter="adapter")
    backend = create_backend(context)
    batch = batch_of(context, referee.groups[case.samples])
    trainer = backend._trainer
    assert trainer is not None
    loss, clipped, gaps_N = trainer.accumulate(batch)
    assert np.abs(gaps_N).max() > 0.1  # off-policy
    assert (0 < clipped < len(gaps_N)) == case.clips
    factor = case.factor(batch, referee.samples[case.samples])
    theirs = load_file(str(referee.folder / f"{name}.safetensors"))
    ours = {key: p.grad.double() * factor for key, p in trainer.parameters.items() if p.grad is not None}
    assert set(ours) == set(theirs)
    difference = flat(ours) - flat(theirs)
    errors = {
        "loss": abs(loss * factor - referee.losses[name]) / abs(referee.losses[name]),
        "gradient": float(difference.norm() / flat(theirs).norm()),
    }
    print(f"{name}: factor {factor:.6f}, loss {referee.losses[name]:.6f}, relative errors {errors}")
    record_property("errors", errors)
    assert errors["loss"] < 1e-5
    assert errors["gradient"] < 1e-5


def write_model(folder: Path) -> None:
    """A random Qwen3 whose end-of-sequence ids are drawn often enough to end rows at different lengths."""
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": 512, "max_position_embeddings": 512}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True, initializer_range=0.05))
    with torch.no_grad():
        model.model.embed_tokens.weight[list(STOP)] *= 2.5
    model.generation_config = GenerationConfig(eos_token_id=list(STOP))
    model.save_pretrained(folder)


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def backend_context(folder: Path, algorithm: str, *, adapter: str = "") -> PluginContext:
    """What a run with this `[algorithm]` gives to its parts."""
    plugins = load_plugins({})
    file = folder / "run.toml"
    start = f'adapter = "{folder / adapter}"' if adapter else ""
    file.write_text(
        f"""
[model]
model = "{folder / "model"}"
lora_rank = 4
dtype = "fp32"
{start}
[backend]
devices = "cpu"
[optimizer]
grad_clip_norm = 0.0
[reward]
weights = {{a = {WEIGHTS["a"]}, b = {WEIGHTS["b"]}}}
[algorithm]
transform_mode = "none"
{algorithm}
"""
    )
    arguments = ["--lr", "3e-3", "--seed", "1", "--set", f"training.max_tokens={MAX_TOKENS}", "--temperature", "1.0"]
    config, problems = load_config(file, tables=registered_tables(plugins), arguments=arguments)
    assert not problems, problems
    tokenizer = SimpleNamespace(eos_token_id=STOP[0])
    return PluginContext(config=config, seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer, params=LocalOptions())


def backend_of(folder: Path, algorithm: str) -> LocalBackend:
    """A backend whose adapter is no longer zero."""
    backend = create_backend(backend_context(folder, algorithm))
    stream = torch.Generator().manual_seed(0)
    trainer = backend._trainer
    assert trainer is not None
    with torch.no_grad():
        for name, p in trainer.parameters.items():
            if "lora_B" in name:
                p.copy_(0.05 * torch.randn(p.shape, generator=stream))
    backend.publish()
    return backend


def groups_of(
    requests: Sequence[SampleRequest], sampled: Sequence[Sequence[Sample]], informative: list[int], rng: Any
) -> tuple[Group, ...]:
    """The samples with two rewards each; in the groups that are not informative both are equal for all."""
    groups = []
    for number, (request, samples) in enumerate(zip(requests, sampled, strict=True)):
        rights, extras = rng.permutation([1.0, 0.0, 0.0, 1.0]), rng.normal(size=GROUP_SIZE)
        if number not in informative:
            rights, extras = np.ones(GROUP_SIZE), np.full(GROUP_SIZE, 0.5)
        parts = [{"a": float(a), "b": float(b)} for a, b in zip(rights, extras, strict=True)]
        scores = [
            Score(outcome=Outcome.SCORED, value=sum(WEIGHTS[name] * part[name] for name in WEIGHTS), parts=part)
            for part in parts
        ]
        groups.append(
            Group(
                example=Example(id=str(number), prompt="", reference=""),
                completions=tuple(completion_of(request, sample, rng) for sample in samples),
                scores=tuple(scores),
            )
        )
    return tuple(groups)


def completion_of(request: SampleRequest, sample: Sample, rng: Any) -> Completion:
    prompt, length = len(request.prompt_T), len(sample.tokens_T)
    zeros = np.zeros(prompt)
    return Completion(
        tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
        action_T=np.arange(prompt + length) >= prompt,
        logprobs_T=np.concatenate([zeros, sample.logprobs_T]),
        text="",
        stop_reason=sample.stop_reason,
        policy_version=0,
        reference_logprobs_T=np.concatenate([zeros, np.minimum(sample.logprobs_T + rng.normal(0, 0.3, length), 0.0)]),
    )


def scored(group: Group) -> list[tuple[Completion, Score]]:
    return list(zip(group.completions, group.scores, strict=True))


def sample_of(completion: Completion, score: Score) -> dict[str, Any]:
    """As TRL's side reads it."""
    action_T = completion.action_T
    assert completion.reference_logprobs_T is not None
    return {
        "prompt": completion.tokens_T[~action_T].tolist(),
        "completion": completion.tokens_T[action_T].tolist(),
        "old": completion.logprobs_T[action_T].tolist(),
        "reference": completion.reference_logprobs_T[action_T].tolist(),
        "rewards": [score.parts[name] for name in WEIGHTS],
        "is_truncated": completion.stop_reason is StopReason.LENGTH,
    }


def batch_of(context: PluginContext, groups: Sequence[Group]) -> TrainBatch:
    """The rows of the step, with the credit that the configured flow assigns."""
    coef = float(context.config.value("kl.coef", 0.0))
    given = [replace(g, completions=tuple(replace(c, kl_coef=coef) for c in g.completions)) for g in groups]
    credit = build_algorithm(build_flow(context.config, context.plugins), context).assign(0, given)
    return TrainBatch(step=0, rows=credit.rows, temperature=1.0, num_masked=credit.num_masked)
