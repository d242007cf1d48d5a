"""Compares the tasks that a resumed run loads with those that it started with, whatever they were read from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from retrain.kernel.errors import Problem, ResumeError
from retrain.records.identity.hashing import DIGEST_BYTES
from retrain.tasks.tasks import Tasks
from retrain.text.chat import prompt_text

LOG = logging.getLogger("retrain")
KEY = "examples"


@dataclass(slots=True, kw_only=True)
class ExampleCheck:
    """Called with the tasks before the model loads; `entry` is then what `run.json` keeps about them.

    `before` is the `run.json` of the resumed run, empty for a new one. ResumeError when a source gives other tasks, or
    with `anyway` a line in `accepted`. A run that recorded none is not compared.
    """

    before: Mapping[str, Any] = field(default_factory=dict)
    anyway: bool = False
    entry: dict[str, Any] = field(default_factory=dict)
    accepted: list[str] = field(default_factory=list)

    def __call__(self, tasks: Tasks) -> None:
        digest = blake2b(digest_size=DIGEST_BYTES)
        for prompt in tasks.prompts:
            for part in (prompt_text(prompt.example), prompt.example.reference, prompt.example.task):
                digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
        found = {"train": len(tasks.pool.train), "held_out": len(tasks.pool.held_out), "digest": digest.hexdigest()}
        self.entry = {KEY: found}
        before = self.before.get(KEY)
        if not isinstance(before, dict) or before == found:
            return
        was, now = (f"{each.get('train')} to train on, {each.get('held_out')} held out" for each in (before, found))
        counts = f"{now} as before, but prompts, references or order differ" if was == now else f"{was}, and now {now}"
        what = f"the data source gives other examples: {counts}"
        if not self.anyway:
            why = "the run would not be the one that was stopped"
            fix = "bring the data back as it was, or insist with --resume-anyway"
            raise ResumeError(Problem(where="[data] source", what=what, why=why, fix=fix))
        LOG.warning("Resuming although %s", what)
        self.accepted.append(what)
