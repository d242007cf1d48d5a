"""Batches of rows, and backends around a transport without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from retrain.api import Sample, SampleRequest, SamplingParams, StopReason, TrainBatch
from retrain_prime_rl.backend import PrimeRlBackend
from retrain_prime_rl.options import PrimeRlOptions
from retrain_prime_rl.packing import Layout, encode, pack
from retrain_prime_rl.plugin import CAPABILITIES
from retrain_prime_rl.trainer_folder import RemotePolicy
from retrain_prime_rl.transport import FileTransport, rank_files
from tests.kit.sampled_rows import make_row
from tests.prime_rl_stack.stack import two_free_ports

# As the trainer writes it: names of the model's own modules, without PEFT's prefix.
LAYER = "model.layers.0.self_attn.q_proj"
ADAPTER = save(
    {f"{LAYER}.lora_A.weight": np.ones((4, 8), np.float32), f"{LAYER}.lora_B.weight": np.ones((8, 4), np.float32)}
)


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """A batch of rows of these lengths."""

    def make(lengths: Sequence[int], *, step: int = 0, temperature: float = 0.7, varying: bool = True) -> TrainBatch:
        rows = tuple(make_row(length, seed=number + 1, varying=varying) for number, length in enumerate(lengths))
        return TrainBatch(step=step, rows=rows, temperature=temperature)

    return make


@pytest.fixture
def free_ports() -> int:
    """A port that is free, and so is the next one."""
    return two_free_ports()


@dataclass
class NotingEngine:
    """An engine that takes weights and samples from the last it took."""

    loaded: list[tuple[str, str, int]] = field(default_factory=list)
    version: int = 0
    is_stuck: bool = False
    is_closed: bool = False
    delivers_early = True

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams, deliver=None) -> list[list[Sample]]:
        def drawn() -> Sample:
            return Sample(
                tokens_T=np.array([3]),
                logprobs_T=np.array([-0.5]),
                stop_reason=StopReason.EOS,
                policy_version=self.version,
            )

        return [[drawn() for _ in request.seeds_G] for request in requests]

    def load_adapter(self, folder: Path, version: int) -> None:
        self._load("adapter", folder, version)

    def load_weights(self, folder: Path, version: int) -> None:
        self._load("weights", folder, version)

    def _load(self, kind: str, folder: Path, version: int) -> None:
        self.loaded.append((kind, folder.name, version))
        self.version = self.version if self.is_stuck else version

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(scope="session")
def broadcast() -> Callable[..., Path]:
    """Writes the weights of a step as a trainer does; returns their folder."""

    def write(
        folder: Path,
        step: int,
        *,
        is_adapter: bool = True,
        stable: bool = True,
        weights: bytes = ADAPTER,
        config: str = "{}",
    ) -> Path:
        target = folder / "broadcasts" / f"step_{step}"
        target.mkdir(parents=True, exist_ok=True)
        if is_adapter:
            (target / "adapter_config.json").write_text(config, encoding="utf-8")
        (target / ("adapter_model.safetensors" if is_adapter else "model.safetensors")).write_bytes(weights)
        if stable:
            (target / "STABLE").touch()
        return target

    return write


@pytest.fixture
def sent() -> Callable[[Path], list[str]]:
    """Names of the steps in an output folder."""
    return lambda folder: sorted(path.name for path in (folder / "rollouts").glob("step_*"))


@pytest.fixture
def batch(make_batch: Callable[..., TrainBatch]) -> TrainBatch:
    return make_batch([6, 9, 5])


@pytest.fixture
def drawing() -> tuple[list[SampleRequest], SamplingParams]:
    """What `sample` is asked for: two completions of one prompt."""
    return [SampleRequest(prompt_T=np.array([1, 2]), seeds_G=(5, 6))], SamplingParams(max_tokens=4, temperature=0.7)


@pytest.fixture
def backend(tmp_path: Path) -> Callable[..., tuple[PrimeRlBackend, NotingEngine]]:
    """A backend over files, two ranks, and its engine; it does not wait unless told to."""

    def make(sent: int = 0, **options: object) -> tuple[PrimeRlBackend, NotingEngine]:
        settings = PrimeRlOptions(**({"sync_wait_s": 0.0, "sync_poll_s": 0.01, "seq_len": 64} | options))
        engine = NotingEngine()
        made = PrimeRlBackend(
            options=settings,
            output_dir=tmp_path,
            transport=FileTransport(tmp_path, rank_files(2)),
            encode=lambda batch, step: [encode(part) for part in pack(batch, Layout(seq_len=64, ranks=2))],
            engine=engine,
            policy=RemotePolicy(model_path="m", stop_ids=frozenset({0}), context_limit=64),
            capabilities=CAPABILITIES,
            sent=sent,
        )
        return made, engine

    return make
