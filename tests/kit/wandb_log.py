"""Reads the file that wandb writes while it is offline."""

import struct
from collections.abc import Iterator

BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def transactions(content: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log (github.com/google/leveldb/blob/main/doc/log_format.md) behind wandb's header."""
    assert content[:4] == b":W&B"
    at, parts = FILE_HEADER, b""
    while at + RECORD_HEADER <= len(content):
        left = BLOCK - at % BLOCK
        if left < RECORD_HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        body = content[at + RECORD_HEADER : at + RECORD_HEADER + length]
        at += RECORD_HEADER + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            yield parts
