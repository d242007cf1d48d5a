"""A whole set of plugin parts without any heavy library: a policy that is one softmax over the vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from retrain.advantages import TransformOutput, TransformSpec, UncertaintySpec
from retrain.api import (
    BackendFunctions,
    Capabilities,
    CheckpointMode,
    ConfigError,
    Determinism,
    Example,
    LoadedData,
    PluginSpec,
    Problem,
    Sample,
    Score,
    StopReason,
    TrainReport,
    generator,
    hookimpl,
    key,
)

EOS, VOCABULARY = 0, 20
ON_POLICY = dict.fromkeys(("loss", "gap_mean", "gap_p99", "gap_max", "k3"), 0.0)
ON_POLICY |= dict.fromkeys(("ratio_mean", "ratio_max", "ess_frac"), 1.0)
CAPABILITIES = Capabilities(
    reports_sync_loss=True,
    preserves_token_advantages=True,
    supports_checkpoint_resume=True,
    checkpoint_resume_mode=CheckpointMode.EXACT,
    determinism=Determinism.EXACT,
    provides_entropy=False,
    losses=frozenset({"importance_sampling", "ppo", "cispo", "likelihood"}),
)


class Options(BaseModel):
    """`[backend.options]` of the toy, and `[data.options]`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    step_size: float = 1.0
    count: int = 12
    patience_s: float = key(9.0, "Read by nothing.", free_on_resume=True)


class ToyBackend:
    """Samples every token from one softmax, and follows the policy gradient on its logits."""

    capabilities = CAPABILITIES

    def __init__(self, context):
        self.logits_V = np.zeros(VOCABULARY)
        self.step_size = context.params.step_size
        self.version = self.trained = 0

    def _log_softmax(self, temperature):
        scaled_V = self.logits_V / temperature
        return scaled_V - np.log(np.exp(scaled_V - scaled_V.max()).sum()) - scaled_V.max()

    def sample(self, requests, params):
        return [[self._draw(seed, params) for seed in request.seeds_G] for request in requests]

    def _draw(self, seed, params):
        logp_V = self._log_softmax(params.temperature)
        stream, tokens = generator(seed), []
        while len(tokens) < params.max_tokens and EOS not in tokens:
            tokens.append(int(stream.choice(VOCABULARY, p=np.exp(logp_V))))
        reason = StopReason.EOS if EOS in tokens else StopReason.LENGTH
        tokens_T = np.array(tokens, dtype=np.int64)
        return Sample(tokens_T=tokens_T, logprobs_T=logp_V[tokens_T], stop_reason=reason, policy_version=self.version)

    def train(self, batch):
        probabilities_V = np.exp(self._log_softmax(batch.temperature))
        gradient_V = np.zeros(VOCABULARY)
        for row in batch.rows:
            actions, credit = row.tokens_T[row.action_T], row.advantages_T[row.action_T]
            np.add.at(gradient_V, actions, credit)
            gradient_V -= credit.sum() * probabilities_V
        gradient_V /= batch.num_actions
        self.logits_V += (self.step_size if batch.lr is None else batch.lr) * gradient_V
        self.trained += 1
        norm = float(np.linalg.norm(gradient_V))
        return TrainReport(grad_norm=norm, num_tokens=batch.num_actions, lr=batch.lr, **ON_POLICY)

    def publish(self):
        self.version = self.trained
        return self.version

    def save_adapter(self, folder: Path):
        (folder / "logits.json").write_text(json.dumps(self.logits_V.tolist()))

    def save(self, folder: Path):
        self.save_adapter(folder)
        (folder / "trained.json").write_text(json.dumps(self.trained))

    def load(self, folder: Path):
        self.trained = json.loads((folder / "trained.json").read_text())
        self.logits_V = np.array(json.loads((folder / "logits.json").read_text()))

    def close(self):
        pass


class ToySource:
    """`what is a plus b ?`, all different."""

    def __init__(self, context):
        self.count = context.params.count

    def load(self):
        pairs = [(a, b) for a in range(10) for b in range(10)][: self.count]
        prompts = {f"toy-{a}-{b}": (f"what is {a} plus {b} ?", str((a + b) % 10)) for a, b in pairs}
        examples = tuple(Example(id=name, prompt=text, reference=answer) for name, (text, answer) in prompts.items())
        return LoadedData(examples=examples, notes=(f"made {len(examples)} toys",))


class ToyReward:
    """Right when the answer's first word is the reference."""

    def __init__(self, context):
        pass

    def score(self, example, text):
        return Score.of(float(text.split()[:1] == [example.reference]))


class BrokenReward(ToyReward):
    """A verifier that always breaks."""

    def score(self, example, text):
        raise RuntimeError("the verifier is \x1b[31mdown")


def per_token_index(ctx):
    """A whole transform: token t of completion i gets A_i * (t + 1)."""
    advs = [a * np.arange(1, len(u) + 1) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]
    return TransformOutput(token_advs=advs, metrics={"toy_groups": 1.0})


def find_devices(config):
    """The devices of the machine that `machine.txt` describes, if there is one."""
    file, asked = Path("machine.txt"), config.backend.devices
    if not file.exists():
        return None
    is_set = config.origin("backend.devices").layer != "default"
    if set(asked.split(",")) <= set(file.read_text().split()):
        return asked, "" if is_set else "not set, and it is there"
    if is_set:
        raise ConfigError(Problem(where=config.place("backend.devices"), what=f"no {asked}", fix="write cpu"))
    return ",".join("cpu" for _ in asked.split(",")), "not set, and there is no GPU"


@hookimpl
def retrain_register_backends(register):
    functions = BackendFunctions(find_devices=find_devices)
    spec = PluginSpec(name="toy", summary="One softmax.", factory=ToyBackend, params=Options, traits=CAPABILITIES)
    register(replace(spec, functions=functions))


@hookimpl
def retrain_register_data_sources(register):
    register(PluginSpec(name="toy", summary="Sums.", factory=ToySource, params=Options))


@hookimpl
def retrain_register_rewards(register):
    register(PluginSpec(name="toy", summary="First word.", factory=ToyReward))
    register(PluginSpec(name="toy_broken", summary="Breaks.", factory=BrokenReward))


@hookimpl
def retrain_register_advantages(register):
    register(PluginSpec(name="toy_raw", summary="The reward.", factory=lambda: _raw, aliases=("toy_identity",)))


@hookimpl
def retrain_register_transforms(register):
    register(PluginSpec(name="toy_flat", summary="No shaping.", factory=TransformSpec(name="toy_flat")))
    register(PluginSpec(name="toy_index", summary="By position.", factory=per_token_index))


@hookimpl
def retrain_register_uncertainties(register):
    register(PluginSpec(name="toy_nll", summary="-log p.", factory=UncertaintySpec(name="toy_nll", compute=_nll)))
    spec = UncertaintySpec(name="toy_entropy", compute=lambda ctx: ctx.entropies_T, needs_entropy=True)
    register(PluginSpec(name="toy_entropy", summary="Needs entropies.", factory=spec))


def _raw(rewards_G):
    return rewards_G


def _nll(ctx):
    return -ctx.logprobs_T
