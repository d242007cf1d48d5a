"""Generated sections `support`, the features that each backend has, and `annotated`, a file with every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from retrain.cli.manual import markdown
from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.config.load import TableEntry, all_keys
from retrain.kernel.config.toml_file import toml_text
from retrain.kernel.contracts.losses import LossTraits
from retrain.kernel.declared import Capabilities, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.first_party import promised_names
from retrain.kernel.registry import Plugins
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables

COMMENT_FROM = 40  # column
# A longer default would push its comment past the column.
TEXT_LIMIT = 40


def annotated(plugins: Plugins) -> str:
    """A TOML block with every key of a run at its default; loading it changes nothing."""
    tables = []
    for name, entry in registered_tables(plugins).items():
        if not entry.traits.starts_runs:
            keys = keys_of(name, entry.model, entry.traits.flag_prefix)
            tables.append("\n".join([f"[{name}]", *(_line(key) for key in keys)]))
    return "```toml\n" + "\n\n".join(tables) + "\n```"


def _line(key: Key) -> str:
    comment = f"# {key.description}" + (f" Not yet: {key.pending}." if key.pending else "")
    if key.default is None:
        return f"# {key.name} =   {comment}"
    setting = f"{key.name} = {toml_text(key.default)}"
    return f"{comment}\n{setting}" if len(setting) > TEXT_LIMIT else f"{setting:<{COMMENT_FROM}}  {comment}"


# Required settings of a backend.
NEEDED = {
    "prime_rl": ("--backend-opt", "output_dir=out", "--inference-engine", "vllm", "--max-tokens", "1024"),
}
# A non-default value of each key, after the settings that it requires.
TRIED: Sequence[Mapping[str, str]] = (
    {"algorithm.loss": "ppo", "algorithm.clip_eps": "0.1"},
    {"algorithm.loss": "ppo", "algorithm.clip_eps_high": "0.3"},
    {"algorithm.loss": "ppo", "algorithm.dual_clip": "3.0"},
    {"algorithm.off_policy_mask": "0.1"},
    {"algorithm.transform_mode": "none", "algorithm.advantage_mode": "remax"},
    {"algorithm.transform_mode": "none", "algorithm.advantage_mode": "otb"},
    {"algorithm.aggregation": "sequence_mean"},
    {"algorithm.aggregation": "constant"},
    {"algorithm.tis_cap": "2.0"},
    {"algorithm.is_bounds": "[0.5, 2.0]"},
    {"algorithm.is_bounds": "[0.5, 2.0]", "algorithm.is_level": "sequence"},
    {"algorithm.is_bounds": "[0.5, 2.0]", "algorithm.is_mode": "mask"},
    {"algorithm.batch_norm": "true"},
    {"algorithm.advantage_clip": "5.0"},
    {"training.minibatches": "2"},
    {"training.epochs": "2"},
    {"training.overlong": "mask"},
    {"training.overlong": "drop"},
    {"training.soft_overlong": "8"},
    {"training.refill": "2"},
    {"optimizer.schedule": "cosine"},
    {"optimizer.warmup_steps": "2"},
    {"kl.where": "loss", "kl.coef": "0.1"},
    {"kl.where": "reward", "kl.coef": "0.1"},
    {"entropy.coef": "0.01"},
    {"training.minibatches": "2", "entropy.kl_cov": "0.002"},
    {"entropy.clip_cov": "0.002"},
    {"sft.steps": "20"},
    {
        "algorithm.advantage_mode": "distillation",
        "algorithm.transform_mode": "none",
        "training.temperature": "1.0",
        "teacher.model": "some-teacher",
    },
    {"model.adapter": "some-adapter"},
    {"model.lora_rank": "0"},
    {"model.quantize": "int8"},
    {"lora.rslora": "true"},
    {"lora.dora": "true"},
)
NO_FOLDER = "there is no such folder"  # a fault of the question, not of the backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A setting tried on every backend, as TOML has it, and the answers: empty for yes, or why not."""

    text: str
    values: Mapping[str, str]
    answers: Mapping[str, str]


def support(plugins: Plugins) -> str:
    """A table of losses, keys and recipes by backend, followed by the reasons of refusals."""
    installed = [entry.spec.name for entry in plugins.registered(Kind.BACKEND)]
    backends = sorted(installed, key=lambda name: (*promised_names(Kind.BACKEND), name).index(name))
    reasons: dict[str, int] = {}

    def cell(answer: str) -> str:
        return f"no ({reasons.setdefault(answer, len(reasons) + 1)})" if answer else "yes"

    rows = [
        (markdown.code(asked.text), *(cell(asked.answers[backend]) for backend in backends))
        for asked in ask(plugins, backends)
    ]
    told = [f"{number}. {reason}" for reason, number in reasons.items()]
    header = ("", *map(markdown.code, backends))
    return "\n\n".join([markdown.table(header, rows), "Why not:", "\n".join(told)])


def ask(plugins: Plugins, backends: Sequence[str]) -> Iterator[Asked]:
    """Put every setting to the check that precedes a run of each backend; only plugins' checks are imported."""
    tables = registered_tables(plugins)

    def problems(backend: str, values: Mapping[str, str]) -> list[Problem]:
        arguments = ["--backend", backend, "--devices", "cpu", *NEEDED.get(backend, ())]
        arguments += [f"--set={path}={value}" for path, value in values.items()]
        config, found = read_config(None, plugins, tables, arguments=arguments)
        return found + check(config, plugins, tables)[1]

    before = {backend: problems(backend, {}) for backend in backends}
    for values in questions(plugins, tables):
        answers = {}
        for backend in backends:
            found = problems(backend, values)
            new = [each for each in found if each not in before[backend] and NO_FOLDER not in each.what]
            answers[backend] = new[0].what.replace(f"backend {backend!r}", "this backend") if new else ""
        yield Asked(text=_toml(values), values=values, answers=answers)


def questions(plugins: Plugins, tables: Mapping[str, TableEntry]) -> Iterator[Mapping[str, str]]:
    """Every loss that some backend has, the keys above that are registered, every recipe."""
    losses = {entry.spec.name for entry in plugins.registered(Kind.LOSS)}
    for entry in plugins.registered(Kind.BACKEND):
        losses |= entry.spec.traits.losses if isinstance(entry.spec.traits, Capabilities) else frozenset()
    for name in sorted(losses):
        traits = plugins.traits_of(Kind.LOSS, name, LossTraits)
        is_coarse = traits is not None and traits.credit == "completion"
        yield ({"algorithm.transform_mode": "none"} if is_coarse else {}) | {"algorithm.loss": name}
    known = {key.path for key in all_keys(tables)}
    yield from (values for values in TRIED if values.keys() <= known)
    yield from ({"algorithm.recipe": entry.spec.name} for entry in plugins.registered(Kind.RECIPE))


def _toml(values: Mapping[str, str]) -> str:
    """The last of these settings, as TOML has it."""
    *_, (path, value) = values.items()
    table, _, name = path.partition(".")
    shown = value if value[:1].isdigit() or value[:1] == "[" or value == "true" else f'"{value}"'
    where = f'where = "{values["kl.where"]}", ' if "kl.where" in values else ""
    return f"[{table}] {where}{name} = {shown}"
