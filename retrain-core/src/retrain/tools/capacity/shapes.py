"""Sizes of well-known models, for questions about a model that is not on this machine.

`shapes.csv` holds the sizes in each model's `config.json`, a line per shape, with the parameters that its authors
publish (of Gemma 3 only the language model's) and the hub ids; `ID@N` has another context than its shape.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.hub import hub_options

TABLE = Path(__file__).with_name("shapes.csv")
NEEDED = ("layers", "hidden", "heads", "vocabulary")
OPTIONS = {  # of the command line, and the names in a `config.json`
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
    "tied": "tie_word_embeddings",
}
Document = Mapping[str, int | str | bool]  # a `config.json`


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownShape:
    """A line of the table: the ids of the models with their context, `config.json`, and published parameters."""

    contexts: Mapping[str, int]
    document: Document
    parameters: int

    @property
    def name(self) -> str:
        return next(iter(self.contexts))


@cache
def known_shapes() -> tuple[KnownShape, ...]:
    found = []
    with TABLE.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            names, millions = row.pop("models").split(), row.pop("millions")
            document: dict[str, int | str | bool] = {name: int(text) for name, text in row.items() if text.isdecimal()}
            document |= {"model_type": row["model_type"], "tie_word_embeddings": row["tie_word_embeddings"] == "1"}
            split = [name.partition("@") for name in names]
            contexts = {name: int(context or row["max_position_embeddings"]) for name, _, context in split}
            found.append(KnownShape(contexts=contexts, document=document, parameters=round(1e6 * float(millions))))
    return tuple(found)


def known_document(name: str) -> Document | None:
    """Return the `config.json` of a model in the table, whatever the case of its id; None for any other model."""
    for shape in known_shapes():
        for known, context in shape.contexts.items():
            if known.lower() == name.lower():
                return {**shape.document, "max_position_embeddings": context}
    return None


def nearest(name: str) -> str:
    """Return the known id most like `name`, whose organisation may be missing; "" if none is."""
    wanted = name.lower().rpartition("/")[2]
    by_end = {known.lower().rpartition("/")[2]: known for shape in known_shapes() for known in shape.contexts}
    found = get_close_matches(wanted, by_end, n=1)
    return by_end[found[0]] if found else ""


def write_document(document: Document, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def document_of(sizes: Mapping[str, int | bool | None]) -> Document | None:
    """Return a `config.json` from the options of the command line; None without any of them.

    ConfigError when one is missing that has no default.
    """
    given = {OPTIONS[name]: value for name, value in sizes.items() if value}
    if not given:
        return None
    if missing := [name for name in NEEDED if not sizes.get(name)]:
        flags = ", ".join(f"--{name}" for name in missing)
        what, fix = f"{flags} missing", f"give {flags} as well"
        raise ConfigError(Problem(code="capacity.size-missing", where="--layers ...", what=what, fix=fix))
    return {"model_type": "llama", "tie_word_embeddings": False, **given}


FETCH_S = 20.0


def folder_of_known(name: str, where: str, *, fetch: bool, scratch: Path) -> Path:
    """Return a folder with the `config.json` of a model that is not here: the hub's cache, the table, the hub."""
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        near = nearest(name) if "/" not in name else ""
        fix = f"did you mean {near!r}?" if near else "give an existing folder, a hub id, or builtin:tiny"
        what = f"there is no model folder {name!r}"
        raise ConfigError(Problem(code="model.folder-missing", where=where, what=what, fix=fix))
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached).parent
        if document := known_document(name):
            return write_document(document, scratch / name)
        if not fetch:
            what = f"config.json of {name!r} is not in the hub's cache"
            fix = "`retrain capacity` downloads it: a few kilobytes"
            raise ConfigError(Problem(code="capacity.model-not-cached", where=where, what=what, fix=fix))
        found = hf_hub_download(name, "config.json", etag_timeout=FETCH_S, **hub_options(name, where=where))
    except ConfigError as error:
        raise ConfigError(*(replace(each, fix=f"{each.fix}{_or_sizes(name)}") for each in error.problems)) from None
    # The hub package lets the exceptions of its HTTP client through, whose types change between its versions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        what = f"config.json of {name!r} cannot be fetched: {type(error).__name__}: {reason}"
        fix = f"check name and connection, or give a folder{_or_sizes(name)}"
        raise ConfigError(Problem(code="capacity.model-not-fetched", where=where, what=what, fix=fix)) from None
    return Path(found).parent


def _or_sizes(name: str) -> str:
    near = nearest(name)
    known = f"; the nearest model of known size is {near}" if near else ""
    return f"; `retrain capacity` also takes its sizes: --layers, --hidden, --heads, --vocabulary{known}"
