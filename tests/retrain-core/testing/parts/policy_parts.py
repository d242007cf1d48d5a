"""A backend of one softmax per position class that passes every check, and one variant for each fault."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

from retrain.api import (
    BackendError,
    Capabilities,
    CheckpointMode,
    Determinism,
    NonFiniteError,
    Sample,
    StopReason,
    TrainReport,
    generator,
)

CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.EXACT,
    provides_entropy=True,
    regularisers=frozenset({"kl_reward"}),
)
VOCABULARY, RATE, DECAY = 40, 0.5, 0.9
PREFIX = "base_model.model.head"
LORA = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["head"]}


def log_softmax(logits_V, temperature):
    scaled_V = logits_V / temperature
    return scaled_V - scaled_V.max() - np.log(np.exp(scaled_V - scaled_V.max()).sum())


class Backend:
    """Every token from one softmax; gradient ascent with momentum."""

    capabilities = CAPABILITIES

    def __init__(self, context):
        start_V = context.seeds.stream("start").normal(0.0, 0.3, VOCABULARY)
        self.eos = context.tokenizer.eos_token_id
        self.logits_V, self.momentum_V, self.published_V = start_V.copy(), np.zeros(VOCABULARY), start_V.copy()
        self.start_V = start_V
        self.trained = self.version = 0
        self.is_closed = False

    def open(self):
        if self.is_closed:
            raise BackendError("the backend is closed")

    def sample(self, requests, params):
        self.open()
        return [[self.draw(seed, params) for seed in request.seeds_G] for request in requests]

    def draw(self, seed, params):
        logp_V, stream, tokens = log_softmax(self.published_V, params.temperature), generator(seed), []
        while len(tokens) < params.max_tokens and self.eos not in tokens:
            tokens.append(int(stream.choice(VOCABULARY, p=np.exp(logp_V))))
        tokens_T = np.array(tokens, dtype=np.int64)
        entropy = float(-(np.exp(logp_V) * logp_V).sum())
        return Sample(
            tokens_T=tokens_T,
            logprobs_T=logp_V[tokens_T],
            stop_reason=StopReason.EOS if self.eos in tokens else StopReason.LENGTH,
            policy_version=self.version,
            entropies_T=np.full(len(tokens), entropy) if params.entropy else None,
        )

    def credit(self, row):
        return row.advantages_T[row.action_T]

    def gradient(self, batch):
        probabilities_V, gradient_V = np.exp(log_softmax(self.logits_V, batch.temperature)), np.zeros(VOCABULARY)
        for row in batch.rows:
            credit_T = self.credit(row)
            np.add.at(gradient_V, row.tokens_T[row.action_T], credit_T)
            gradient_V -= credit_T.sum() * probabilities_V
        return gradient_V / batch.num_actions

    def refuse(self, batch):
        for row in batch.rows:
            if not (np.isfinite(row.advantages_T).all() and np.isfinite(row.logprobs_T).all()):
                raise NonFiniteError("a number is not finite")

    def train(self, batch):
        self.open()
        self.refuse(batch)
        gaps_T = self.gaps(batch)
        gradient_V = self.gradient(batch)
        self.momentum_V = DECAY * self.momentum_V + gradient_V
        self.logits_V = self.logits_V + self.rate(batch) * self.momentum_V
        self.trained += 1
        return self.report(batch, gradient_V, gaps_T)

    def rate(self, batch):
        return RATE if batch.lr is None else batch.lr

    def reference_logprobs(self, rows, temperature):
        logp_V = log_softmax(self.start_V, temperature)
        return [np.where(row.action_T, logp_V[np.where(row.action_T, row.tokens_T, 0)], 0.0) for row in rows]

    def gaps(self, batch):
        logp_V = log_softmax(self.logits_V, batch.temperature)
        return np.concatenate([logp_V[r.tokens_T[r.action_T]] - r.logprobs_T[r.action_T] for r in batch.rows])

    def report(self, batch, gradient_V, gaps_T):
        rho_T = np.exp(gaps_T)
        return TrainReport(
            loss=0.1,
            grad_norm=float(np.linalg.norm(gradient_V)),
            num_tokens=batch.num_actions,
            ratio_mean=float(rho_T.mean()),
            ratio_max=float(rho_T.max()),
            gap_mean=float(np.abs(gaps_T).mean()),
            gap_p99=float(np.abs(gaps_T).max()),
            gap_max=float(np.abs(gaps_T).max()),
            k3=float((rho_T - 1 - gaps_T).mean()),
            ess_frac=float(rho_T.sum() ** 2 / (len(rho_T) * (rho_T**2).sum())),
            lr=RATE if batch.lr is None else batch.lr,
        )

    def publish(self):
        self.open()
        self.version, self.published_V = self.trained, self.logits_V.copy()
        return self.version

    def save_adapter(self, folder):
        (folder / "adapter_config.json").write_text(json.dumps(LORA))
        tensors = {f"{PREFIX}.lora_A.weight": self.logits_V[None], f"{PREFIX}.lora_B.weight": np.ones((1, 1))}
        save_file(tensors, folder / "adapter_model.safetensors")

    def save(self, folder):
        save_file({"logits": self.logits_V, "momentum": self.momentum_V}, folder / "state.safetensors")
        (folder / "trained.json").write_text(json.dumps(self.trained))

    def load(self, folder):
        state = load_file(folder / "state.safetensors")
        self.logits_V, self.momentum_V = state["logits"], state["momentum"]
        self.trained = json.loads((folder / "trained.json").read_text())

    def close(self):
        self.is_closed = True


class Engine:
    """The sampling of the sound backend, for any policy."""

    def __init__(self, context, policy):
        self.backend, self.policy = Backend(context), policy

    def sample(self, requests, params):
        self.backend.version = self.policy.version
        return self.backend.sample(requests, params)

    def close(self):
        pass
