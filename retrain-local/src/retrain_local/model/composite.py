"""The text part of a checkpoint that also holds vision or audio: its configuration, and its names in the whole."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from retrain_local.memory.shape import TEXT_NAMES, is_text
from retrain_local.model.hf_decoder import body_path
from retrain_local.model.model_files import Folder


def text_config(config: Any) -> Any | None:
    """Return the configuration of the text part; None if the model is only text, or its text has no class."""
    text = config.get_text_config(decoder=True)
    return text if text is not config and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else None


def is_whole(config: Any) -> bool:
    """True if the class of the whole reads the text too, since its text part has no class with a head."""
    return text_config(config) is None and has_whole(config)


def has_whole(config: Any) -> bool:
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def is_larger(config: Any) -> bool:
    """True if the checkpoint holds more than text."""
    return text_config(config) is not None or has_whole(config)


def without_towers(model: Any) -> Any:
    """Remove all modules of a whole model that are next to the text's body."""
    parent, _, body = body_path(model).rpartition(".")
    module = model.get_submodule(parent)
    for name in [name for name, _ in module.named_children() if parent and name != body]:
        delattr(module, name)
    return model


def built(config: Any, text: Any, **options: Any) -> Any:
    """Return the random model that `config` describes, with `text` as its text part, and nothing else."""
    if not is_whole(config):
        return transformers.AutoModelForCausalLM.from_config(text, **options)
    given = copy.copy(config)
    given.text_config = text
    return without_towers(whole_class(config)._from_config(given, **options))


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """The whole model's names: `body` and `head` are pairs of a module's name in the text model and in the whole."""

    body: tuple[str, str]
    head: tuple[str, str]

    def name(self, name: str) -> str:
        """Return the name of a module or parameter of the text model in the whole."""
        for own, whole in (self.body, self.head):
            if name.startswith(f"{own}."):
                return whole + name.removeprefix(own)
        return name

    def stored(self, parameters: Iterable[str], files: Collection[str]) -> dict[str, str]:
        """Return the name of each parameter in the files, or in the whole if the files split it differently."""
        found = {_text_name(name): name for name in files}
        return {name: found.get(_text_name(name), self.name(name)) for name in parameters}


def others(files: Iterable[str], parameters: Collection[str]) -> tuple[str, ...]:
    """Return the names in the files that do not belong to the text part."""
    return tuple(name for name in files if not is_text(name) and name not in parameters)


def _text_name(name: str) -> str:
    for pattern, text in TEXT_NAMES.items():
        name = re.sub(pattern, text, name)
    return name


def whole_class(config: Any) -> Any:
    """Return the class of transformers that holds all of the checkpoint."""
    named = next(iter(config.architectures or ()), "")
    return getattr(transformers, named, None) or MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def has_modules(folder: Folder, names: Iterable[str]) -> bool:
    """True if the model in this folder has modules of these names."""
    options = {"trust_remote_code": folder.trust_remote_code, "local_files_only": folder.source.offline}
    config = transformers.AutoConfig.from_pretrained(folder.source.path, **options)
    with torch.device("meta"):
        if is_larger(config):
            model = whole_class(config)(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    return {name for name, _ in model.named_modules()}.issuperset(names)


def whole_of(config: Any, model: Any) -> Whole:
    """Find the text `model` in the whole that `config` describes; the whole is built without memory."""
    with torch.device("meta"):
        whole = whole_class(config)(config)
    path = body_path(model)
    modules: Mapping[str, Any] = dict(whole.named_modules())
    kind = type(model.get_submodule(path))
    body = next(name for name, module in modules.items() if type(module) is kind)
    head = next(name for name, module in modules.items() if module is whole.get_output_embeddings())
    own = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return Whole(body=(path, body), head=(own, head))
