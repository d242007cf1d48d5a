"""The environment `agent`: what `[environment]` says about it, and the rollouts that it plays."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, RolloutBatch, Rollouts, Streams
from retrain.kernel.errors import ConfigError, Problem, RewardError
from retrain.kernel.plugins.build import validated_params
from retrain.kernel.types import Completion, Outcome, SamplingParams, Score
from retrain.tasks.scoring.batch import ScoringBatch
from retrain.tasks.scoring.build import judges
from retrain.tasks.scoring.service import ScoringService
from retrain.use.agents.episode import Episode, Rules
from retrain.use.agents.programs import CommandAgent, FunctionAgent, Program
from retrain.use.agents.stage import Stage
from retrain.use.serving.batcher import Batcher
from retrain.use.serving.http import ApiServer

MOST_CALLS = 64


class AgentArgs(Table):
    """`[environment] args` of an agent."""

    command: str = key("", "The agent as a command, in place of a Python function in `id`.")
    concurrency: int = key(16, "Episodes that are played at once.", ge=1)


def make_agent(context: PluginContext) -> AgentPlayer:
    """The agent that `[environment]` names; ConfigError lists every fault."""
    config = context.config
    entry, most_calls = str(config.environment.id), config.environment.max_turns
    places = {name: config.place(f"environment.{name}") for name in ("id", "args", "max_turns")}
    args, problems = validated_params(AgentArgs, config.environment.args, where=places["args"])
    command = str(config.environment.args.get("command", ""))
    if bool(entry) == bool(command):
        fix = 'set one: id = "my_agent:play", or args = { command = "python my_agent.py" }'
        what = "the agent is a Python function or a command, and neither or both are given"
        problems.append(Problem(where=places["id"], what=what, fix=fix))
    elif entry and not all(part for part in (entry.count(":") == 1, *entry.split(":"))):
        problems.append(Problem(where=places["id"], what=f"{entry!r} names no function", fix='write "module:function"'))
    if most_calls == 0:
        fix = f"use 1 or more, or -1 for {MOST_CALLS}"
        problems.append(Problem(where=places["max_turns"], what="an agent without a call cannot learn", fix=fix))
    if problems:
        raise ConfigError(*problems)
    assert isinstance(args, AgentArgs)
    program: Program = FunctionAgent(entry=entry, where=places["id"])
    if command:
        program = CommandAgent(command=command, where=places["args"])
    stage = Stage(
        program,
        name="agent",
        concurrency=args.concurrency,
        timeout_s=config.environment.timeout_s,
        memory_gb=config.scoring.memory_gb,
    )
    return AgentPlayer(stage, name=entry or command, most_calls=most_calls if most_calls > 0 else MOST_CALLS)


class AgentPlayer:
    """See `retrain.tasks.tasks.Player`."""

    def __init__(self, stage: Stage, *, name: str, most_calls: int) -> None:
        self.name = name
        self.stage, self.most_calls = stage, most_calls
        self.gateway: Gateway | None = None

    def start(self) -> None:
        """Load the agent once."""
        self.stage.start()

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        """Episodes of the agent."""
        self.gateway = self.gateway or Gateway()
        return AgentRollouts(self, self.gateway, backend, scoring, context, params, context_length)

    def close(self) -> None:
        """End the agent's processes and the gateway."""
        self.stage.close()
        if self.gateway is not None:
            self.gateway.close()
            self.gateway = None


# Episodes of an agent: played side by side, sampled together, then judged by the run's rewards.


GATHER_S = 0.05  # for the calls of several agents to come together, where none can join later


class Gateway(ApiServer):
    """An OpenAI-compatible endpoint on loopback, where the key says whose call it is.

    It serves until `close`, and answers only the episodes that are `admitted`.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        refusal = "this key is of no episode that is being played"
        super().__init__("127.0.0.1", 0, lambda key: self._episodes.get(key), refusal=refusal)
        self.start()

    @contextmanager
    def admitted(self, episodes: Sequence[Episode]) -> Iterator[None]:
        """Within the block the keys of these episodes are known."""
        self._episodes = {episode.token: episode for episode in episodes}
        try:
            yield
        finally:
            self._episodes = {}


@dataclass(frozen=True, slots=True)
class AgentRollouts:
    """Rollouts of an agent; every call to the model is sampled by the thread that asks for them."""

    player: AgentPlayer
    gateway: Gateway
    backend: Backend
    scoring: ScoringService
    context: PluginContext
    params: SamplingParams
    context_length: int | None

    @property
    def has_verifier(self) -> bool:
        """Whether anything judges the agents."""
        return judges([each.reward for each in self.scoring.rewards])

    @contextmanager
    def batch(self, label: str, failures: Path | None = None) -> Iterator[RolloutBatch]:
        """See `Rollouts.batch`."""
        with self.scoring.batch(label, failures) as scores:
            yield _AgentBatch(self, scores)

    def close(self) -> None:
        """End the agents' processes, the gateway, and the scoring."""
        self.player.close()
        self.scoring.close()


class _AgentBatch:
    def __init__(self, owner: AgentRollouts, scores: ScoringBatch) -> None:
        self._owner = owner
        self._scores = scores
        self._groups: list[list[Episode]] = []
        self._completions: list[Completion] = []

    @property
    def _episodes(self) -> list[Episode]:
        return [episode for group in self._groups for episode in group]

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        owner, params = self._owner, self._owner.params
        batcher = Batcher(owner.backend, entropy=params.entropy, gather_s=GATHER_S, is_run=True)
        config = owner.context.config
        rules = Rules(
            params=params,
            template_args=config.data.template_args,
            most_calls=owner.player.most_calls,
            streams=streams,
            config=config,
            tokenizer=owner.context.tokenizer,
            batcher=batcher,
            limit=owner.context_length,
            lock=threading.Lock(),
        )
        self._groups = [[Episode(prompt, number, rules) for number in range(group_size)] for prompt in prompts]
        self._play(self._episodes, batcher)
        groups = [tuple(episode.completion() for episode in group) for group in self._groups]
        self._completions = [completion for group in groups for completion in group]
        return groups

    def scores(self) -> list[tuple[Score, ...]]:
        episodes = self._episodes
        self._check_budget([episode.score for episode in episodes if episode.score], len(episodes))
        waiting = [episode for episode in episodes if episode.score is None]
        for episode in waiting:
            self._scores.submit(episode.prompt.example, episode.text)
        for episode, score in zip(waiting, self._scores.collect(), strict=True):
            episode.score = score
        return [tuple(episode.score or Score.no_verdict("not scored") for episode in group) for group in self._groups]

    def metrics(self) -> Mapping[str, float]:
        episodes = self._episodes
        total = max(len(episodes), 1)
        return {
            "turns_mean": sum(len(episode.calls) for episode in episodes) / total,
            "turn_limit_rate": sum(episode.hit_call_limit for episode in episodes) / total,
            "rewritten_history_count": sum(len(completion.starts) - 1 for completion in self._completions),
            "dropped_call_count": sum(episode.dropped for episode in episodes),
            **self._scores.metrics(),
        }

    def _play(self, episodes: Sequence[Episode], batcher: Batcher) -> None:
        owner, progress = self._owner, self._owner.context.sampling_progress
        progress.begin("episodes", len(episodes))

        def done(episode: Episode | None) -> None:
            if episode is not None:
                tokens = sum(len(call.sample.tokens_T) for call in episode.calls)
                progress.add(1, tokens=tokens)
            batcher.wake()

        with owner.gateway.admitted(episodes):
            performance = owner.player.stage.play(episodes, owner.gateway.url, done)
            try:
                batcher.run(lambda: performance.is_over)
            finally:
                batcher.close()
                performance.stop()
        if performance.error is not None:
            raise performance.error

    def _check_budget(self, failed: Sequence[Score], total: int) -> None:
        failed = [score for score in failed if score.outcome is Outcome.FAILED]
        allowed = self._owner.context.config.scoring.max_failed_frac
        if len(failed) > allowed * total:
            what = f"the agent failed in {len(failed)} of {total} episodes; first: {failed[0].detail}"
            why = f"more than [scoring] max_failed_frac = {allowed:g} of them"
            fix = "repair the agent; what the policy may answer, nonsense included, must not end it"
            raise RewardError(Problem(where="[environment]", what=what, why=why, fix=fix))
