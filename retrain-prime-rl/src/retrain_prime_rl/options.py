"""`[backend.options]` of the prime_rl backend."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from retrain.api import Table, key

PADDING = "must be a multiple of pad_to_multiple_of, or a full micro-batch could not be padded"


class PrimeRlOptions(Table):
    """How to reach a PRIME-RL trainer; `seq_len`, ranks, padding, ports and folder must match its own TOML."""

    output_dir: str = key(
        "", "PRIME-RL's output_dir, on a disk shared with its trainer; empty = [backend] adapter_path.", is_path=True
    )
    transport: Literal["filesystem", "zmq"] = key("filesystem", "How batches travel: filesystem or zmq.")
    wire: Literal["per_token", "scalar"] = key(
        "per_token", "per_token: PRIME-RL v0.8.1.dev3 or later; scalar: one advantage per sample, 0.4 and 0.5."
    )
    seq_len: int = key(2048, "Maximum tokens of a micro-batch; prompt and completion must fit together.", ge=2)
    data_world_size: int = key(1, "Data-parallel ranks of the trainer (per_token wire).", ge=1)
    pad_to_multiple_of: int = key(1, "Pad micro-batches to a multiple of this many tokens (per_token wire).", ge=1)
    zmq_host: str = key(
        "localhost", "Address to bind (per_token) or to connect to (scalar).", min_length=1, free_on_resume=True
    )
    zmq_port: int = key(
        5555,
        "Port of the batches; the next one collects the ranks that are ready.",
        ge=1,
        le=65534,
        free_on_resume=True,
    )
    zmq_hwm: int = key(10, "Messages that may queue up in a socket.", ge=1, free_on_resume=True)
    strict_advantages: bool = key(True, "Refuse credit that varies within a sample if the wire carries one number.")
    ready_wait_s: float = key(
        600.0, "Seconds to wait until every rank is ready to receive (zmq).", ge=0.0, free_on_resume=True
    )
    sync_wait_s: float = key(
        30.0, "Seconds to wait for the weights of a step after it was sent.", ge=0.0, free_on_resume=True
    )
    sync_poll_s: float = key(0.2, "Seconds between two checks for them.", gt=0.0, free_on_resume=True)
    sync_timeout: Literal["error", "stale"] = key(
        "error", "If they do not arrive: stop, or continue with older weights and count the step."
    )
    first_step: int = key(
        -1, "The step that the trainer waits for, by its count; -1 = found from output_dir.", ge=-1, free_on_resume=True
    )

    @property
    def counts_from(self) -> int:
        """The number of the trainer's first step: 1, and 0 on the older wire."""
        return 1 if self.wire == "per_token" else 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.strict_advantages:
            raise ValueError('strict_advantages = false would train on averages; use wire = "per_token" instead')
        if self.wire == "per_token" and self.seq_len % self.pad_to_multiple_of:
            raise ValueError(f"seq_len = {self.seq_len} {PADDING} = {self.pad_to_multiple_of}")
        if self.first_step == 0 and self.counts_from:
            raise ValueError("first_step = 0: the trainer counts its steps from 1")
        return self
