"""Wall time of a run or a campaign from the median time of a step."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.kernel.config.resolved import Config, Layer
from retrain.records.campaign_table import CampaignTable
from retrain.run.configure import steps_per_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Runs of `max_steps` steps each, `parallelism` of them at a time."""

    conditions: int
    seeds: int
    max_steps: int
    parallelism: int

    @property
    def runs(self) -> int:
        """conditions x seeds."""
        return self.conditions * self.seeds

    @property
    def total_steps(self) -> int:
        """conditions x seeds x max_steps."""
        return self.runs * self.max_steps

    def seconds(self, run_s: float) -> float:
        """runs x seconds of a run / parallelism."""
        return self.runs * run_s / self.parallelism


def is_campaign(config: Config) -> bool:
    """Whether the file has `[campaign]`."""
    return any(path.startswith("campaign.") and found.layer is Layer.FILE for path, found in config.origins.items())


def schedule_of(config: Config) -> Schedule:
    """One run, or those of `[campaign]` if the file has that table: all at once, or `max_workers` at a time."""
    if not is_campaign(config):
        return Schedule(conditions=1, seeds=1, max_steps=config.training.max_steps, parallelism=1)
    table = config.table("campaign", CampaignTable)
    conditions, seeds = table.conditions, table.seeds
    runs = max(1, len(conditions)) * max(1, len(seeds))
    workers = table.max_workers or runs
    return Schedule(
        conditions=max(1, len(conditions)),
        seeds=max(1, len(seeds)),
        max_steps=steps_per_run(config),
        parallelism=min(workers, runs) if table.parallel else 1,
    )
