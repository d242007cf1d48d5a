"""Files of a base model: found in a folder, at the hub or in its cache, and those of a checkpoint of all weights."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from retrain.api import BackendError, Config, ConfigError, Plugins, Problem
from retrain_local.memory.limits import is_out_of_memory
from retrain_local.model.weights import INDEX, SINGLE, file_names

COMPANIONS = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
)
CONFIG_FILE, MASTER_FILE = "config.json", "master_weights.safetensors"
KEY = "model.model"
HUB_TIMEOUT_S = 10.0
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
log = logging.getLogger("retrain")
LAYERS_SERVED = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where weights come from: `path` is a folder or hub id; `offline`: do not contact the hub, use its cache."""

    path: str
    offline: bool


def find_model(config: Config, plugins: Plugins) -> Source:
    """The source of `[model] model`; see `find_source`."""
    return find_source(config.model.model, config.place(KEY), plugins)


def find_source(name: str, where: str, plugins: Plugins) -> Source:
    """A local folder with safetensors, a model that a plugin ships, or a hub id; ConfigError if it is none of them."""
    located = plugins.locate_model(name)
    path = Path(located or name).expanduser()
    if located is not None or path.is_dir():
        check_folder(path, where)
        return Source(path=str(path.resolve()), offline=True)
    if path.exists():
        what, fix = f"{name!r} is a file", "give the folder that holds config.json"
    elif name.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(name):
        what, fix = f"there is no folder {name!r}", "give an existing folder, a hub id, or builtin:tiny"
    else:
        return _on_the_hub(name, where)
    raise ConfigError(Problem(where=where, what=what, fix=fix))


def check_folder(folder: Path, where: str) -> None:
    """ConfigError unless the folder holds a readable config.json and safetensors weights."""
    file, why, fix = folder / "config.json", "", "give the complete folder of a transformers model"
    try:
        names = sorted(entry.name for entry in folder.iterdir())
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = f"not a model folder, {error.filename} is missing"
    except (OSError, ValueError) as error:
        what = f"{file} cannot be read: {error}"
    else:
        if not isinstance(document, dict) or "model_type" not in document:
            what = f"{file} names no model_type"
        elif {SINGLE, INDEX}.isdisjoint(names):
            pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
            why = f"it holds {pickled[0]}, and pickled weights can run code" if pickled else ""
            what, fix = f"{folder} holds no {SINGLE}", "save the model with save_pretrained()"
        else:
            return
    raise ConfigError(Problem(where=where, what=what, why=why, fix=fix))


def _on_the_hub(name: str, where: str) -> Source:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:  # one quick request first: loading by itself retries every file for half a minute
        HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        return Source(path=name, offline=False)
    except GatedRepoError:
        what = f"the hub shows {name!r} only to users who accepted its terms"
        fix = "accept them on its page, then run `hf auth login`"
    except RepositoryNotFoundError:
        what = f"there is no folder {name!r} here and no such model on the hub"
        fix = "correct the name; private models need `hf auth login`"
    except Exception as error:  # any network error, whichever client library the hub package uses
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            log.info("The hub cannot be reached; using the cached copy of %s.", name)
            return Source(path=name, offline=True)
        what = f"{name!r} is no folder here, is not in the cache, and the hub cannot be reached: {first_line(error)}"
        fix = "check the connection, or use builtin:tiny"
    raise ConfigError(Problem(where=where, what=what, fix=fix))


def first_line(error: BaseException) -> str:
    """Type and first line of an error, for a message to the user."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """`document` is config.json; `name` is what the user wrote, `where` the place it was written."""

    source: Source
    document: dict[str, Any]
    name: str
    where: str
    trust_remote_code: bool

    def weights(self) -> Path:
        """The folder that holds every safetensors file, downloaded first if it comes from the hub."""
        first = Path(self.source.path)
        if first.is_dir():
            return first
        index = _fetched(self.source, INDEX, required=False)
        if index is None:
            return _required(self.source, SINGLE).parent
        for name in file_names(index.parent):
            _required(self.source, name)
        return index.parent

    def eos_ids(self) -> frozenset[int]:
        """End-of-sequence ids of generation_config.json, or of config.json where there is none."""
        path = _fetched(self.source, "generation_config.json", required=False)
        document = self.document if path is None else json.loads(path.read_text(encoding="utf-8"))
        configured = document.get("eos_token_id")
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(int(id_) for id_ in ids if id_ is not None)

    def companions(self) -> tuple[Path, ...]:
        """The files of the tokenizer and of generation, for a checkpoint that is a model."""
        return tuple(path for name in COMPANIONS if (path := _fetched(self.source, name, required=False)) is not None)

    @contextmanager
    def refusals(self, device: torch.device) -> Iterator[None]:
        """Turn any error while reading the model into one that says what to do."""
        try:
            yield
        except (ConfigError, BackendError):
            raise
        except Exception as error:  # whatever a reader or an architecture raises, the configured model is at fault
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                what = f"the model does not fit on {device}: {first_line(error)}"
                raise BackendError(Problem(what=what, fix="use a smaller model or a larger GPU")) from error
            what = f"{self.name!r} cannot be loaded: {first_line(error)}"
            fix = "check that its files are complete and that this version of transformers knows its architecture"
            if "trust_remote_code" in str(error):
                fix = "set [model] trust_remote_code = true if you trust the code that comes with this model"
            raise ConfigError(Problem(where=self.where, what=what, fix=fix)) from error


def open_folder(config: Config, source: Source, name: str = "") -> Folder:
    """Read config.json of `[model] model`, or of `name`; ConfigError for layers whose state is not keys and values."""
    where, trust = config.place(KEY), config.model.trust_remote_code
    folder = Folder(source=source, document={}, name=name or config.model.model, where=where, trust_remote_code=trust)
    with folder.refusals(torch.device("cpu")):
        document = json.loads(_required(source, CONFIG_FILE).read_text(encoding="utf-8"))
    folder.document.update(document)
    refuse_recurrent(document, where)
    return folder


def refuse_recurrent(document: dict[str, Any], where: str) -> None:
    """ConfigError when a layer is not attention over all or a window of the earlier tokens."""
    text = document.get("text_config") or document
    kinds = set(text.get("layer_types") or ()) - LAYERS_SERVED
    if kinds:
        what = f"{document['model_type']} has {', '.join(sorted(kinds))} layers"
        why = "the local backend keeps keys and values of whole rows, and no other state, between tokens"
        raise ConfigError(Problem(where=where, what=what, why=why, fix="use a model with attention layers only"))


def _required(source: Source, name: str) -> Path:
    path = _fetched(source, name, required=True)
    assert path is not None
    return path


def _fetched(source: Source, name: str, *, required: bool) -> Path | None:
    """A file of the folder, or of the hub's repository, downloaded unless `source` is offline."""
    folder = Path(source.path)
    if folder.is_dir():
        return folder / name if required or (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(source.path, name, local_files_only=source.offline))
    except LocalEntryNotFoundError:  # not cached, and the hub was not asked or did not answer
        if required or not source.offline:
            raise
    except EntryNotFoundError:
        if required:
            raise
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What a model's folder holds beside its weights: config.json, files to copy, and the dtype of each tensor."""

    document: Mapping[str, Any]
    companions: tuple[Path, ...]
    dtypes: Mapping[str, torch.dtype]

    @property
    def is_exact(self) -> bool:
        """Whether model.safetensors holds the trained fp32 numbers themselves."""
        return all(dtype == torch.float32 for dtype in self.dtypes.values())

    @property
    def weights_file(self) -> str:
        """The file of a checkpoint that holds the trained numbers without rounding."""
        return SINGLE if self.is_exact else MASTER_FILE


def save_model(files: ModelFiles, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the trained weights as a model of transformers, in the dtypes that it came in."""
    # on the host: a GPU that is full of weights and moments has no room for another copy
    rounded = {name: tensor.cpu().to(files.dtypes[name]) for name, tensor in tensors.items()}
    save_tensors(rounded, folder / SINGLE)
    text = json.dumps(dict(files.document), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    for file in files.companions:
        shutil.copyfile(file, folder / file.name)


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file, in the order of the names."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())}
    # without tensors safetensors 0.4 writes a header with metadata that it cannot read
    save_file(plain, file, metadata={"format": "pt"} if plain else None)
