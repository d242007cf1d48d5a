"""v1 environments: a taskset and the one agent that plays it in chats."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from verifiers.v1 import Task
from verifiers.v1.clients import Client

from retrain.api import LoadedData, Score, installed_version
from retrain_rewards.environments.episode import MODEL, Episode, TurnLimitError, score_of
from retrain_rewards.environments.loop import reason_of
from retrain_rewards.environments.verifiers_library.settings import Settings, Tasks

TURN_LIMIT = "max_turns"  # the library's own word for it
CHAT = "retrain-chat"  # our harness, under the name that the library's loader finds it by
# The library's default, never an explicit choice, and its plain chat.
CHAT_HARNESSES = ("bash", "null")
# The library's own limit would count the time in which the policy samples.
UNLIMITED_S = 1e9
UNSCORED = ("setup_timeout", "finalize_timeout", "scoring_timeout")


class Tasksets:
    """One v1 environment with one agent, played by `ChatHarness` in this process without the library's time limits."""

    def __init__(self, settings: Settings, module: ModuleType, *, is_classic: bool) -> None:
        self.settings = settings
        self.module = module
        self.is_classic = is_classic  # has `load_environment`, unknown to this version of the library
        self._env: Any = None
        self._tasks = Tasks(settings=settings)
        self._open: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._playing: dict[str, tuple[Episode, Any]] = {}  # by the id of the library's trace

    def load(self) -> LoadedData:
        self._check_kind()
        self._env = self._made()
        self._check_tools()
        record_only_metrics_that_work()
        for task in self._read():
            data = task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})
            opening = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
            prompt = data.get("prompt")
            said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
            self._tasks.add(
                task,
                prompt=[*opening, *said] or "",
                reference=data.get("answer"),
                task=data.get("name") or "",
                info=data,
                identity=data,
            )
        endless = ", the first of an endless taskset" if self._env.taskset.INFINITE else ""
        return self._tasks.loaded(f"v1, verifiers {installed_version('verifiers')}{endless}")

    async def play(self, episode: Episode) -> None:
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        task = self._tasks.handles.get(episode.example.id)
        if task is None:
            episode.failure = f"{self.settings.id} has no task {episode.example.id}"
            return
        if self._open is None:
            self._open = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve(self._open))
        await asyncio.shield(self._open)
        # The library wants a server's address; `PolicyClient` takes its place, and nothing listens on port 9.
        nowhere = EvalClientConfig(base_url="http://127.0.0.1:9", api_key_var="RETRAIN_NO_KEY")

        def remember(trace: Any) -> None:
            self._playing[trace.id] = (episode, trace)

        try:
            context = ModelContext(model=MODEL, client=nowhere)
            episode.result = await self._env.run_episode(task, context, on_trace=remember)
        finally:
            self._playing = {name: one for name, one in self._playing.items() if one[0] is not episode}
        self._take_outcome(episode)

    async def score(self, group: Sequence[Episode]) -> None:
        """Do nothing: the library scores each episode at its end."""

    def _take_outcome(self, episode: Episode) -> None:
        played = episode.result
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if errors or not played.ok:
            said = f"{errors[-1].type}: {errors[-1].message}" if errors else "the library says no more"
            episode.failure = f"the episode failed: {said}"
            return
        if len(played.traces) != 1:
            episode.failure = f"the agent was run {len(played.traces)} times; only one run can be trained"
            return
        trace = played.traces[0]
        episode.hit_turn_limit = trace.stop_condition == TURN_LIMIT
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if trace.stop_condition in UNSCORED or missing or not trace.rewards:
            missed = f"without {', '.join(missing)}" if missing else "without a reward"
            episode.score = Score.failed(f"scoring ended ({trace.stop_condition}) {missed}")
            return
        parts = {name: getattr(reward, "score", reward) for name, reward in trace.rewards.items()}
        episode.score = score_of(trace.reward, {**trace.metrics, **parts})

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Keep the tool servers and the library's own loopback endpoint open, once for all episodes."""
        try:
            async with self._env.serving():
                client = PolicyClient(lambda trace_id: self._playing[trace_id])
                self._env._interception._client = lambda config: client
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(RuntimeError(f"its servers could not be started: {reason_of(error)}"))

    def _check_kind(self) -> None:
        from verifiers.v1 import Taskset

        exported = [getattr(self.module, name, None) for name in getattr(self.module, "__all__", ())]
        if any(isinstance(one, type) and issubclass(one, Taskset) for one in exported):
            return
        if self.is_classic:
            version = installed_version("verifiers")
            what = f"{self.settings.id!r} is a classic environment, and verifiers {version} no longer knows these"
            fix = "pip install 'verifiers==0.3.1'"
            raise self.settings.problem("id", code="environment.classic-unsupported", what=what, fix=fix)
        what = f"the module {self.module.__name__!r} is not an environment"
        why, fix = "it has neither load_environment nor a Taskset in __all__", "check the id"
        raise self.settings.problem("id", code="environment.not-an-environment", what=what, why=why, fix=fix)

    def _made(self) -> Any:
        from pydantic import ValidationError
        from verifiers.v1.utils.loaders import environment_class, load_environment, resolve_env_config

        try:
            role = self._role(environment_class(self.settings.library_id))
            harness = importlib.import_module("retrain_rewards.environments.verifiers_library.chat_harness")
            sys.modules["verifiers.v1.harnesses.retrain_chat"] = harness  # where the library's loader looks
            agent = {"harness": {"id": CHAT}, "runtime": {"type": "subprocess"}, "timeout": {"rollout": UNLIMITED_S}}
            config = {
                "taskset": {**self.settings.args, "id": self.settings.library_id},
                role: agent,
                "interception": {"type": "server"},
                "timeout": {"episode": None},
            }
            return load_environment(resolve_env_config(config))
        except ValidationError as error:
            found = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
            what = f"{self.settings.id!r} does not take these arguments: {'; '.join(found)}"
            fix = "correct the arguments in [environment] args"
            raise self.settings.problem("args", code="environment.bad-args", what=what, fix=fix) from error
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            if hasattr(error, "problems"):
                raise
            what = f"{self.settings.id!r} could not be made: {reason_of(error)}"
            fix = "see [environment] args and its requirements"
            raise self.settings.problem("id", code="environment.not-made", what=what, fix=fix) from error

    def _role(self, kind: type[Any]) -> str:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils.loaders import default_harness_id, env_config_type

        fields = env_config_type(self.settings.library_id).model_fields
        roles = {name: field.default for name, field in fields.items() if isinstance(field.default, AgentConfig)}
        if len(roles) != 1:
            what = f"{self.settings.id!r} ({kind.__name__}) is played by {len(roles)} agents: {', '.join(roles)}"
            fix = "choose an environment with one agent"
            raise self.settings.problem("id", code="environment.several-agents", what=what, fix=fix)
        ((name, default),) = roles.items()
        harness = default.harness.id if default.harness is not None else default_harness_id(self.settings.library_id)
        if harness not in CHAT_HARNESSES:
            what = f"{self.settings.id!r} brings the harness {harness!r}, and only plain chats can be trained"
            fix = "choose an environment that is played in a chat"
            raise self.settings.problem("id", code="environment.foreign-harness", what=what, fix=fix)
        return str(name)

    def _check_tools(self) -> None:
        """Start and end each kind of tool server; ConfigError where one does not serve, or not on this machine."""
        taskset = self._env.taskset
        toolsets = [*taskset.toolsets(taskset.config), *type(taskset).task_type().toolsets(taskset.config.task)]
        toolsets = [one for one in toolsets if not one.config.url]
        if not toolsets:
            return
        from retrain_rewards.environments.verifiers_library.tool_servers import check_tool_servers, fork_tool_servers

        if elsewhere := [one.config.runtime.type for one in toolsets if one.config.runtime.type != "subprocess"]:
            what = f"the tools of {self.settings.id!r} run in {elsewhere[0]!r}, and only local ones can be used"
            fix = "set the runtime of its tools to 'subprocess' in args"
            raise self.settings.problem("id", code="environment.remote-tools", what=what, fix=fix)
        fork_tool_servers(sorted({type(one).__module__ for one in toolsets}))
        try:
            asyncio.run(check_tool_servers(toolsets, self.settings.timeout_s))
        except Exception as error:  # of the environment's code, or of the library
            late = f"they do not serve within timeout_s = {self.settings.timeout_s:g} s"
            why = late if isinstance(error, TimeoutError) else reason_of(error)
            fix = "its module must end with `if __name__ == '__main__': YourToolset.run()`, and that must work"
            what = f"the tools of {self.settings.id!r} cannot be started"
            raise self.settings.problem("id", code="environment.tools-failed", what=what, why=why, fix=fix) from error

    def _read(self) -> Iterator[Any]:
        """Yield the tasks, at most `endless_tasks` of an endless taskset; ConfigError if they need more than a chat."""
        taskset = self._env.taskset
        tasks: Iterator[Any] = iter(taskset)
        if taskset.INFINITE:
            tasks = itertools.islice(tasks, self.settings.endless_tasks)
        needs_container = type(taskset).task_type().NEEDS_CONTAINER
        try:
            for task in tasks:
                if needs_container or task.data.image is not None:
                    what = f"the tasks of {self.settings.id!r} need a container"
                    fix = "choose an environment of text tasks"
                    raise self.settings.problem("id", code="environment.foreign-runtime", what=what, fix=fix)
                yield task
        except (OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError) as error:
            if hasattr(error, "problems"):
                raise
            what = f"the tasks of {self.settings.id!r} could not be read: {reason_of(error)}"
            fix = "check [environment] args and the connection"
            raise self.settings.problem("id", code="environment.tasks-unreadable", what=what, fix=fix) from error


class PolicyClient(Client):  # type: ignore[misc]  # the library has no stubs
    """Answers the chat completions of all episodes; `playing` finds the episode by the id of its trace."""

    def __init__(self, playing: Callable[[str], tuple[Episode, Any]]) -> None:
        self._playing = playing

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        episode, trace = self._playing(session_id or "")
        try:
            raw = await episode.complete(body.get("messages") or [], body.get("tools"))
        except TurnLimitError:
            # So that the library sees an end, not a failure.
            trace.stop("max_turns")
            raise
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


def record_only_metrics_that_work() -> None:
    """From now on, a metric that raises or is not finite only loses its value, and not the score."""
    if hasattr(Task, "_retrain_watched"):
        return
    hooks_of, judges_of = Task.hooks, Task.plugged_judges

    def hooks(self: Any, attr: str) -> list[Callable[..., Any]]:
        def measures(fn: Any) -> bool:
            return attr == "metric" or (attr == "reward" and getattr(fn, "_vf_weight", 1.0) == 0)

        return [_tried(fn, fn.__name__) if measures(fn) else fn for fn in hooks_of(self, attr)]

    def judges(self: Any) -> list[Any]:
        found = list(judges_of(self))
        for judge in found:
            if judge.config.weight == 0:
                judge.score = _tried(judge.score, judge.reward_name)
        return found

    Task.hooks, Task.plugged_judges, Task._retrain_watched = hooks, judges, True


def _tried(measure: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(measure)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = measure(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            named = value if isinstance(value, Mapping) else {name: value}
            return {each: float(part) for each, part in named.items() if math.isfinite(part)}
        except Exception:
            return {}

    return call
