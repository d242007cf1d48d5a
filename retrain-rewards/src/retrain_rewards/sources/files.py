"""The `files` source: your own JSONL, JSON, CSV and Parquet files."""

from __future__ import annotations

import glob
from difflib import get_close_matches
from pathlib import Path

from retrain.api import ConfigError, LoadedData, PluginContext, Problem, Table
from retrain_rewards.sources.collector import Collector
from retrain_rewards.sources.columns import plain, prompt_of, reference_text, require_columns
from retrain_rewards.sources.rows import SUFFIXES, read_rows
from retrain_rewards.sources.settings import options_of


class FilesOptions(Table):
    """`[data.options]` of `files`: none; `path`, `prompt_key` and `answer_key` are keys of `[data]`."""


class Files:
    """Every row of the files under `[data] path`: one task from its prompt and answer columns, the others in `info`."""

    def __init__(self, context: PluginContext) -> None:
        options_of(context, FilesOptions)
        self.data = context.config.data
        self.place = context.config.place

    def load(self) -> LoadedData:
        """Read all files, sorted by name; ConfigError says which file and line cannot be used."""
        if self.data.prompt_key == self.data.answer_key:
            what = f"{self.data.answer_key!r} is also the column of the prompt"
            raise _problem(self.place("data.answer_key"), what, "name the column that holds the answer")
        files = find_files(self.data.path, where=self.place("data.path"))
        collector = Collector(source="files")
        for file in files:
            self._read(file, collector)
        read_from = str(files[0]) if len(files) == 1 else f"{len(files)} files of {self.data.path}"
        return collector.finish(where=self.place("data.path"), read_from=read_from)

    def _read(self, file: Path, collector: Collector) -> None:
        prompt_key, answer_key = self.data.prompt_key, self.data.answer_key
        columns = {prompt_key: self.place("data.prompt_key"), answer_key: self.place("data.answer_key")}
        for row in require_columns(read_rows(file), columns, file=str(file)):
            collector.add(
                prompt_of(row.values.get(prompt_key), row.place),
                reference_text(row.values.get(answer_key), row.place),
                place=row.place,
                task="files",
                info=plain({name: value for name, value in row.values.items() if name not in columns}),
            )


def make_files(context: PluginContext) -> Files:
    """The `files` data source."""
    return Files(context)


def find_files(path: str, *, where: str) -> list[Path]:
    """The files of a path, folder or pattern, sorted; ConfigError when there are none."""
    if not path.strip():
        raise _problem(where, "no file given", 'set [data] path, for example path = "tasks.jsonl"')
    if "://" in path:
        raise _problem(where, f"{path!r} is not a local path", "download the files first")
    target = Path(path).expanduser()
    if target.is_file():
        return [target]
    if target.is_dir():
        found = sorted(file for file in target.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)
        if not found:
            raise _problem(where, f"folder {path!r} holds no data file", f"put one there: {', '.join(SUFFIXES)}")
        return found
    matched = sorted(Path(name) for name in glob.glob(str(target), recursive=True))
    matched = [file for file in matched if file.is_file()]
    if not matched and target.exists():
        raise _problem(where, f"{path!r} is neither a file nor a folder", "give a file with one task per row")
    if not matched:
        raise _problem(where, f"no such file or folder: {path!r}", _nearest(target))
    return matched


def _nearest(target: Path) -> str:
    try:
        siblings = [entry.name for entry in target.parent.iterdir()]
    except OSError:
        return f"check the path; {str(target.parent)!r} is not a readable folder"
    near = get_close_matches(target.name, siblings, n=1)
    return f"did you mean {str(target.parent / near[0])!r}?" if near else "check the path"


def _problem(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(where=where, what=what, fix=fix))
