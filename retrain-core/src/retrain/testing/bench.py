"""The test bench of a part: a toy configuration, resolved and built as a run does it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import tomli_w

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import Found, build_part, resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.records.identity.inputs import PARAMS
from retrain.run.seed_sources import run_seeds
from retrain.run.tables import read_config, registered_tables
from retrain.text.tokenizer import load_tokenizer

KEY_OF_KIND = {
    Kind.ADVANTAGE: "algorithm.advantage_mode",
    Kind.TRANSFORM: "algorithm.transform_mode",
    Kind.UNCERTAINTY: "algorithm.uncertainty_kind",
    Kind.ALGORITHM: "algorithm.algorithm_mode",
    Kind.RECIPE: "algorithm.recipe",
    Kind.LOSS: "algorithm.loss",
    Kind.DATA_SOURCE: "data.source",
    Kind.BACKEND: "backend.backend",
    # Another distribution may register the tables of these: the key is omitted where its table is not installed.
    Kind.REWARD: "reward.type",
    Kind.ENVIRONMENT: "environment.provider",
    Kind.PLANNING_DETECTOR: "planning.detector",
    Kind.INFERENCE_ENGINE: "inference.engine",
    Kind.PACER: "backpressure.pacer",
    Kind.SAMPLER: "data.sampler",
    Kind.LAUNCHER: "campaign.launcher",
    Kind.RECORDER: "logging.recorders",
    Kind.HEALTH_MONITOR: "health.monitors",
}
OPTIONS_OF_KIND = {
    **{kind: options for kind, key, options in PARAMS if key == KEY_OF_KIND[kind]},
    Kind.ENVIRONMENT: "environment.args",
    Kind.LAUNCHER: "campaign.launcher_options",
}
TOYS = "retrain.testing.toys"
BUILTIN = "builtin:tiny"
# Neither a folder nor a hub id: `Bench.tokenizer` is `toy_tokenizer()`.
TOY_MODEL = "conformance:toy"
SPECIAL = ["<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(slots=False, kw_only=True)
class Bench:
    """The surroundings that a check needs for one part; `exits` releases them when the check ends."""

    kind: Kind
    name: str
    given: Mapping[str, Mapping[str, Any]]
    exits: ExitStack = field(repr=False)

    @cached_property
    def folder(self) -> Path:
        # A part may still write when its check has ended, for example from a thread of a tracker.
        made = tempfile.TemporaryDirectory(prefix="retrain-conformance-", ignore_cleanup_errors=True)
        return Path(self.exits.enter_context(made))

    @cached_property
    def plugins(self) -> Plugins:
        return load_plugins()

    @cached_property
    def config(self) -> Config:
        """The toy configuration with the caller's values; ConfigError when those are invalid."""
        return self.configure()

    def configure(self, **more: Mapping[str, Any]) -> Config:
        """Return the configuration with the tables of `more` overriding everything else."""
        document = {
            **self.smallest_document(),
            "algorithm": {
                "advantage_mode": f"{TOYS}.centred",
                "transform_mode": f"{TOYS}.FLAT",
                "uncertainty_kind": f"{TOYS}.surprisal",
            },
            "training": {
                "seed": 1,
                # Small steps that still have groups of several completions: a backend's suite trains many of them.
                "max_steps": 4,
                "batch_size": 2,
                "group_size": 4,
                "max_tokens": 8,
                "temperature": 1.0,
                "lr": 1e-2,
            },
            "logging": {"log_dir": str(self.folder / "run")},
        }
        document["model"]["lora_rank"] = 4
        return self.read(document, more)

    def smallest_document(self) -> dict[str, dict[str, Any]]:
        """Return the tables without which no configuration is valid here."""
        model = BUILTIN if self.plugins.locate_model(BUILTIN) else TOY_MODEL
        return {"model": {"model": model}, "backend": {"devices": "cpu"}}

    def read(self, document: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]) -> Config:
        """Read a document from a file, overridden by the caller's values, by `more`, and by the part's name."""
        tables = registered_tables(self.plugins)
        for layer in (self.given, more):
            for table, content in layer.items():
                document.setdefault(table, {}).update(content)
        table, _, key = KEY_OF_KIND.get(self.kind, "").partition(".")
        if table in tables:
            is_list = self.kind in (Kind.RECORDER, Kind.HEALTH_MONITOR)
            document.setdefault(table, {})[key] = [self.name] if is_list else self.name
        file = self.folder / "conformance.toml"
        file.write_text(tomli_w.dumps(document), encoding="utf-8")
        config, problems = read_config(file, self.plugins, tables)
        if problems:
            raise ConfigError(*problems)
        return config

    @cached_property
    def found(self) -> Found:
        """The part's object, imported now; PluginError when no part has this name."""
        paths = self.config.plugins.search_paths
        return resolve(self.plugins, self.kind, self.name, where="conformance()", search_paths=paths)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of `[model] model`; ConfigError when it has no tokenizer."""
        return toy_tokenizer() if self.config.model.model == TOY_MODEL else load_tokenizer(self.config, self.plugins)

    def context(self) -> PluginContext:
        # A campaign and `retrain init` load data without a tokenizer, so a source must not need one.
        tokenizer = None if self.kind is Kind.DATA_SOURCE else self.tokenizer
        seeds = run_seeds(self.config)
        return PluginContext(config=self.config, seeds=seeds, plugins=self.plugins, tokenizer=tokenizer)

    def build(self, given: Sequence[Any] = ()) -> Any:
        """Call the part's factory as a run does, with the further arguments `given` to factories of its kind."""
        path = OPTIONS_OF_KIND.get(self.kind, "")
        options: Mapping[str, Any] = self.config.value(path, {}) if path else {}
        where = KEY_OF_KIND.get(self.kind, f"{self.kind}.name")
        return build_part(self.kind, self.name, where, self.context(), options, path, given)

    def closing(self, close: Callable[[], object]) -> None:
        """Call this when the check ends."""
        self.exits.callback(close)


@cache
def toy_tokenizer() -> Any:
    """Return a tokenizer with one token per printable ASCII character and a chat template; its end token is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(chr(code) for code in range(32, 127)), "\n"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    # An empty pattern splits between all characters, so that every text has a known number of tokens.
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=SPECIAL[2:],
    )
    made.chat_template = TEMPLATE
    return made
