"""Sizes of well-known models, so that capacity can be asked about a model that is not on this machine.

`shapes.csv` holds what the `config.json` of each model says, a line per shape, with the parameters that its authors
publish (of Gemma 3 those of the language model) and the hub ids; `ID@N` has a context of its own.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem

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
    """A line of the table: the ids of the models, their context, `config.json`, and published parameters."""

    contexts: Mapping[str, int]
    document: Document
    parameters: int

    @property
    def name(self) -> str:
        """The first of the ids."""
        return next(iter(self.contexts))


@cache
def known_shapes() -> tuple[KnownShape, ...]:
    """The table, in its order."""
    with TABLE.open(encoding="utf-8", newline="") as stream:
        return tuple(_shape(row) for row in csv.DictReader(stream))


def _shape(row: dict[str, str]) -> KnownShape:
    names, millions = row.pop("models").split(), row.pop("millions")
    document: dict[str, int | str | bool] = {name: int(text) for name, text in row.items() if text.isdecimal()}
    document |= {"model_type": row["model_type"], "tie_word_embeddings": row["tie_word_embeddings"] == "1"}
    split = [name.partition("@") for name in names]
    contexts = {name: int(own or row["max_position_embeddings"]) for name, _, own in split}
    return KnownShape(contexts=contexts, document=document, parameters=round(1e6 * float(millions)))


def known_document(name: str) -> Document | None:
    """The `config.json` of a model in the table, whatever the case of its id; None for any other model."""
    for shape in known_shapes():
        for known, context in shape.contexts.items():
            if known.lower() == name.lower():
                return {**shape.document, "max_position_embeddings": context}
    return None


def nearest(name: str) -> str:
    """The known id that looks most like `name`, whose organisation may be missing; "" if none does."""
    wanted = name.lower().rpartition("/")[2]
    by_end = {known.lower().rpartition("/")[2]: known for shape in known_shapes() for known in shape.contexts}
    found = get_close_matches(wanted, by_end, n=1)
    return by_end[found[0]] if found else ""


def write_document(document: Document, folder: Path) -> Path:
    """`folder`, with this `config.json` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def document_of(sizes: Mapping[str, int | bool | None]) -> Document | None:
    """A `config.json` from the options of the command line; None when none of them is given.

    ConfigError when one is missing that no default can stand for.
    """
    given = {OPTIONS[name]: value for name, value in sizes.items() if value}
    if not given:
        return None
    if missing := [name for name in NEEDED if not sizes.get(name)]:
        flags = ", ".join(f"--{name}" for name in missing)
        raise ConfigError(Problem(where="--layers ...", what=f"{flags} missing", fix=f"give {flags} as well"))
    return {"model_type": "llama", "tie_word_embeddings": False, **given}
