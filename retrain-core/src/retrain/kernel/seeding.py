"""Derives an independent stream of random numbers for every purpose from one root seed.

A stream is keyed by (purpose, step, ...) and derived afresh whenever it is needed. A resume therefore needs no stored
generator state, and neither the batch size nor the number of workers can shift what another stream draws.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from numpy.random import Generator, Philox

Key = str | int
# Fits a signed 64-bit integer, as torch and every inference server require.
SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Seeds:
    """The root seed of a run, a non-negative integer, and the seeds of purposes that are set `apart` from it."""

    root: int
    apart: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def from_config(cls, seed: int) -> Seeds:
        """Use `seed`, or draw one from the operating system when it is -1; the run records the one drawn."""
        return cls(secrets.randbits(31) if seed < 0 else seed)

    def derive(self, purpose: str, *keys: Key) -> int:
        """Integer in [0, 2**63) that depends on the purpose's seed, the purpose and every key, and on nothing else."""
        root = self.apart.get(purpose, self.root)
        # JSON keeps numbers apart from text, and keys apart from each other.
        text = json.dumps([root, purpose, *keys])
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> (64 - SEED_BITS)

    def stream(self, purpose: str, *keys: Key) -> Generator:
        """Independent generator for this purpose and these keys."""
        return generator(self.derive(purpose, *keys))


def generator(seed: int) -> Generator:
    """Counter-based (Philox) generator of one derived seed: cheap to make, one per completion."""
    return Generator(Philox(seed))
