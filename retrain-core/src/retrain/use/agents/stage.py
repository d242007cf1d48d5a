"""Where episodes are played: a few processes at once, each with a thread of ours that waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from retrain.kernel.types import Score
from retrain.tasks.child.process import Child, ChildError, ChildFailure
from retrain.use.agents.episode import Episode
from retrain.use.agents.programs import Program

CLOCK_S = 0.05  # between two looks at the agents' clocks
NO_LIMIT_S = 7 * 24 * 3600.0  # the clock that counts is the agent's own


class Stage:
    """The processes of a run's agents; they outlive a batch, and each plays one episode at a time."""

    def __init__(self, program: Program, *, name: str, concurrency: int, timeout_s: float, memory_gb: float) -> None:
        self._timeout_s = timeout_s
        self._children = [_Actor(program, name, memory_gb) for _ in range(concurrency)]

    def start(self) -> None:
        """Try one process, so that an agent that cannot be loaded is refused now."""
        self._children[0].start()

    def close(self) -> None:
        """End all processes; safe to call twice."""
        for child in self._children:
            child.kill()

    def play(self, episodes: Sequence[Episode], url: str, done: Callable[[Episode | None], None]) -> Performance:
        """Begin to play these episodes; `done` is called for each, from any thread, and once more at the end."""
        return Performance(self._children[: len(episodes)], episodes, url, self._timeout_s, done)


class _Actor(Child):
    """A process that plays, started when it is needed; it may have died since."""

    def __init__(self, program: Program, name: str, memory_gb: float) -> None:
        super().__init__(program, name=name, memory_gb=memory_gb)
        self._is_up = False

    def start(self, timeout_s: float = 120.0) -> None:
        """Start it unless it is up."""
        if not self._is_up:
            super().start(timeout_s)
            self._is_up = True

    def kill(self) -> None:
        """End it."""
        self._is_up = False
        super().kill()


class Performance:
    """Episodes being played. An agent that takes too long, by its own clock, is killed with all it has started."""

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
        """Whether every episode has ended, or one could not be played for a reason that will not go away."""
        return not self._left or self.error is not None

    def stop(self) -> None:
        """Kill what still plays, and wait for our threads."""
        with self._lock:
            self._is_stopped = True
            self._waiting.clear()
            busy = self._actors if self._left else ()  # one that is still starting plays nothing yet
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
        except BaseException as error:  # raised again where the run waits
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
            address = {"OPENAI_BASE_URL": self._url, "NO_PROXY": "127.0.0.1,localhost"}
            variables = {**address, "OPENAI_API_KEY": episode.token}
            episode.said = actor.call("play", episode.task, variables, timeout_s=NO_LIMIT_S)
        except ChildFailure as error:
            if not isinstance(error, ChildError):
                actor.kill()
            if not (episode.hit_call_limit or episode.is_full):  # such an agent is scored as it stands
                output = getattr(error, "output", "").strip()[-500:]
                detail = f"the agent failed: {error}" + (f"; it wrote: {output}" if output else "")
                episode.score = episode.score or Score.failed(detail.replace(episode.token, "(its key)"))
        if episode.said is not None:
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
