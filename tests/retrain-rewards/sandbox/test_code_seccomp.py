"""The filter of system calls, played by an interpreter of classic BPF."""

from __future__ import annotations

import errno
import struct

import pytest

from retrain_rewards.sandbox.sandbox import (
    ALLOW,
    AUDIT,
    CLONE,
    CLONE3,
    CLONE_THREAD,
    DENIED,
    DENY,
    X32,
    system_call_filter,
)

REFUSED = DENY | errno.EPERM
READ = {"x86_64": 0, "aarch64": 63}


def played(filtered: bytes, architecture: int, number: int, flags: int = 0) -> int:
    """What the kernel would do with a call."""
    data = {0: number, 4: architecture, 16: flags}
    steps = list(struct.iter_unpack("=HBBI", filtered))
    value, place = 0, 0
    while True:
        code, then, otherwise, operand = steps[place]
        place += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            value = data[operand]
            continue
        holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        place += then if holds else otherwise


@pytest.mark.parametrize("machine", AUDIT)
def test_it_denies_what_a_program_does_not_need(machine: str) -> None:
    filtered, here = system_call_filter(machine), AUDIT[machine]
    assert played(filtered, here, READ[machine]) == ALLOW
    assert played(filtered, here, CLONE[machine], CLONE_THREAD | 0x100) == ALLOW  # a thread
    assert played(filtered, here, CLONE[machine], 17) == REFUSED  # a process
    assert played(filtered, here, CLONE3) == DENY | errno.ENOSYS
    assert {played(filtered, here, number) for number in DENIED[machine]} == {REFUSED}
    assert played(filtered, here, READ[machine] + X32) == REFUSED
    assert {played(filtered, other, READ[machine]) for other in (0x40000003, 0x40000028)} == {REFUSED}  # 32 bits


def test_an_unknown_machine_has_no_filter() -> None:
    assert system_call_filter("riscv64") == b""
