"""Variants of the sound backend, each with one fault."""

import itertools
import json
from dataclasses import replace

import numpy as np
from policy_parts import CAPABILITIES, Backend
from variants import variant

from retrain.api import CheckpointMode, Determinism, NonFiniteError, StopReason


def draws(change):
    """A backend whose samples are changed."""
    return variant(Backend, draw=lambda self, seed, params: change(Backend.draw(self, seed, params)))


def draws_with(change):
    """A backend that samples by other parameters."""
    return variant(Backend, draw=lambda self, seed, params: Backend.draw(self, seed, change(params)))


def reports(**fields):
    return variant(Backend, report=lambda self, *given: replace(Backend.report(self, *given), **fields))


def without_the_end(sample):
    if sample.stop_reason is StopReason.LENGTH or len(sample.tokens_T) < 2:
        return sample
    return replace(sample, tokens_T=sample.tokens_T[:-1], logprobs_T=sample.logprobs_T[:-1], entropies_T=None)


OneShort = variant(
    Backend, sample=lambda self, requests, params: [g[1:] or g for g in Backend.sample(self, requests, params)]
)
EmptyCompletions = draws(
    lambda sample: replace(sample, tokens_T=sample.tokens_T[:0], logprobs_T=sample.logprobs_T[:0], entropies_T=None)
)
PositiveLogs = draws(lambda sample: replace(sample, logprobs_T=-sample.logprobs_T))
NotFinite = draws(lambda sample: replace(sample, logprobs_T=sample.logprobs_T * np.nan))
AlwaysCertain = draws(lambda sample: replace(sample, logprobs_T=np.zeros(len(sample.tokens_T))))
DropsTheEnd = draws(without_the_end)
SaysLength = draws(lambda sample: replace(sample, stop_reason=StopReason.LENGTH))
OldVersion = draws(lambda sample: replace(sample, policy_version=-1))
TwoAtLeast = draws_with(lambda params: replace(params, max_tokens=max(params.max_tokens, 2)))
IgnoresTemperature = draws_with(lambda params: replace(params, temperature=1.0 / params.temperature))
NoEntropies = draws_with(lambda params: replace(params, entropy=False))
OneSeed = variant(Backend, draw=lambda self, seed, params: Backend.draw(self, 1, params))


class TalksOn(Backend):
    def draw(self, seed, params):
        end, self.eos = self.eos, -1
        sample, self.eos = super().draw(seed, params), end
        return sample


class ByPlace(Backend):
    """Its seeds depend on the place in the batch."""

    def sample(self, requests, params):
        self.open()
        places = itertools.count()
        return [[self.draw(seed + next(places), params) for seed in request.seeds_G] for request in requests]


class WritesPrompts(Backend):
    def sample(self, requests, params):
        for request in requests:
            request.prompt_T[:] = 0
        return super().sample(requests, params)


def delivers(*places):
    """A backend that delivers only these completions of the first group, each as the one at place 0."""

    def sample(self, requests, params, deliver=None):
        samples = Backend.sample(self, requests, params)
        for place in places if deliver else ():
            deliver(0, 0, samples[0][place])
        return samples

    return variant(Backend, delivers_early=True, sample=sample)


DeliversTwice, DeliversOthers = delivers(0, 0), delivers(1)


class ClosesOnce(Backend):
    def close(self):
        if self.is_closed:
            raise RuntimeError("closed already")
        super().close()


NeverCloses = variant(Backend, close=lambda self: None)
WrongSign = variant(Backend, gradient=lambda self, batch: -Backend.gradient(self, batch))
Decays = variant(Backend, gradient=lambda self, batch: Backend.gradient(self, batch) - 0.1 * self.logits_V)
Averages = variant(Backend, credit=lambda self, row: np.full(row.action_T.sum(), Backend.credit(self, row).mean()))
FixedRate = variant(Backend, rate=lambda self, batch: Backend.rate(self, replace(batch, lr=None)))
OffPolicy = variant(Backend, gaps=lambda self, batch: Backend.gaps(self, replace(batch, temperature=1.0)))
CountsCredited, ReportsNothing, Placeholder = (
    reports(**fields) for fields in ({"num_tokens": 1}, {"loss": float("nan")}, {"loss_is_placeholder": True})
)
TakesAnything = variant(Backend, refuse=lambda self, batch: None)
Contradicts = variant(Backend, capabilities=replace(CAPABILITIES, supports_checkpoint_resume=False))


class RefersToItself(Backend):
    def reference_logprobs(self, rows, temperature):
        self.start_V = self.logits_V
        return super().reference_logprobs(rows, temperature)


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


def then(method, **changed):
    """A backend that, after it has saved or loaded, sets these attributes to zero."""

    def call(self, folder):
        getattr(Backend, method)(self, folder)
        vars(self).update({name: zero(getattr(self, name)) for name, zero in changed.items()})

    return variant(Backend, **{method: call})


ForgetsMoments, SavesByMoving = (then(method, momentum_V=np.zeros_like) for method in ("load", "save"))
ForgetsTheCount = then("load", trained=lambda _: 0)


class Pickles(Backend):
    def save_adapter(self, folder):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
        (folder / "adapter_model.bin").write_bytes(b"\x80\x04N.")


class BadTensors(Backend):
    def save_adapter(self, folder):
        super().save_adapter(folder)
        (folder / "adapter_model.safetensors").write_bytes(b"nothing")


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
