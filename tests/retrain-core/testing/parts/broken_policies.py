"""Variants of the sound backend, each with one fault."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
from policy_parts import CAPABILITIES, Backend

from retrain.api import CheckpointMode, Determinism, NonFiniteError, StopReason


class OneShort(Backend):
    def sample(self, requests, params):
        return [group[1:] or group for group in super().sample(requests, params)]


class EmptyCompletions(Backend):
    def draw(self, seed, params):
        sample = super().draw(seed, params)
        return replace(sample, tokens_T=sample.tokens_T[:0], logprobs_T=sample.logprobs_T[:0], entropies_T=None)


class PositiveLogs(Backend):
    def draw(self, seed, params):
        sample = super().draw(seed, params)
        return replace(sample, logprobs_T=-sample.logprobs_T)


class NotFinite(Backend):
    def draw(self, seed, params):
        sample = super().draw(seed, params)
        return replace(sample, logprobs_T=sample.logprobs_T * np.nan)


class AlwaysCertain(Backend):
    def draw(self, seed, params):
        sample = super().draw(seed, params)
        return replace(sample, logprobs_T=np.zeros(len(sample.tokens_T)))


class TalksOn(Backend):
    def draw(self, seed, params):
        end, self.eos = self.eos, -1
        sample, self.eos = super().draw(seed, params), end
        return sample


class DropsTheEnd(Backend):
    def draw(self, seed, params):
        sample = super().draw(seed, params)
        if sample.stop_reason is StopReason.LENGTH or len(sample.tokens_T) < 2:
            return sample
        return replace(sample, tokens_T=sample.tokens_T[:-1], logprobs_T=sample.logprobs_T[:-1], entropies_T=None)


class SaysLength(Backend):
    def draw(self, seed, params):
        return replace(super().draw(seed, params), stop_reason=StopReason.LENGTH)


class TwoAtLeast(Backend):
    def draw(self, seed, params):
        return super().draw(seed, replace(params, max_tokens=max(params.max_tokens, 2)))


class OldVersion(Backend):
    def draw(self, seed, params):
        return replace(super().draw(seed, params), policy_version=-1)


class ByPlace(Backend):
    """Its seeds depend on the place in the batch."""

    def sample(self, requests, params):
        self.open()
        places = itertools.count()
        return [[self.draw(seed + next(places), params) for seed in request.seeds_G] for request in requests]


class OneSeed(Backend):
    def draw(self, seed, params):
        return super().draw(1, params)


class IgnoresTemperature(Backend):
    def draw(self, seed, params):
        return super().draw(seed, replace(params, temperature=1.0 / params.temperature))


class NoEntropies(Backend):
    def draw(self, seed, params):
        return super().draw(seed, replace(params, entropy=False))


class WritesPrompts(Backend):
    def sample(self, requests, params):
        for request in requests:
            request.prompt_T[:] = 0
        return super().sample(requests, params)


class DeliversTwice(Backend):
    delivers_early = True

    def sample(self, requests, params, deliver=None):
        samples = super().sample(requests, params)
        if deliver is not None:
            deliver(0, 0, samples[0][0])
            deliver(0, 0, samples[0][0])
        return samples


class DeliversOthers(Backend):
    delivers_early = True

    def sample(self, requests, params, deliver=None):
        samples = super().sample(requests, params)
        if deliver is not None:
            deliver(0, 0, samples[0][1])
        return samples


class ClosesOnce(Backend):
    def close(self):
        if self.is_closed:
            raise RuntimeError("closed already")
        super().close()


class NeverCloses(Backend):
    def close(self):
        pass


class WrongSign(Backend):
    def gradient(self, batch):
        return -super().gradient(batch)


class Averages(Backend):
    def credit(self, row):
        credit_T = super().credit(row)
        return np.full(len(credit_T), credit_T.mean())


class RefersToItself(Backend):
    def reference_logprobs(self, rows, temperature):
        self.start_V = self.logits_V
        return super().reference_logprobs(rows, temperature)


class Decays(Backend):
    def gradient(self, batch):
        return super().gradient(batch) - 0.1 * self.logits_V


class FixedRate(Backend):
    def rate(self, batch):
        return super().rate(replace(batch, lr=None))


class CountsCredited(Backend):
    def report(self, *arguments):
        return replace(super().report(*arguments), num_tokens=1)


class ReportsNothing(Backend):
    def report(self, *arguments):
        return replace(super().report(*arguments), loss=float("nan"))


class Placeholder(Backend):
    def report(self, *arguments):
        return replace(super().report(*arguments), loss_is_placeholder=True)


class OffPolicy(Backend):
    """Its trainer forgets the temperature."""

    def gaps(self, batch):
        return super().gaps(replace(batch, temperature=1.0))


class PublishesAtOnce(Backend):
    def train(self, batch):
        report = super().train(batch)
        self.publish()
        return report


class NeverGrows(Backend):
    def publish(self):
        super().publish()
        self.version = 0
        return 0


class TakesAnything(Backend):
    def refuse(self, batch):
        pass


class RefusesTooLate(Backend):
    def refuse(self, batch):
        try:
            super().refuse(batch)
        except NonFiniteError:
            self.logits_V = self.logits_V * 1.5
            raise


class WritesRows(Backend):
    def train(self, batch):
        report = super().train(batch)
        for row in batch.rows:
            row.advantages_T[:] = 0.0
        return report


class StartsAnywhere(Backend):
    """Its first weights come from the operating system."""

    def __init__(self, context):
        super().__init__(context)
        self.logits_V += np.random.default_rng().normal(size=len(self.logits_V))
        self.publish()


class ForgetsMoments(Backend):
    def load(self, folder):
        super().load(folder)
        self.momentum_V = np.zeros_like(self.momentum_V)


class ForgetsTheCount(Backend):
    def load(self, folder):
        super().load(folder)
        self.trained = 0


class SavesByMoving(Backend):
    def save(self, folder):
        super().save(folder)
        self.momentum_V = np.zeros_like(self.momentum_V)


class Pickles(Backend):
    def save_adapter(self, folder):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
        (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")


class BadTensors(Backend):
    def save_adapter(self, folder):
        super().save_adapter(folder)
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")


class Contradicts(Backend):
    capabilities = replace(CAPABILITIES, supports_checkpoint_resume=False)


class PromisesLittle(StartsAnywhere):
    """Draws its first weights at random, keeps nothing, and declares both, which breaks no promise."""

    capabilities = replace(
        CAPABILITIES,
        determinism=Determinism.NONE,
        supports_checkpoint_resume=False,
        checkpoint_resume_mode=CheckpointMode.UNSUPPORTED,
        provides_entropy=False,
        regularisers=frozenset(),
    )

    def draw(self, seed, params):
        return super().draw(seed, replace(params, entropy=False))
