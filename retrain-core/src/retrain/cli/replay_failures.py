"""`retrain audit --replay PATH`: scores again the texts on which a run's reward failed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.record_names import CONFIG_FILE
from retrain.run.configure import load_checked
from retrain.run.seed_sources import run_seeds
from retrain.tasks.scoring.build import build_rewards, data_reward, load_data
from retrain.tasks.scoring.failures import FailureRecord, read_failures
from retrain.tasks.scoring.service import NamedReward, ScoringService
from retrain.text.secrets import hide_text
from retrain.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of scoring one text again; `then` is the original failure."""

    file: str
    reward: str
    outcome: str
    value: float | None
    seconds: float
    detail: str
    then: str

    def line(self) -> str:
        """`failures/step_3_0.json  scored 1  0.002 s  (failed then: timed out after 10 s)`"""
        value = "" if self.value is None else f" {self.value:g}"
        detail = f"  {self.detail}" if self.detail else ""
        outcome = self.outcome.replace("_", " ")
        return f"{self.file}  {self.reward}: {outcome}{value}  {self.seconds:.3f} s{detail}  (then: {self.then})"


def replay(path: Path, arguments: Sequence[str], plugins: Plugins) -> list[Replayed]:
    """Every record below `path`, scored once by the reward that had failed on it, in a separate process.

    `arguments` are overrides of the run's configuration, or another configuration and its overrides.
    """
    records = read_failures(path)
    is_other = bool(arguments) and not arguments[0].startswith("-")
    config = load_checked(arguments if is_other else [str(_config_of(path)), *arguments], plugins).config
    rewards = _rewards(config, plugins, {record.reward for _, record in records})
    missing = sorted({record.reward for _, record in records} - rewards.keys())
    if missing:
        what = f"these texts were scored by {', '.join(missing)}; the configuration has {', '.join(rewards)}"
        raise ConfigError(Problem(where=str(path), what=what, fix="name the run's own: audit CONFIG --replay PATH"))
    results: dict[Path, Replayed] = {}
    for name, reward in rewards.items():
        own = [(each, record) for each, record in records if record.reward == name]
        results |= _scored(reward, own, _once(config.scoring)) if own else {}
    return [results[each] for each, _ in records]


def _scored(
    reward: NamedReward, records: Sequence[tuple[Path, FailureRecord]], settings: ScoringTable
) -> Mapping[Path, Replayed]:
    alone = NamedReward(name=reward.name, reward=reward.reward)  # the unweighted value of the reward
    with ScoringService([alone], settings) as service, service.batch(fresh=True) as batch:
        for _, record in records:
            batch.submit(record.example, record.text)
        scores = batch.collect(within_budget=False)
        return {
            file: Replayed(
                file=str(file),
                reward=reward.name,
                outcome=score.outcome.value,
                value=score.value,
                seconds=seconds,
                detail=hide_text(score.detail),
                then=hide_text(record.detail),
            )
            for (file, record), score, seconds in zip(records, scores, batch.seconds, strict=True)
        }


def _rewards(config: Config, plugins: Plugins, wanted: Collection[str]) -> dict[str, NamedReward]:
    seeds = run_seeds(config)
    context = PluginContext(config=config, seeds=seeds, plugins=plugins, tokenizer=load_tokenizer(config, plugins))
    rewards = {each.name: each for each in build_rewards(config, context, data_reward(config, context))}
    source = config.data.source
    if source in wanted and source not in rewards:  # the run's config.toml names a reward that its data source replaced
        own = load_data(config, context).reward
        rewards |= {source: NamedReward(name=source, reward=own)} if own is not None else {}
    return rewards


def _once(settings: ScoringTable) -> ScoringTable:
    """The run's limits without its retries, so that every failure is shown."""
    limits = {name: own.model_copy(update={"retries": None}) for name, own in settings.limits.items()}
    return settings.model_copy(update={"retries": 0, "limits": limits})


def _config_of(path: Path) -> Path:
    """`config.toml` of the run folder that holds `path`."""
    for folder in path.resolve().parents:
        if (folder / CONFIG_FILE).is_file():
            return folder / CONFIG_FILE
    fix = "name the run's configuration: audit CONFIG --replay PATH"
    raise ConfigError(Problem(where=str(path), what=f"no {CONFIG_FILE} in a folder above it", fix=fix))
