"""Backend `tinker`: a Tinker service holds the policy, samples from it and trains it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from retrain.api import (
    ActionRow,
    BackendError,
    Config,
    ConfigError,
    Deliver,
    Floats,
    PluginContext,
    Problem,
    Sample,
    SampleRequest,
    SamplingParams,
    Throttle,
    TrainBatch,
    TrainReport,
)
from retrain_tinker.adapter import download, repair
from retrain_tinker.handshake import Dialect, check_model, check_reference, check_service
from retrain_tinker.losses import Datum, check_rows, untrained_row
from retrain_tinker.options import TinkerOptions, base_url_of, problems_of
from retrain_tinker.plugin import CAPABILITIES
from retrain_tinker.sampling import Sampler, reference_logprobs
from retrain_tinker.service import Service
from retrain_tinker.step import Step

LOG = logging.getLogger("retrain")
STATE_FILE = "tinker_state.json"
FORMAT = 1
PROBE_TEXT = "What is 12 + 30?"


def create_backend(context: PluginContext) -> TinkerBackend:
    config = context.config
    options = context.params if isinstance(context.params, TinkerOptions) else TinkerOptions()
    if problems := problems_of(config):
        raise ConfigError(*problems)
    located = context.plugins.locate_model(config.model.model) or config.model.model
    service = Service(base_url_of(config), options)
    throttle = Throttle.from_config(config)
    limit, ids = context_limit(located), stop_ids(located, context.tokenizer)
    sampler = Sampler(service=service, stop_ids=ids, context_limit=limit)
    try:
        with throttle.slot():
            LOG.info("Connecting to Tinker...")
            service.connect()
            name, rank = check_model(service, config), config.model.lora_rank
            LOG.info("Creating LoRA training client (model=%s, rank=%d)...", name, rank)
            service.create(name, rank=rank, seed=context.seeds.derive("lora init"))
            service.publish()
            prompt = context.tokenizer(PROBE_TEXT)["input_ids"]
            dialect = check_service(sampler, prompt, config, context.seeds)
            if config.kl.coef:
                check_reference(service, prompt)
        if config.optimizer.grad_clip_norm and not dialect.clips_gradients:
            what = "this service ignores it: SkyRL-tx cannot clip a gradient"
            fix = "set it to 0, or use the hosted service"
            where = config.place("optimizer.grad_clip_norm")
            raise ConfigError(Problem(code="tinker.no-clipping", where=where, what=what, fix=fix))
    except BaseException:
        service.close()
        raise
    LOG.info("Training client ready. The service sets LoRA's alpha, usually 32: the update is scaled by alpha / rank.")
    if config.training.temperature != 1.0:
        LOG.warning(
            "Tokens are sampled at temperature %g, but log-probabilities, ratios and the gradient are of T = 1: the "
            "service's loss has no temperature.",
            config.training.temperature,
        )
    return TinkerBackend(sampler=sampler, throttle=throttle, dialect=dialect, config=config, path=located)


@dataclass(slots=True, kw_only=True, eq=False)
class TinkerBackend:
    """One training client on the service, and the sampling client of its last published version."""

    capabilities: ClassVar = CAPABILITIES
    delivers_early: ClassVar = True

    sampler: Sampler
    throttle: Throttle
    dialect: Dialect
    config: Config
    path: str
    _version: int = 0
    _published: int = 0
    _saved: int = 0
    _has_pending_gradient: bool = False  # from a step that failed between gradient and update

    @property
    def _service(self) -> Service:
        return self.sampler.service

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        if self._published != self._version:
            what = f"version {self._version} is trained, but {self._published} is published"
            fix = "call publish() before sample()"
            raise BackendError(Problem(code="tinker.not-published", where="sampling", what=what, fix=fix))
        with self.throttle.slot():
            return self.sampler.draw(requests, params, version=self._published, deliver=deliver)

    def train(self, batch: TrainBatch) -> TrainReport:
        """Take one AdamW step on the service; NonFiniteError leaves weights and moments unchanged."""
        check_rows(batch.rows)
        with self.throttle.slot():
            if self._has_pending_gradient:
                # no call discards a gradient, but a client restored from a state starts without one
                self._service.restore(self._service.save_state(self._name("kept"), is_temporary=True))
                self._service.publish()
            self._has_pending_gradient = True
            report = Step(self._service, self.dialect.reduction, self.config).take(batch)
            self._has_pending_gradient = False
        self._version += 1
        return report

    def publish(self) -> int:
        self._service.opened()
        if self._published != self._version:
            with self.throttle.slot():
                self._service.publish()
            self._published = self._version
        return self._version

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Return log-probabilities at temperature 1, whatever `temperature` is."""
        plain = [untrained_row(row.tokens_T, row.action_T) for row in rows]
        check_rows(plain)
        datums = [Datum.of(row) for row in plain]
        with self.throttle.slot():
            found = self._service.logprobs(datums)
        return [np.concatenate([[0.0], np.where(d.action_T, f, 0.0)]) for d, f in zip(datums, found, strict=True)]

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        """Return the `logprobs` of the base model."""
        with self.throttle.slot():
            found = reference_logprobs(self._service, [row.tokens_T for row in rows])
        return [np.where(r.action_T, np.concatenate([[0.0], f]), 0.0) for r, f in zip(rows, found, strict=True)]

    def save_adapter(self, folder: Path) -> None:
        with self.throttle.slot():
            self._download_adapter(folder)

    def save(self, folder: Path) -> None:
        """Store weights and optimizer on the service; the folder holds their path and the adapter."""
        with self.throttle.slot():
            state = {
                "format": FORMAT,
                "policy_version": self._version,
                "model": self.config.model.model,
                "lora_rank": self.config.model.lora_rank,
                "state_path": self._service.save_state(self._name("state")),
            }
            if self._service.options.download_adapter:
                state["adapter_path"] = self._download_adapter(folder)
        (folder / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")

    def load(self, folder: Path) -> None:
        path, fix = folder / STATE_FILE, "resume from a complete checkpoint of a run with this backend"
        try:
            state: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
            wanted = {"format": FORMAT, "model": self.config.model.model, "lora_rank": self.config.model.lora_rank}
            for key, value in wanted.items():
                if state[key] != value:
                    raise ValueError(f"{key} is {state[key]!r}, and this run needs {value!r}")
            if not str(state["state_path"]).startswith("tinker://"):
                raise ValueError("state_path is no tinker:// path")
            int(str(state["policy_version"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"cannot be used: {type(error).__name__}: {error}"
            raise BackendError(Problem(code="tinker.unusable-state", where=str(path), what=what, fix=fix)) from error

        with self.throttle.slot():
            # A server may have no slot for a second training client.
            self._service.replace_trainer(None)
            self._service.restore(str(state["state_path"]))
            self._service.publish()
        self._version = self._published = int(str(state["policy_version"]))
        self._has_pending_gradient = False

    def close(self) -> None:
        self._service.close()

    def _download_adapter(self, folder: Path) -> str:
        path = self._service.export_adapter(self._name("adapter"))
        download(self._service.download_urls(path), folder, self._service.options.timeout_s)
        repair(folder, self.path)
        return path

    def _name(self, what: str) -> str:
        self._saved += 1
        return f"{what}-{self._version:06d}-{self._saved}"


def stop_ids(located: str, tokenizer: Any) -> frozenset[int]:
    configured = _document(located, "generation_config.json").get("eos_token_id")
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(id_) for id_ in [*ids, getattr(tokenizer, "eos_token_id", None)] if isinstance(id_, int))


def context_limit(located: str) -> int | None:
    """Return the longest row, prompt and completion together; None if the model's config does not say."""
    document = _document(located, "config.json")
    limit = document.get("text_config", document).get("max_position_embeddings")
    return limit if isinstance(limit, int) and limit > 0 else None


def _document(located: str, name: str) -> Mapping[str, Any]:
    folder = Path(located).expanduser()
    try:
        if folder.is_dir():
            path = folder / name
        else:
            from huggingface_hub import hf_hub_download, try_to_load_from_cache

            # The cache first, so that a missing network costs nothing.
            cached = try_to_load_from_cache(located, name)
            path = Path(cached if isinstance(cached, str) else hf_hub_download(located, name))
        found = json.loads(path.read_text(encoding="utf-8"))
    except Exception:
        # The hub's client raises many types; the tokenizer's own id and no limit will do instead.
        return {}
    return found if isinstance(found, dict) else {}
