"""Faults between two processes: files that are damaged, cut, edited or changed while nobody has them open."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.records.checkpoints import checkpoint_folders
from tests.end_to_end.running import retrain
from tests.soak.configurations import CAMPAIGN, RUN
from tests.soak.faults import OBEYS_PERMISSIONS, Damage, anywhere, of_campaigns
from tests.soak.ground import Ground
from tests.soak.referee import everything, require


def flip(file: Path, stream: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[stream.randrange(len(content))] ^= 1 << stream.randrange(8)
    file.write_bytes(content)


def cut(file: Path, stream: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: stream.randrange(len(content))])


def delete(file: Path, stream: random.Random) -> None:
    file.unlink()


def checkpoint(spoil: Callable[[Path, random.Random], None]) -> Callable[[Ground], str]:
    """A file of the newest checkpoint: it is named and passed over, for the one before it or the beginning."""

    def strike(ground: Ground) -> str:
        folders = checkpoint_folders(ground.victim / "adapter")
        if not folders:
            return ""
        files = sorted(file for file in folders[0].rglob("*") if file.is_file() and file.stat().st_size)
        file = ground.stream.choice(files)
        spoil(file, ground.stream)
        told = retrain("status", str(ground.victim.relative_to(ground.folder)), "--resume", cwd=ground.folder)
        require(told.code == 0, f"status --resume after damage to {file}: {told.code} {told.out}{told.err}")
        require(folders[0].name in told.out, f"status --resume does not name {file}: {told.out}")
        return ""

    return strike


@contextmanager
def taken_back(file: Path) -> Iterator[Path]:
    content = file.read_bytes()
    try:
        yield file
    finally:
        file.write_bytes(content)


def refused(ground: Ground, name: str, *files: str, patch: str = "", code: int = 2) -> str:
    """A resume is refused: the code, the file or key named, a fix, nothing touched; what it said."""
    before = everything(ground.run)
    ended = ground.finish(ground.start(patch, *files))
    told = f"{name}: code {ended.code}: {(ended.out + ended.err)[-800:]}"
    require(ended.code == code and name in ended.err and "fix:" in ended.err and "Traceback" not in ended.err, told)
    after = everything(ground.run)
    changed = sorted(file for file in {**before, **after} if before.get(file) != after.get(file))
    require(not changed, f"{name}: a refused resume changed {changed} of {ground.run}")
    return ended.err


def record(spoil: Callable[[Path, random.Random], None]) -> Callable[[Ground], str]:
    """A record file within what the newest checkpoint knows of it: refused, and mended by putting it back."""

    def strike(ground: Ground) -> str:
        names = ["metrics.jsonl", "emergence/generations.jsonl", "emergence/steps.jsonl"]
        name = ground.stream.choice(names)
        known = _known_size(ground.victim, name)
        if not known:
            return ""
        with taken_back(ground.victim / name) as file:
            content = file.read_bytes()
            file.write_bytes(content[:known])
            spoil(file, ground.stream)
            return refused(ground, name)

    return strike


def _known_size(run: Path, name: str) -> int:
    """How much of a record the newest checkpoint vouches for."""
    for folder in checkpoint_folders(run / "adapter"):
        state = json.loads((folder / "checkpoint.json").read_text(encoding="utf-8"))
        return int(state["record_sizes"].get(name, 0))
    return 0


def unreadable(ground: Ground) -> str:
    file = ground.victim / "metrics.jsonl"
    file.chmod(0o000)
    try:
        return refused(ground, file.name, patch=OBEYS_PERMISSIONS, code=1)
    finally:
        file.chmod(0o644)


def torn_line(ground: Ground) -> str:
    """A line that a kill cut off: it is newer than the checkpoint and goes."""
    with (ground.victim / "metrics.jsonl").open("ab") as stream:
        stream.write(b'{"step": 99, "loss": 0.1')
    return ""


def trainer_state(ground: Ground) -> str:
    """Written for people: a resume does not read it."""
    (ground.victim / "trainer_state.json").unlink(missing_ok=True)
    return ""


def changed(name: str, text: str, put: str, told: str = "") -> Callable[[Ground], str]:
    """Another configuration, other code, other data: refused, and taken back.

    A resume reads the configuration that the run has kept, so that another one is named.
    """

    def strike(ground: Ground) -> str:
        with taken_back(ground.folder / name) as file:
            content = file.read_text(encoding="utf-8")
            require(text in content, f"{name} has no {text}")
            file.write_text(content.replace(text, put, 1), encoding="utf-8")
            return refused(ground, told or name, *([name] if name == RUN else []))

    return strike


SPOILT = {"bit flipped": flip, "truncated": cut, "file deleted": delete}
RIGHT, TWICE = "return float(example.reference == ", "return 2 * float(example.reference == "
DAMAGES = (
    *(Damage(name=f"checkpoint {name}", strike=checkpoint(spoil), suits=anywhere) for name, spoil in SPOILT.items()),
    Damage(name="record cut", strike=record(cut)),
    Damage(name="record bit flipped", strike=record(flip)),
    Damage(name="torn last line", strike=torn_line, suits=anywhere),
    Damage(name="trainer_state.json deleted", strike=trainer_state, suits=anywhere),
    Damage(name="code changed", strike=changed("parts.py", RIGHT, TWICE), suits=anywhere),
    Damage(name="data changed", strike=changed("sums.jsonl", "What is 2 + 2?", "What is 2 + 3?"), suits=anywhere),
    Damage(name="configuration changed", strike=changed(RUN, "lr = ", "lr = 1", "training.lr")),
    Damage(name="campaign changed", strike=changed(CAMPAIGN, "lr = ", "lr = 1", "lr"), suits=of_campaigns),
    Damage(name="record unreadable", strike=unreadable),
)
