"""`retrain score --replay PATH`: scores again the texts on which a run's reward failed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import EXIT_FAILED, ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Outcome
from retrain.records.record_names import CONFIG_FILE
from retrain.run.configure import load_checked
from retrain.run.seed_sources import run_seeds
from retrain.tasks.scoring.build import build_rewards, data_reward, verifier_of_source
from retrain.tasks.scoring.dispatcher import NamedReward
from retrain.tasks.scoring.failures import FailureRecord, read_failures
from retrain.tasks.scoring.service import ScoringService
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable
from retrain.text.tokenizer.load import load_tokenizer

CONFIG = CONFIG_FILE
EPILOG = """\b
Examples:
  retrain score --replay logs/train/failures
  retrain score --replay logs/train/failures --config mended.toml --json

\b
Exit codes: 0 each text got a verdict; 1 not all; 2 usage or configuration error.
"""


@click.command("score", epilog=EPILOG)
@click.option("--replay", "path", metavar="PATH", required=True, type=click.Path(path_type=Path), help="What failed.")
@click.option("--config", "file", metavar="CONFIG", type=click.Path(path_type=Path), help="Instead of the run's own.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_context
def command(ctx: click.Context, path: Path, file: Path | None, as_json: bool) -> None:
    """Score the texts of PATH again, a file of a run's `failures` folder or the whole folder, with the
    reward and the limits of the run; exit code 1 unless every one gets a verdict."""
    results = replay(path.expanduser(), file, ctx.obj)
    if as_json:
        click.echo(json.dumps([asdict(result) for result in results], indent=2))
    else:
        for result in results:
            click.echo(printable(result.line()))
    ctx.exit(0 if all(result.outcome == Outcome.SCORED for result in results) else EXIT_FAILED)


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


def replay(path: Path, file: Path | None, plugins: Plugins) -> list[Replayed]:
    """Every record below `path`, scored once by the reward that had failed on it, in a process of its own."""
    records = read_failures(path)
    config = load_checked([str(file or _config_of(path))], plugins).config
    rewards = _rewards(config, plugins, {record.reward for _, record in records})
    missing = sorted({record.reward for _, record in records} - rewards.keys())
    if missing:
        what = f"these texts were scored by {', '.join(missing)}; the configuration has {', '.join(rewards)}"
        raise ConfigError(Problem(where=str(path), what=what, fix="give the run's own with --config"))
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
        own = verifier_of_source(config, context)
        rewards |= {source: NamedReward(name=source, reward=own)} if own is not None else {}
    return rewards


def _once(settings: ScoringTable) -> ScoringTable:
    """The run's limits without its retries, so that every failure is shown."""
    limits = {name: own.model_copy(update={"retries": None}) for name, own in settings.limits.items()}
    return settings.model_copy(update={"retries": 0, "limits": limits})


def _config_of(path: Path) -> Path:
    """`config.toml` of the run folder that holds `path`."""
    for folder in path.resolve().parents:
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    fix = "give the run's configuration with --config"
    raise ConfigError(Problem(where=str(path), what=f"no {CONFIG} in a folder above it", fix=fix))
