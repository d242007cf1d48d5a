"""The file of one evaluation: what was evaluated on what, then a line per example, so that a stopped one goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Outcome, Score
from retrain.records.checkpoints import SUMS
from retrain.records.files import JsonLines, digest_of
from retrain.records.reading import read_records
from retrain.records.run import Run
from retrain.run.subject import Subject
from retrain.text.chat import prompt_text
from retrain.text.secrets import hide
from retrain.use.evaluate.evaluation import Record
from retrain.use.evaluate.loading import LoadedSet

SMALL_BYTES = 2**28  # a larger file of a model counts by its size and time


class ResultFile:
    """`<folder>/<checkpoint>/<set>-<hash>.jsonl`; the hash is of all that decides the samples and their scores."""

    def __init__(self, folder: Path, subject: Subject, each: LoadedSet) -> None:
        self._header = _header(subject, each)
        text = json.dumps(self._header, sort_keys=True)
        code = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        self.path = folder / (subject.checkpoint or "model") / f"{each.name}-{code}.jsonl"

    def read(self, prompts: Sequence[Prompt], at_once: int) -> list[Record]:
        """The records of the examples that are done, whole portions of `at_once`; what follows them is cut off.

        ConfigError when the file is damaged.
        """
        if not self.path.exists():
            return []
        found = [record for _, record in read_records(self.path)]
        if not found:  # stopped while it wrote its first line
            self.path.unlink()
            return []
        names = [record.get("example") for record in found[1:]]
        if found[:1] != [self._header] or names != [prompt.example.id for prompt in prompts[: len(names)]]:
            what = "is not the record of this evaluation"
            raise ConfigError(Problem(where=str(self.path), what=what, fix="remove it"))
        whole = len(names) if len(names) == len(prompts) else len(names) // at_once * at_once
        with self.path.open("r+b") as stream:
            for _ in range(whole + 1):
                stream.readline()
            stream.truncate(stream.tell())
        return found[1 : whole + 1]

    def append(self, records: Sequence[Record]) -> None:
        """Add the records of further examples, all or none of them; RecordError when the disk refuses."""
        is_new = not self.path.exists()
        with closing(JsonLines(self.path)) as lines:
            lines.write([self._header, *records] if is_new else records)
            lines.sync()


def scores_of(record: Record) -> tuple[Score, ...]:
    """The scores of a record's samples."""
    parts: Mapping[str, Sequence[float | None]] = record.get("parts", {})
    scores = _scores(record)
    shadows = _scores(record, "shadow_") if "shadow_scores" in record else [None] * len(scores)
    return tuple(
        replace(
            score,
            parts={name: found for name, all_G in parts.items() if (found := all_G[index]) is not None},
            shadow=shadow,
        )
        for index, (score, shadow) in enumerate(zip(scores, shadows, strict=True))
    )


def _scores(record: Record, prefix: str = "") -> list[Score]:
    values: Sequence[float | None] = record[f"{prefix}scores"]
    outcomes = record.get(f"{prefix}outcomes") or [Outcome.SCORED.value] * len(values)
    return [Score(outcome=Outcome(name), value=value) for value, name in zip(values, outcomes, strict=True)]


def own_records(run: Path, step: int, name: str) -> list[Record]:
    """What a run recorded itself about a set after a step; none where it did not evaluate then."""
    return [record for record in Run(run).evaluations() if (record.get("step"), record.get("set")) == (step, name)]


def _header(subject: Subject, each: LoadedSet) -> dict[str, Any]:
    config = each.context.config
    digest = hashlib.blake2b(digest_size=16)
    for prompt in each.prompts:
        parts = (prompt.example.id, prompt_text(prompt.example), prompt.example.reference)
        digest.update(json.dumps(parts).encode() + prompt.tokens_T.tobytes())
    params = each.params
    return {
        "model": subject.model,
        "checkpoint": subject.checkpoint,
        "steps": subject.steps,
        "weights": _weights(subject.folder or Path(config.model.model).expanduser()),
        "set": each.name,
        "examples": len(each.prompts),
        "examples_digest": digest.hexdigest(),
        "samples": each.samples,
        "seed": each.seeds.apart.get("eval", each.seeds.root),
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "greedy": params.greedy,
        "engine": str(config.inference.engine),
        "rewards": list(each.verifier.names),
        "reward": hide(config.as_dict().get("reward", {})),
        "correct_above": config.scoring.correct_above,
        "cluster": each.cluster,
    }


def _weights(folder: Path) -> str:
    """A digest of the weights: by the checksums of a checkpoint, or by the files of a folder; empty for a hub id."""
    if (folder / SUMS).is_file():
        return digest_of(folder / SUMS).hexdigest()
    if not folder.is_dir():
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        size, time_ns = file.stat().st_size, file.stat().st_mtime_ns
        content = digest_of(file).hexdigest() if size <= SMALL_BYTES else f"{size} {time_ns}"
        digest.update(f"{file.name} {content}\n".encode())
    return digest.hexdigest()
