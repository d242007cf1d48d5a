"""The `math` source: the MATH competition problems (Hendrycks et al. 2021), from the hub or a local folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from retrain.api import LoadedData, PluginContext, Table, key
from retrain_rewards.boxed import last_boxed
from retrain_rewards.faults import refused
from retrain_rewards.sources.collector import Collector, refuse_foreign_keys, split_text
from retrain_rewards.sources.files import data_files
from retrain_rewards.sources.rows import SUFFIXES, Row, hub_rows, numbered, read_rows
from retrain_rewards.sources.table_source import absence, prompt_of, reference_text, require_columns

HUB_NAME = "EleutherAI/hendrycks_math"
Subject = Literal[
    "intermediate_algebra",
    "precalculus",
    "number_theory",
    "counting_and_probability",
    "geometry",
    "algebra",
    "prealgebra",
]
DEFAULT_SUBJECTS = ["intermediate_algebra", "precalculus", "number_theory", "counting_and_probability", "geometry"]
Subjects = Annotated[list[Subject], BeforeValidator(split_text), Field(min_length=1)]


class MathOptions(Table):
    """`[data.options]` of `math`."""

    subjects: Subjects = key(DEFAULT_SUBJECTS, "Subjects, in this order.")
    split: str = key("train", "Split: train or test.", min_length=1)


class Math:
    """The MATH problems; the train split of the five default subjects has 4,551 rows, all seven have 7,500."""

    def __init__(self, context: PluginContext) -> None:
        refuse_foreign_keys(context, "math", ("prompt_key", "answer_key"))
        self.options: Any = context.params
        self.path = context.config.data.path
        self.where = context.config.place("data.path" if self.path else "data.source")

    def load(self) -> LoadedData:
        collector = Collector(source="math")
        subjects = list(dict.fromkeys(self.options.subjects))
        for subject in subjects:
            for row in self._rows(subject):
                solution = reference_text(row.values.get("solution"), row.place)
                collector.add(
                    prompt_of(row.values.get("problem"), row.place),
                    last_boxed(solution),
                    place=row.place,
                    absent=absence(row.values.get("solution"), "boxed"),
                    task=subject,
                    info={name: str(row.values[name]) for name in ("level", "type") if name in row.values},
                )
        read_from = f"{self.path or HUB_NAME}, split {self.options.split}: {', '.join(subjects)}"
        return collector.finish(where=self.where, read_from=read_from)

    def _rows(self, subject: str) -> Iterator[Row]:
        if not self.path:
            rows = hub_rows(HUB_NAME, subject, self.options.split, where=self.where)
            yield from numbered(f"{HUB_NAME} {subject}", rows)
            return
        columns = dict.fromkeys(("problem", "solution"), "source 'math'")
        for file in subject_files(self.path, subject, self.options.split, where=self.where):
            yield from require_columns(read_rows(file), columns, file=str(file))


def subject_files(path: str, subject: str, split: str, *, where: str) -> list[Path]:
    """Return the files of one subject and split in a local copy, sorted.

    They are `SUBJECT/SPLIT*.parquet` (the hub's own layout), any `SUBJECT/*` when no file there names a split,
    `SUBJECT.jsonl` or `SUBJECT-SPLIT.jsonl`; each may also be inside a folder `SPLIT/`.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        why = "a local copy of the MATH problems is a folder with one sub-folder or file per subject"
        fix = "check the path, or remove it to load from the hub"
        raise refused(where, code="data.path-missing", what=f"no such folder: {path!r}", why=why, fix=fix)
    for parent in (root / split, root):
        files = data_files(parent / subject) if (parent / subject).is_dir() else []
        named = [file for file in files if file.stem.split("-")[0] in ("train", "test", "validation", split)]
        if found := [file for file in named if file.stem.split("-")[0] == split] if named else files:
            return found
        for stem in (f"{subject}-{split}", f"{subject}_{split}", subject):
            if found := [file for suffix in SUFFIXES if (file := parent / f"{stem}{suffix}").is_file()]:
                return found
    what = f"no files of subject {subject!r}, split {split!r}, in {path!r}"
    why = f"found there: {', '.join(sorted(entry.name for entry in root.iterdir())[:10]) or 'nothing'}"
    fix = f"add {subject}/{split}.jsonl, or leave the subject out of [data.options] subjects"
    raise refused(where, code="data.subject-missing", what=what, why=why, fix=fix)
