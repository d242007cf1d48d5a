"""Variants of kernels compiled ahead of time for a card that is not there, and the registers that they take.

Triton's wheel brings the assembler and the tool that reads its result.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.fake_gpu.specialisation import CONSTANT, Specialisation

# Shared memory that a program may take, by compute capability.
SHARED_BYTES = {89: 99 * 1024, 90: 227 * 1024}
WARP = 32
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
FP8_FROM = 89


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """`spilled_bytes` of a thread are moved to memory for lack of registers."""

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    uses_tensor_cores: bool

    @property
    def fits(self) -> bool:
        return not self.spilled_bytes and self.shared_bytes <= SHARED_BYTES[self.capability]


def compile_for(variant: Specialisation, kernel: Any, capability: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {p.name: p.value for p in variant.parameters if p.type == CONSTANT}
    aligned = {(at,): [["tt.divisibility", 16]] for at, p in enumerate(variant.parameters) if p.is_aligned}
    signature = {p.name: p.type for p in variant.parameters}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, WARP)
    made = triton.compile(source, target=target, options=dict(variant.options))
    registers, spilled = _usage(made.asm["cubin"], Path(triton.__file__).parent)
    return Compiled(
        name=variant.name,
        capability=capability,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=made.metadata.shared,
        uses_tensor_cores=bool(re.search(r"mma\.sync|wgmma", made.asm["ptx"])),
    )


def _usage(binary: bytes, root: Path) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        tool = root / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    match = USAGE.search(said)
    if match is None:
        raise ValueError(f"cuobjdump says nothing of registers: {said}")
    registers, stack, local = map(int, match.groups())
    return registers, stack + local
