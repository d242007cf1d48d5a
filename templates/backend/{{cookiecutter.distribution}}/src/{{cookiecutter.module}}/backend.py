"""Backend `{{ cookiecutter.name }}`: one row of logits per token, trained by policy gradient."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from retrain.api import (
    BackendError,
    Capabilities,
    CheckpointMode,
    ConfigError,
    Determinism,
    Floats,
    NonFiniteError,
    PluginContext,
{% if cookiecutter.form == "file" %}
    PluginSpec,
{% endif %}
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
    StopReason,
    Tokens,
    TrainBatch,
    TrainReport,
    generator,
)
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

MAX_VOCABULARY = 4096
STATE = "{{ cookiecutter.name }}.safetensors"
CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.SAME_MACHINE,
    provides_entropy=True,
)


class Options(BaseModel):
    """`[backend.options]`: `step_size` is how far a logit moves in its first step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step_size: float = Field(default=0.5, gt=0.0)


class BigramBackend:
    """`table_VV[a]` holds the logits of the token after `a`; `published_VV` is the copy that `sample` uses."""

    capabilities = CAPABILITIES

    def __init__(self, vocabulary: int, end_token: int, step_size: float) -> None:
        self._table_VV = np.zeros((vocabulary, vocabulary))
        self._squares_VV = np.zeros_like(self._table_VV)  # Adagrad: sum of squared gradients
        self._published_VV = self._table_VV.copy()
        self._end_token, self._step_size = end_token, step_size
        self._steps = self._version = 0
        self._is_open = True

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        """One completion per seed, from the last published policy."""
        self._expect_open()
        last_B = np.array([int(request.prompt_T[-1]) for request in requests for _ in request.seeds_G], dtype=np.int64)
        seeds = [seed for request in requests for seed in request.seeds_G]
        samples = iter(self._sample_rows(last_B, seeds, params))
        return [[next(samples) for _ in request.seeds_G] for request in requests]

    def train(self, batch: TrainBatch) -> TrainReport:
        """One Adagrad step up the policy gradient; NonFiniteError, with the table unchanged, when it is not finite."""
        self._expect_open()
        previous_N, tokens_N, credit_N, sampled_N = _actions(batch)
        logp_VV = log_softmax(self._table_VV / batch.temperature)
        logp_N = logp_VV[previous_N, tokens_N]
        with np.errstate(over="ignore", invalid="ignore"):
            rho_N = np.exp(logp_N - sampled_N)
            weight_N = rho_N * credit_N / (batch.temperature * batch.num_actions)
            gradient_VV = np.zeros_like(self._table_VV)
            np.add.at(gradient_VV, (previous_N, tokens_N), weight_N)
            row_weight_V = np.bincount(previous_N, weights=weight_N, minlength=len(gradient_VV))
            gradient_VV -= row_weight_V[:, None] * np.exp(logp_VV)
        if not (np.isfinite(sampled_N).all() and np.isfinite(gradient_VV).all()):
            raise NonFiniteError("an advantage, a log-probability or the gradient is not finite; nothing was updated")
        self._squares_VV += gradient_VV**2
        self._table_VV += self._step_size * gradient_VV / (np.sqrt(self._squares_VV) + 1e-12)
        self._steps += 1
        return _report(logp_N, sampled_N, rho_N, credit_N, float(np.linalg.norm(gradient_VV)))

    def publish(self) -> int:
        """Make `sample` use the trained table; returns the number of steps in it."""
        self._expect_open()
        self._published_VV = self._table_VV.copy()
        self._version = self._steps
        return self._version

    def save_adapter(self, folder: Path) -> None:
        """The table in PEFT's format: a full-rank LoRA, B = the table and A = 1, on a layer of zeros."""
        vocabulary = len(self._table_VV)
        layer = "base_model.model.bigram"
        weights = {
            f"{layer}.lora_A.weight": np.eye(vocabulary, dtype=np.float32),
            f"{layer}.lora_B.weight": np.ascontiguousarray(self._table_VV.T, dtype=np.float32),
        }
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": vocabulary, "lora_alpha": vocabulary, "target_modules": ["bigram"]}
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")

    def save(self, folder: Path) -> None:
        """Save the table, Adagrad's sums and the number of steps, exactly."""
        tensors = {"table": self._table_VV, "squares": self._squares_VV}
        save_file(tensors, folder / STATE, metadata={"steps": str(self._steps)})

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, and publish it; BackendError when it does not fit."""
        self._expect_open()
        try:
            with safe_open(folder / STATE, framework="numpy") as file:
                table_VV, squares_VV = file.get_tensor("table"), file.get_tensor("squares")
                steps = int(file.metadata()["steps"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            problem = Problem(where=str(folder / STATE), what=str(error), fix="use another checkpoint")
            raise BackendError(problem) from error
        if table_VV.shape != self._table_VV.shape:
            what = f"the table is {table_VV.shape}, and the tokenizer needs {self._table_VV.shape}"
            raise BackendError(Problem(where=str(folder / STATE), what=what, fix="resume with the same model"))
        self._table_VV, self._squares_VV, self._steps = table_VV, squares_VV, steps
        self.publish()

    def close(self) -> None:
        """Release the tables; safe to call twice."""
        self._is_open = False
        self._table_VV = self._squares_VV = self._published_VV = np.zeros((0, 0))

    def _sample_rows(self, last_B: Tokens, seeds: Sequence[int], params: SamplingParams) -> list[Sample]:
        """All completions in parallel, one token at a time; each uses uniform numbers from its own seed."""
        tokens_BT = np.zeros((len(seeds), params.max_tokens), dtype=np.int64)
        logprobs_BT, entropies_BT = np.zeros(tokens_BT.shape), np.zeros(tokens_BT.shape)
        uniforms_BT = [generator(seed).random(params.max_tokens) for seed in seeds]
        lengths_B = np.zeros(len(seeds), dtype=np.int64)
        going = np.arange(len(seeds))
        for t in range(params.max_tokens):
            if not going.size:
                break
            logp_BV = log_softmax(self._published_VV[last_B[going]] / params.temperature)
            tokens_B = _inverse_sample(np.exp(logp_BV), np.array([uniforms_BT[b][t] for b in going]))
            tokens_BT[going, t] = last_B[going] = tokens_B
            logprobs_BT[going, t] = np.take_along_axis(logp_BV, tokens_B[:, None], axis=1)[:, 0]
            entropies_BT[going, t] = -(np.exp(logp_BV) * logp_BV).sum(axis=1)
            lengths_B[going] = t + 1
            going = going[tokens_B != self._end_token]
        return [
            Sample(
                tokens_T=tokens_BT[b, :length],
                logprobs_T=logprobs_BT[b, :length],
                stop_reason=StopReason.EOS if tokens_BT[b, length - 1] == self._end_token else StopReason.LENGTH,
                policy_version=self._version,
                entropies_T=entropies_BT[b, :length] if params.entropy else None,
            )
            for b, length in enumerate(lengths_B)
        ]

    def _expect_open(self) -> None:
        if not self._is_open:
            raise BackendError("the backend is closed")


def create(context: PluginContext) -> BigramBackend:
    """The backend for the tokenizer of `[model] model`; ConfigError for settings that it does not support."""
    config, options = context.config, context.params if isinstance(context.params, Options) else Options()
    if config.algorithm.loss != "importance_sampling" or config.algorithm.tis_cap > 0.0:
        where, fix = config.place("algorithm.loss"), 'use loss = "importance_sampling" and tis_cap = 0.0'
        raise ConfigError(Problem(where=where, what="this backend does not clip or truncate ratios", fix=fix))
    vocabulary, end_token = len(context.tokenizer), context.tokenizer.eos_token_id
    if vocabulary > MAX_VOCABULARY or end_token is None:
        what = f"a vocabulary of {vocabulary} tokens, end token {end_token}"
        fix = f"use a model with at most {MAX_VOCABULARY} tokens and an end token, such as builtin:tiny"
        raise ConfigError(Problem(where=config.place("model.model"), what=what, fix=fix))
    return BigramBackend(vocabulary, int(end_token), options.step_size)


def log_softmax(logits_BV: Floats) -> Floats:
    """Log-probabilities of each row of logits."""
    shifted_BV: Floats = logits_BV - logits_BV.max(axis=1, keepdims=True)
    total_B1: Floats = np.exp(shifted_BV).sum(axis=1, keepdims=True)
    return shifted_BV - np.log(total_B1)


def _inverse_sample(probabilities_BV: Floats, uniforms_B: Floats) -> Tokens:
    """Inverse sampling: the first token of each row whose cumulative probability exceeds uniform * total."""
    cumulative_BV = probabilities_BV.cumsum(axis=1)
    total_B = cumulative_BV[:, -1]
    target_B = np.minimum(uniforms_B * total_B, np.nextafter(total_B, 0.0))  # the product may round up to the total
    tokens_B: Tokens = (cumulative_BV > target_B[:, None]).argmax(axis=1)
    return tokens_B


def _actions(batch: TrainBatch) -> tuple[Tokens, Tokens, Floats, Floats]:
    """For each action token: the previous token, the token, its advantage and its behaviour log-probability."""
    indices = [np.flatnonzero(row.action_T) for row in batch.rows]
    if any(at.size and at[0] == 0 for at in indices):
        raise BackendError("a row begins with a sampled token, but that needs a previous one")
    pairs = list(zip(batch.rows, indices, strict=True))
    return (
        np.concatenate([row.tokens_T[at - 1] for row, at in pairs]),
        np.concatenate([row.tokens_T[at] for row, at in pairs]),
        np.concatenate([row.advantages_T[at] for row, at in pairs]),
        np.concatenate([row.logprobs_T[at] for row, at in pairs]),
    )


def _report(logp_N: Floats, sampled_N: Floats, rho_N: Floats, credit_N: Floats, grad_norm: float) -> TrainReport:
    gap_N = np.abs(logp_N - sampled_N)
    return TrainReport(
        loss=-float(np.mean(rho_N * credit_N)),
        grad_norm=grad_norm,
        num_tokens=len(logp_N),
        ratio_mean=float(rho_N.mean()),
        ratio_max=float(rho_N.max()),
        gap_mean=float(gap_N.mean()),
        gap_p99=float(np.quantile(gap_N, 0.99)),
        gap_max=float(gap_N.max()),
        k3=float(np.mean(rho_N - 1.0 - (logp_N - sampled_N))),
        ess_frac=float(rho_N.sum() ** 2 / (len(rho_N) * np.sum(rho_N**2))),
    )
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Options,
    traits=CAPABILITIES,
)
{% endif %}
