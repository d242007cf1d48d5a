"""The sources that read tables: `files`, `hub`, and well-known data sets of the hub by name.

The columns of the known data sets are as of 2025; where one differs, the error names the columns that were found, and
`[data] prompt_key`, `answer_key` and `path` (a local copy, or another data set of the same shape) override these.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import ClassVar

from retrain.api import ConfigError, Reward, key
from retrain_rewards.faults import refused
from retrain_rewards.sources.rows import SUFFIXES, Row, hub_rows, is_saved, numbered, read_rows, saved_rows
from retrain_rewards.sources.table_source import Extract, TableOptions, TableSource, Task
from retrain_rewards.verifiers.countdown import CountdownReward, question

TRAIN = "train"
# As the hub's own rules read file names.
SPLITS = {
    **dict.fromkeys((TRAIN, "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
MOST_NAMED = 10

COPY = "its folder as the hub lays it out, one of save_to_disk, or a file"
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


class HubOptions(TableOptions):
    """`[data.options]` of `hub` and of the presets."""

    split: str = key(TRAIN, "Split: train, test, validation, ...", min_length=1)
    revision: str = key("", "Branch, tag or commit of the data set; empty = the newest.")


class Files(TableSource):
    """Every row of the files under `[data] path`."""

    name: ClassVar[str] = "files"

    found: Sequence[Path] = ()

    def parts(self) -> Iterator[tuple[str, Iterator[Row]]]:
        options, where = self.options, self.place("data.path")
        folder = Path(self.path).expanduser()
        if self.path.strip() and folder.is_dir() and is_saved(folder):
            yield saved_part(folder, options.split, where)
            return
        self.found = find_files(self.path, where=where, subset=options.subset, split=options.split)
        yield from ((str(file), read_rows(file)) for file in self.found)

    def read_from(self) -> str:
        single = str(self.found[0]) if self.found else self.path
        return single if len(self.found) < 2 else f"{len(self.found)} files of {self.path}"


class Hub(TableSource):
    """One split of a data set of the hub, named by `[data] path`, or of a local copy."""

    name: ClassVar[str] = "hub"
    hub_id: ClassVar[str] = ""
    subset: ClassVar[str] = ""

    def parts(self) -> Iterator[tuple[str, Iterator[Row]]]:
        options, name, copy = self.options, self.path or self.hub_id, Path(self.path).expanduser()
        if self.path and copy.is_dir() and is_saved(copy):
            yield saved_part(copy, options.split, self.where())
        elif self.path and copy.is_dir():
            files = split_files(
                copy, self._subset(), options.split, where=self.where(), may_lack_subset=not options.subset
            )
            yield from ((str(file), read_rows(file)) for file in files)
        elif self.path and copy.is_file():
            yield str(copy), read_rows(copy)
        elif not HUB_ID.fullmatch(name) or name.lower().endswith(SUFFIXES):
            what = f"{name!r} is neither a local folder or file nor the id of a data set"
            fix = 'set [data] path, for example path = "openai/gsm8k"'
            raise refused(self.where(), code="data.not-a-data-set", what=what, fix=fix)
        else:
            rows = hub_rows(
                name, self._subset(), options.split, where=self.where(), revision=options.revision, copy=COPY
            )
            yield name, numbered(name, rows)

    def read_from(self) -> str:
        options = self.options
        parts = (self.path or self.hub_id, self._subset(), f"split {options.split}", options.revision)
        return ", ".join(filter(None, parts))

    def _subset(self) -> str:
        return str(self.options.subset) or self.subset


def saved_part(folder: Path, split: str, where: str) -> tuple[str, Iterator[Row]]:
    return str(folder), numbered(str(folder), saved_rows(folder, split or TRAIN, where=where))


def find_files(path: str, *, where: str, subset: str = "", split: str = "") -> list[Path]:
    """Return the files of a path, folder or pattern, sorted; in a folder its own, or its `subset` and `split`."""
    if not path.strip():
        fix = 'set [data] path, for example path = "tasks.jsonl"'
        raise refused(where, code="data.no-path", what="no file given", fix=fix)
    if "://" in path:
        raise refused(where, code="data.remote-path", what=f"{path!r} is a URL", fix="download the files first")
    target = Path(path).expanduser()
    if target.is_file():
        return [target]
    if target.is_dir():
        own = [] if subset or split else data_files(target)
        return own or split_files(target, subset, split, where=where)
    matched = sorted(file for name in glob.glob(str(target), recursive=True) if (file := Path(name)).is_file())
    if not matched:
        siblings = [entry.name for entry in target.parent.iterdir()] if target.parent.is_dir() else []
        near = get_close_matches(target.name, siblings, n=1)
        fix = f"did you mean {str(target.parent / near[0])!r}?" if near else "check the path"
        raise refused(where, code="data.path-missing", what=f"no such file or folder: {path!r}", fix=fix)
    return matched


def data_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)


def split_of(name: str) -> str:
    return next((SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS), "")


def split_files(folder: Path, subset: str, split: str, *, where: str, may_lack_subset: bool = False) -> list[Path]:
    """Return the files of one subset and split, sorted; ConfigError lists the folder's own ones.

    Files lie in the folder itself, in `data/`, in a folder named like the subset, or in one per split. A file belongs
    to the split in its name (`train-00000-of-00001.parquet`, `gsm8k_test.jsonl`), or in its folder's name, or to
    `train`; an empty `split` means `train` too. `may_lack_subset`: a folder without that sub-folder will do.
    """
    root = folder / subset
    if not root.is_dir():
        names = [entry.name for entry in _folders(folder)]
        if not may_lack_subset:
            what = f"{str(folder)!r} has no subset {subset!r}"
            fix = "name a subset that it has in [data] options"
            raise _other(where, names, code="data.unknown-subset", what=what, fix=fix)
        root = folder
    files, wanted = _files_below(root, where), SPLITS.get(split.lower(), split.lower()) or TRAIN
    inside = {file: "" if file.parent in (root, root / "data") else split_of(file.parent.name) for file in files}
    splits = {file: split_of(file.stem) or inside[file] for file in files}
    # A split with an unusual name (`train_sft`) is found as a word of the file's name.
    found = [file for file in files if splits[file] == wanted or wanted in re.split(r"[^\w]+", file.stem.lower())]
    found = found or [file for file in files if wanted == TRAIN and not splits[file]]
    if not found:
        what = f"{str(folder)!r} has no split {wanted!r}"
        fix = "name a split that it has in [data] options"
        raise _other(where, sorted({*splits.values()} - {""}), code="data.unknown-split", what=what, fix=fix)
    return found


def _files_below(root: Path, where: str) -> list[Path]:
    places = [place for place in (root, root / "data") if place.is_dir()]
    for place in places:
        if found := data_files(place):
            return found
    filled = {entry: found for place in places for entry in _folders(place) if (found := data_files(entry))}
    of_splits = [file for entry, found in filled.items() if split_of(entry.name) for file in found]
    if not filled:
        what, fix = f"folder {str(root)!r} holds no data file", f"put one there: {', '.join(SUFFIXES)}"
        raise refused(where, code="data.empty-folder", what=what, fix=fix)
    if not of_splits and len(filled) > 1:
        what = f"{str(root)!r} has several subsets"
        fix = "name one subset in [data] options"
        raise _other(where, [entry.name for entry in filled], code="data.several-subsets", what=what, fix=fix)
    return of_splits or next(iter(filled.values()))


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _other(where: str, names: Sequence[str], *, code: str, what: str, fix: str) -> ConfigError:
    found = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "") or "none"
    example = f', such as "{names[0]}"' if names else ""
    return refused(where, code=code, what=what, why=f"found: {found}", fix=fix + example)


# Data is unchecked, and the search for a puzzle's solution grows factorially.
MOST_NUMBERS = 8
# The text around the problems of DAPO-Math: it requests another form of answer than [data] instruction does.
_DAPO_HEAD = re.compile(
    r"\ASolve the following math problem step by step\..*?is the answer to the problem\.\s*", re.DOTALL
)
_DAPO_TAIL = re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*\Z")


class Gsm8k(Hub):
    """Grade-school word problems (Cobbe et al. 2021): 7,473 to train on, 1,319 in the test split."""

    name: ClassVar[str] = "gsm8k"
    hub_id: ClassVar[str] = "openai/gsm8k"
    subset: ClassVar[str] = "main"
    prompt_key: ClassVar[str] = "question"
    extract: ClassVar[Extract] = "hashes"


class DeepScaler(Hub):
    """Competition mathematics of DeepScaleR (2025), about 40,000 problems."""

    name: ClassVar[str] = "deepscaler"
    hub_id: ClassVar[str] = "agentica-org/DeepScaleR-Preview-Dataset"
    prompt_key: ClassVar[str] = "problem"


class DapoMath(Hub):
    """Competition mathematics (DAPO, 2025), about 17,000 problems; `[data] instruction` replaces the prompts' own."""

    name: ClassVar[str] = "dapo-math"
    hub_id: ClassVar[str] = "BytedTsinghua-SIA/DAPO-Math-17k"
    answer_key: ClassVar[str] = "reward_model.ground_truth"

    def task(self, row: Row) -> Task:
        task = super().task(row)
        prompt = task.prompt
        if not isinstance(prompt, str) and len(prompt) == 1:
            prompt = str(prompt[0]["content"])
        if isinstance(prompt, str):
            prompt = _DAPO_TAIL.sub("", _DAPO_HEAD.sub("", prompt))
        return replace(task, prompt=prompt)


class Countdown(Hub):
    """Number puzzles (TinyZero, 2025), about 490,000: reach a target with three or four numbers, each used once."""

    name: ClassVar[str] = "countdown"
    hub_id: ClassVar[str] = "Jiayi-Pan/Countdown-Tasks-3to4"
    prompt_key: ClassVar[str] = "nums"
    answer_key: ClassVar[str] = "target"
    reward: ClassVar[Reward | None] = CountdownReward()

    def task(self, row: Row) -> Task:
        # Numbers and target stay in `info`, where the verifier finds them.
        numbers, target = row.values.get(self.keys["prompt_key"]), row.values.get(self.keys["answer_key"])
        given = [*numbers, target] if isinstance(numbers, list) else []
        if not 1 < len(given) <= MOST_NUMBERS + 1 or not all(type(each) is int for each in given):
            what = f"not a puzzle: {numbers!r:.60} and {target!r:.60}"
            fix = f"give a list of 1 to {MOST_NUMBERS} whole numbers and a whole number as the target"
            raise refused(row.place, code="data.not-a-puzzle", what=what, fix=fix)
        return Task(prompt=question(given[:-1], given[-1]), reference=None, used=frozenset())
