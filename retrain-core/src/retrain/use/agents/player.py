"""The environment `agent`: its keys in `[environment]`, and the rollouts that it plays."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt, RolloutBatch, Rollouts, Streams
from retrain.kernel.errors import ConfigError, Problem, RewardError
from retrain.kernel.plugins.resolve import validated_params
from retrain.kernel.types import Completion, Outcome, SamplingParams, Score
from retrain.tasks.child.process import Child, ChildError, ChildFailure
from retrain.tasks.scoring.build import judges
from retrain.tasks.scoring.service import ScoringBatch, ScoringService
from retrain.use.agents.episode import Episode, Rules
from retrain.use.agents.programs import CommandAgent, FunctionAgent, Program
from retrain.use.serving.batcher import Batcher
from retrain.use.serving.http import ApiServer

CLOCK_S = 0.05  # between two looks at the agents' clocks
# The agent's own clock, which stops while the policy works, sets the real limit.
NO_LIMIT_S = 7 * 24 * 3600.0
MOST_CALLS = 64
# Wait this long for calls of several agents where a call cannot join a running batch.
GATHER_S = 0.05


class _Actor(Child):
    def __init__(self, program: Program, name: str, memory_gb: float) -> None:
        super().__init__(program, name=name, memory_gb=memory_gb)
        self._is_up = False

    def start(self, timeout_s: float = 120.0) -> None:
        if not self._is_up:
            super().start(timeout_s)
            self._is_up = True

    def kill(self) -> None:
        self._is_up = False
        super().kill()


class Performance:
    """Episodes being played. An agent that takes too long, by its own clock, is killed with its child processes."""

    def __init__(
        self,
        actors: Sequence[_Actor],
        episodes: Sequence[Episode],
        url: str,
        timeout_s: float,
        done: Callable[[Episode | None], None],
    ) -> None:
        self.error: BaseException | None = None
        self._waiting, self._url, self._timeout_s, self._done = deque(episodes), url, timeout_s, done
        self._playing: dict[_Actor, Episode] = {}
        self._is_stopped = False
        self._actors, self._left = actors, len(actors)
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._play_all, args=(actor,), name="agent", daemon=True) for actor in actors
        ]
        self._threads.append(threading.Thread(target=self._watch, name="agents' clock", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def is_over(self) -> bool:
        """True once every episode has ended, or one failed for a permanent reason."""
        return not self._left or self.error is not None

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
            # An actor that is still starting has no episode yet.
            busy = self._actors if self._left else ()
        for actor in busy:
            actor.kill()
        for thread in self._threads:
            thread.join()

    def _play_all(self, actor: _Actor) -> None:
        try:
            while episode := self._next():
                try:
                    self._play(actor, episode)
                finally:
                    with self._lock:
                        self._playing.pop(actor, None)
                    episode.end()
                self._done(episode)
        except BaseException as error:
            # Raised again in the run's thread, since that thread waits for the batch.
            self.error = self.error or error
        finally:
            with self._lock:
                self._left -= 1
            self._done(None)

    def _next(self) -> Episode | None:
        with self._lock:
            return self._waiting.popleft() if self._waiting and self.error is None else None

    def _play(self, actor: _Actor, episode: Episode) -> None:
        try:
            actor.start()
            episode.begin()
            with self._lock:
                if self._is_stopped:
                    return
                self._playing[actor] = episode
            # A proxy named in the environment could not reach this machine's own address.
            address = {"OPENAI_BASE_URL": self._url, "NO_PROXY": "127.0.0.1,localhost"}
            variables = {**address, "OPENAI_API_KEY": episode.token}
            episode.said = actor.call("play", episode.task, variables, timeout_s=NO_LIMIT_S)
        except ChildFailure as error:
            if not isinstance(error, ChildError):
                actor.kill()
            # At these limits its call was refused, so an error of the agent is expected.
            if not (episode.hit_call_limit or episode.is_full):
                output = getattr(error, "output", "").strip()[-500:]
                detail = f"the agent failed: {error}" + (f"; it wrote: {output}" if output else "")
                episode.score = episode.score or Score.failed(detail.replace(episode.token, "(its key)"))
        if episode.said is not None:
            # The answer is recorded, and no record may show a key.
            episode.said = episode.said.replace(episode.token, "(its key)")
        if not len(episode.calls) and episode.score is None:
            episode.score = Score.failed("the agent ended without a call to the policy")

    def _watch(self) -> None:
        while self._left and not self._is_stopped:
            with self._lock:
                late = [(a, e) for a, e in self._playing.items() if e.own_s > self._timeout_s]
            for actor, episode in late:
                what = f"the agent took more than timeout_s = {self._timeout_s:g} s, without the time of the policy"
                episode.score = episode.score or Score.failed(what)
                actor.kill()
            time.sleep(CLOCK_S)


class AgentArgs(Table):
    """`[environment] args` of an agent."""

    command: str = key("", "The agent as a command, in place of a Python function in `id`.")
    concurrency: int = key(16, "Episodes that are played at once.", ge=1)


def make_agent(context: PluginContext) -> AgentPlayer:
    config = context.config
    entry, most_calls = str(config.environment.id), config.environment.max_turns
    places = {name: config.place(f"environment.{name}") for name in ("id", "args", "max_turns")}
    args, problems = validated_params(AgentArgs, config.environment.args, where=places["args"])
    command = str(config.environment.args.get("command", ""))
    if bool(entry) == bool(command):
        fix = 'set one: id = "my_agent:play", or args = { command = "python my_agent.py" }'
        what = "the agent is a Python function or a command, and neither or both are given"
        problems.append(Problem(code="environment.ambiguous-agent", where=places["id"], what=what, fix=fix))
    elif entry and not all(part for part in (entry.count(":") == 1, *entry.split(":"))):
        what, fix = f"{entry!r} names no function", 'write "module:function"'
        problems.append(Problem(code="environment.bad-agent", where=places["id"], what=what, fix=fix))
    if most_calls == 0:
        what, fix = "an agent without a call cannot learn", f"use 1 or more, or -1 for {MOST_CALLS}"
        problems.append(Problem(code="environment.no-calls", where=places["max_turns"], what=what, fix=fix))
    if config.training.max_thinking_tokens:
        what, where = "an agent's calls have no limit for thoughts", config.place("training.max_thinking_tokens")
        problems.append(Problem(code="training.no-agent-budget", where=where, what=what, fix="remove it"))
    if problems:
        raise ConfigError(*problems)
    assert isinstance(args, AgentArgs)
    program: Program = FunctionAgent(entry=entry, where=places["id"])
    if command:
        program = CommandAgent(command=command, where=places["args"])
    return AgentPlayer(
        program,
        name=entry or command,
        most_calls=most_calls if most_calls > 0 else MOST_CALLS,
        concurrency=args.concurrency,
        timeout_s=config.environment.timeout_s,
        memory_gb=config.scoring.memory_gb,
    )


class AgentPlayer:
    """A `retrain.tasks.tasks.Player`. Its processes outlive a batch, and each plays one episode at a time."""

    def __init__(
        self, program: Program, *, name: str, most_calls: int, concurrency: int, timeout_s: float, memory_gb: float
    ) -> None:
        self.name, self.most_calls, self._timeout_s = name, most_calls, timeout_s
        self._actors = [_Actor(program, "agent", memory_gb) for _ in range(concurrency)]
        self.gateway: Gateway | None = None

    def start(self) -> None:
        """Start one process, so that an agent that cannot be loaded is refused now."""
        self._actors[0].start()

    def play(self, episodes: Sequence[Episode], url: str, done: Callable[[Episode | None], None]) -> Performance:
        """Begin to play these episodes; `done` is called for each, from any thread, and once more at the end."""
        return Performance(self._actors[: len(episodes)], episodes, url, self._timeout_s, done)

    def rollouts(
        self,
        backend: Backend,
        scoring: ScoringService,
        context: PluginContext,
        params: SamplingParams,
        context_length: int | None,
    ) -> Rollouts:
        self.gateway = self.gateway or Gateway()
        return AgentRollouts(self, self.gateway, backend, scoring, context, params, context_length)

    def close(self) -> None:
        for actor in self._actors:
            actor.kill()
        if self.gateway is not None:
            self.gateway.close()
            self.gateway = None


class Gateway(ApiServer):
    """An OpenAI-compatible endpoint on loopback, whose keys identify episodes.

    It serves until `close`, and answers only the episodes that are `admitted`.
    """

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}
        refusal = "this key is of no episode that is being played"
        super().__init__("127.0.0.1", 0, lambda key: self._episodes.get(key), refusal=refusal)
        self.start()

    @contextmanager
    def admitted(self, episodes: Sequence[Episode]) -> Iterator[None]:
        self._episodes = {episode.token: episode for episode in episodes}
        try:
            yield
        finally:
            self._episodes = {}


@dataclass(frozen=True, slots=True)
class AgentRollouts:
    """Rollouts of an agent; the calling thread samples every call to the model."""

    player: AgentPlayer
    gateway: Gateway
    backend: Backend
    scoring: ScoringService
    context: PluginContext
    params: SamplingParams
    context_length: int | None

    @property
    def has_verifier(self) -> bool:
        return judges([each.reward for each in self.scoring.rewards])

    @contextmanager
    def batch(self, label: str, failures: Path | None = None) -> Iterator[RolloutBatch]:
        with self.scoring.batch(label, failures) as scores:
            yield _AgentBatch(self, scores)

    def close(self) -> None:
        self.player.close()
        self.scoring.close()


class _AgentBatch:
    def __init__(self, owner: AgentRollouts, scores: ScoringBatch) -> None:
        self._owner = owner
        self._scores = scores
        self._groups: list[list[Episode]] = []
        self._episodes: list[Episode] = []
        self._completions: list[Completion] = []

    def sample(self, prompts: Sequence[Prompt], group_size: int, streams: Streams) -> list[tuple[Completion, ...]]:
        owner, params = self._owner, self._owner.params
        batcher = Batcher(owner.backend, entropy=params.entropy, gather_s=GATHER_S, is_run=True)
        rules = Rules(
            params=params,
            most_calls=owner.player.most_calls,
            streams=streams,
            config=owner.context.config,
            tokenizer=owner.context.tokenizer,
            batcher=batcher,
            limit=owner.context_length,
            lock=threading.Lock(),
        )
        self._groups = [[Episode(prompt, number, rules) for number in range(group_size)] for prompt in prompts]
        self._episodes = [episode for group in self._groups for episode in group]
        self._play(batcher)
        groups = [tuple(episode.completion() for episode in group) for group in self._groups]
        self._completions = [completion for group in groups for completion in group]
        return groups

    def scores(self) -> list[tuple[Score, ...]]:
        self._check_budget()
        waiting = [episode for episode in self._episodes if episode.score is None]
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

    def _play(self, batcher: Batcher) -> None:
        owner, progress, episodes = self._owner, self._owner.context.sampling_progress, self._episodes
        progress.begin("episodes", len(episodes))

        def done(episode: Episode | None) -> None:
            if episode is not None:
                progress.add(1, tokens=sum(len(call.sample.tokens_T) for call in episode.calls))
            batcher.wake()

        with owner.gateway.admitted(episodes):
            performance = owner.player.play(episodes, owner.gateway.url, done)
            try:
                batcher.run(lambda: performance.is_over)
            finally:
                batcher.close()
                performance.stop()
        if performance.error is not None:
            raise performance.error

    def _check_budget(self) -> None:
        scores, total = [episode.score for episode in self._episodes], len(self._episodes)
        failed = [score for score in scores if score is not None and score.outcome is Outcome.FAILED]
        allowed = self._owner.context.config.scoring.max_failed_frac
        if len(failed) > allowed * total:
            what = f"the agent failed in {len(failed)} of {total} episodes; first: {failed[0].detail}"
            why = f"more than [scoring] max_failed_frac = {allowed:g} of them"
            fix = "repair the agent: no answer of the policy, not even nonsense, may end it"
            where = "[environment]"
            raise RewardError(Problem(code="environment.agent-failed", where=where, what=what, why=why, fix=fix))
