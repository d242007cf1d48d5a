"""Compares the records of a run with the checksums in its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError
from retrain.records.files import digest_of
from retrain.records.folder import CHECKSUMS, SIZES
from retrain.records.reading import parse_record, read_steps
from retrain.records.record_names import TOKEN_FILES, token_file

MOST_NAMED = 5  # damaged token files


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordCheck:
    """The records of a run compared with its checkpoint: a resume continues from `digests`.

    `damaged` names files that have changed; `notices` refuse no resume.
    """

    digests: Mapping[str, blake2b] = field(default_factory=dict)
    damaged: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()


def check_records(run: Path, state: Mapping[str, Any]) -> RecordCheck:
    """Compare the records of a run with the checksums in a checkpoint's state; missing token files are a notice."""
    sizes, wanted = state[SIZES], state[CHECKSUMS]
    digests = {name: digest_of(run / name, int(size)) for name, size in sizes.items()}
    damaged = [name for name in sizes if digests[name].hexdigest() != wanted.get(name)]
    found = [_damage(run / name) for name in damaged]
    # A damaged list would accuse intact token files.
    bad, missing = ([], []) if TOKEN_FILES in damaged else _token_files(run, sizes.get(TOKEN_FILES, 0))
    found += [f"{file} is damaged: its checksum differs" for file in bad[:MOST_NAMED]]
    found += [f"{len(bad) - MOST_NAMED} more token files are damaged"] if len(bad) > MOST_NAMED else []
    notices: tuple[str, ...] = ()
    if missing:
        files = "1 token file is" if len(missing) == 1 else f"{len(missing)} token files are"
        notices = (f"{files} missing, first {missing[0]}: `retrain credit` cannot show such a step",)
    return RecordCheck(digests=digests, damaged=tuple(found), notices=notices)


def _damage(file: Path) -> str:
    """Return where a damaged file shows it: at a line that cannot be read, if there is one."""
    try:
        for _ in read_steps(file):
            pass
    except ConfigError as error:
        return f"{error.problems[0].where} is damaged: {error.problems[0].what}"
    return f"{file} is damaged: its checksum differs, yet every line can be read"


def _token_files(run: Path, size: int) -> tuple[list[Path], list[Path]]:
    """Return the damaged and the missing token files among those in the first `size` bytes of the list."""
    damaged, missing = [], []
    with (run / TOKEN_FILES).open("rb") as stream:
        lines = [parse_record(line) for line in stream.read(size).splitlines()]
    for line in lines:
        file = token_file(run, int(line["step"]))
        try:
            if digest_of(file).hexdigest() != line["blake2b"]:
                damaged.append(file)
        except FileNotFoundError:
            missing.append(file)
        except OSError:
            damaged.append(file)
    return damaged, missing
