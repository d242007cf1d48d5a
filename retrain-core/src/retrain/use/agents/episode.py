"""One episode of an agent: its key, its limits, and the tokens of its calls."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.types import Completion, Message, Sample, SamplingParams, Score, StopReason, Tokens
from retrain.tasks.prompts import chat_of
from retrain.text.thinking import template_args, thinking_of
from retrain.text.transcript import Transcript, written
from retrain.use.serving.batcher import BY_TOKEN, Batcher, Failure, Inbox, first_tokens
from retrain.use.serving.parse import Asked, RequestError
from retrain.use.serving.service import Answer, Answers, Choice, plain_message

MODEL = "policy"  # the name of the list of models; a request may give any
# A client may send the temperature rounded.
SAME_TEMPERATURE = 1e-6
# Clients retry after 409 and 429, but not after 410.
GONE = 410


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One answer of the policy: its prompt, the sampled tokens, and the text of both, special tokens included.

    `parent` is the answer whose conversation the prompt continues: `prompt_T` begins with its tokens.
    """

    prompt_T: Tokens
    sample: Sample
    text: str
    parent: Call | None
    children: list[Call] = field(default_factory=list)

    @property
    def tokens_T(self) -> Tokens:
        return np.concatenate([self.prompt_T, self.sample.tokens_T])


class Calls:
    """The calls of an agent so far.

    A prompt whose text begins with an earlier call and its answer continues that call: the sampled tokens are kept, and
    only the rest of the text is tokenised. Any other prompt is tokenised whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._calls: list[Call] = []  # in the order of their answers

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def prompt(self, text: str) -> tuple[Call | None, Tokens]:
        """Return the call that a rendered conversation continues, if any, and all its token ids."""
        continued = [call for call in self._calls if text.startswith(call.text)]
        # Among equal texts with different tokens, the choice must not depend on the order of arrival.
        parent = max(continued, key=lambda call: (len(call.text), call.tokens_T.tobytes()), default=None)
        added = text if parent is None else text[len(parent.text) :]
        # A chat template writes its special tokens itself.
        special = parent is None and not self._tokenizer.chat_template
        ids_T = np.asarray(self._tokenizer(added, add_special_tokens=special)["input_ids"], dtype=np.int64)
        return parent, ids_T if parent is None else np.concatenate([parent.tokens_T, ids_T])

    def add(self, *, text: str, prompt_T: Tokens, sample: Sample, parent: Call | None) -> Call:
        whole = text + written(self._tokenizer, prompt_T, sample.tokens_T)
        call = Call(prompt_T=prompt_T, sample=sample, text=whole, parent=parent)
        self._calls.append(call)
        if parent is not None:
            parent.children.append(call)
        return call

    def remove(self, call: Call) -> bool:
        """Forget an undelivered answer; one that a later call continues was delivered."""
        if call not in self._calls or call.children:
            return False
        self._calls.remove(call)
        if call.parent is not None:
            call.parent.children.remove(call)
        return True

    def completion(self, stop_reason: StopReason, opening_T: Tokens) -> Completion:
        """Return the episode as one completion, in which every sampled token is an action once.

        The first call that continues a parent extends its context. A further one, a branch, begins a new context with a
        masked copy of the earlier tokens. The order depends only on the tokens, so concurrent calls may arrive in any
        order. `opening_T` is the context when the agent made no call.
        """
        transcript = Transcript(tokenizer=self._tokenizer)
        branches = _ordered([call for call in self._calls if call.parent is None])
        while branches:
            call, is_branch, done = branches.pop(0), True, 0
            while True:
                transcript.show(call.prompt_T[done:], starts=is_branch)
                transcript.sampled(call.sample)
                if not call.children:
                    break
                is_branch, done = False, len(call.prompt_T) + len(call.sample.tokens_T)
                call, *others = _ordered(call.children)
                branches += others
        if not transcript.starts:
            transcript.show(opening_T, starts=True)
        return transcript.completion(stop_reason)


def _ordered(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: (len(call.prompt_T), call.tokens_T.tobytes()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings shared by the episodes of a batch.

    `most_calls` counts answers, so each choice of a call. `limit` is the length of a context; `lock` is the
    tokenizer's.
    """

    params: SamplingParams
    most_calls: int
    streams: Streams
    config: Config
    tokenizer: Any
    batcher: Batcher
    limit: int | None
    lock: threading.Lock


@dataclass(slots=True, kw_only=True, eq=False)
class _Asking:
    answer: Answer
    text: str
    parent: Call | None
    prompt_T: Tokens
    number: int  # among the episode's requests with the same prompt
    calls: list[Call] = field(default_factory=list)
    is_delivered: bool = False


class Episode(Answers):
    """Answers the calls of one agent, and keeps their tokens.

    A call counts once all of its answer was sent. If the client disconnects earlier, nothing is kept, and the same
    request then gets the same answer. OpenAI's clients mark a retry: it gets the answer to the first try, if there is
    one. The seed of an answer depends on the episode, the prompt's tokens and the seed sent (or the number of equal
    prompts before), never on the order of arrival.
    """

    def __init__(self, prompt: Prompt, number: int, rules: Rules) -> None:
        super().__init__(rules.tokenizer, rules.batcher, models=(MODEL,), limit=rules.limit, lock=rules.lock)
        self.prompt, self.number, self.token = prompt, number, secrets.token_urlsafe(32)
        self.calls = Calls(rules.tokenizer)
        self.is_over = self.hit_call_limit = self.is_full = False
        self.score: Score | None = None  # without the verifier
        self.said: str | None = None  # the agent's own answer
        self.dropped = 0
        self._rules = rules
        with rules.lock:
            self._template_args = template_args(rules.config, rules.tokenizer)
        self._state = threading.RLock()
        self._asked: list[_Asking] = []
        self._quotes: dict[str, str] = {}
        self._waits = 0
        self._own_s, self._since = 0.0, time.monotonic()

    @property
    def own_s(self) -> float:
        """Seconds that the agent itself has taken; its clock stops while it waits for the policy."""
        with self._state:
            return self._own_s + (0.0 if self._waits else time.monotonic() - self._since)

    @property
    def task(self) -> dict[str, Any]:
        """The agent's input; the reference stays with the verifier."""
        example = self.prompt.example
        return {
            "id": example.id,
            "prompt": example.prompt if isinstance(example.prompt, str) else [dict(m) for m in example.prompt],
            "messages": chat_of(example, self._rules.config),
            "task": example.task,
            "info": dict(example.info),
            "seed": self._rules.streams.of(self.prompt, self.number, turn=-1),
        }

    @property
    def text(self) -> str:
        """The text to verify: the agent's answer, or the policy's last one."""
        if self.said is not None:
            return self.said
        last = list(self.calls)[-1:]
        if not last:
            return ""
        thinking, tokens_T = thinking_of(self._rules.config, self._tokenizer), last[0].sample.tokens_T
        text = str(self._tokenizer.decode(tokens_T, skip_special_tokens=True))
        return thinking.seen(text, thinking.split(last[0].prompt_T, tokens_T))

    def begin(self) -> None:
        with self._state:
            self._own_s, self._since = 0.0, time.monotonic()

    def end(self) -> None:
        """Refuse every further call, and drop those in progress."""
        with self._state:
            self.is_over = True
            for asking in self._asked:
                if not asking.calls:
                    _give_up(asking.answer)

    def completion(self) -> Completion:
        cut = self.is_full or any(call.sample.stop_reason is StopReason.LENGTH for call in self.calls)
        reason = StopReason.TURNS if self.hit_call_limit else StopReason.LENGTH if cut else StopReason.EOS
        return self.calls.completion(reason, self.prompt.tokens_T)

    def start(self, asked: Asked, events: Inbox, *, is_chat: bool, is_retry: bool = False) -> Answer:
        if not is_chat:
            raise RequestError("an agent's policy answers only chats: POST /v1/chat/completions", status=404)
        with self._state:
            self._require_ranking(asked)
            self._refuse_when_over()
            wanted, own = asked.temperature, self._rules.params.temperature
            if wanted is not None and abs(wanted - own) > SAME_TEMPERATURE:
                message = f"temperature = {wanted:g}: the policy is sampled and trained at {own:g}. Leave it out"
                raise RequestError(message, param="temperature", code="unsupported_value")
            if sum(each.answer.asked.n for each in self._asked) + asked.n > self._rules.most_calls:
                self.hit_call_limit = True
                message = f"the episode has had its {self._rules.most_calls} calls ([environment] max_turns)"
                raise RequestError(message, code="call_limit_reached")
            if is_retry and (given := self._given(asked)):
                return given
            asking = self._asking(asked, events)
            self._asked.append(asking)
            # The agent's clock stops while a call waits.
            if not self._waits:
                self._own_s += time.monotonic() - self._since
            self._waits += 1
        try:
            self._submit(asking.answer, asking.answer.works)
        except RequestError:
            self._forget(asking)
            raise
        return asking.answer

    async def follow(self, answer: Answer) -> AsyncIterator[tuple[Choice, str, slice]]:
        """Yield as `Answers.follow` does; a repeated answer comes whole."""
        if all(choice.reason for choice in answer.choices):
            for choice in answer.choices:
                yield choice, choice.text, slice(0, len(choice.tokens))
            return
        async for grown in super().follow(answer):
            yield grown

    def finish(self, answer: Answer) -> None:
        """Keep the tokens before the agent can continue from them."""
        with self._state:
            asking = self._of(answer)
            if asking is None:
                raise RequestError("this call was given up for a retry of its client", status=GONE)
            self._refuse_when_over()
            if not asking.calls:
                with self._tokenizer_lock:
                    asking.calls = [
                        self.calls.add(
                            text=asking.text, prompt_T=asking.prompt_T, sample=_joined(choice), parent=asking.parent
                        )
                        for choice in answer.choices
                    ]
                for choice in answer.choices:
                    whole = self._read_tools(answer, choice)
                    # The next prompt must repeat the calls as the policy wrote them, or its tokens would differ.
                    if choice.calls:
                        said = {"role": "assistant", "content": choice.message, "tool_calls": choice.calls}
                        self._quotes[_mark(plain_message(said))] = whole

    def delivered(self, answer: Answer) -> None:
        with self._state:
            if asking := self._of(answer):
                asking.is_delivered = True

    def cancel(self, answer: Answer) -> None:
        super().cancel(answer)
        with self._state:
            asking = self._of(answer)
            if asking is not None and not asking.is_delivered:
                self._forget(asking)
            self._resume(answer)

    def _refuse_when_over(self) -> None:
        if self.is_over:
            raise RequestError("the episode of this key has ended", status=GONE, code="episode_ended")

    def _given(self, asked: Asked) -> Answer | None:
        """Return the answer to an equal request, if it is complete; give up one that is still being sampled.

        A second sample has the same seeds, and so the same tokens.
        """
        for asking in reversed(self._asked):
            if asking.answer.asked == asked:
                if asking.calls:
                    return asking.answer
                _give_up(asking.answer)
                self._forget(asking)
                self._resume(asking.answer)
                return None
        return None

    def _asking(self, asked: Asked, events: Inbox) -> _Asking:
        messages = [self._plain(message) for message in asked.messages]
        with self._tokenizer_lock:
            text = self._rendered(messages, asked, self._template_args)
            parent, prompt_T = self.calls.prompt(text)
        if self.limit is not None and len(prompt_T) >= self.limit:
            self.is_full = True
        self._checked(prompt_T.tolist(), "messages")
        key = prompt_T.tobytes()
        taken = {each.number for each in self._asked if each.prompt_T.tobytes() == key}
        number = next(n for n in range(len(taken) + 1) if n not in taken)
        params = self._rules.params
        draw = str(number) if asked.seed is None else f"seed {asked.seed}"
        answer = self._new_answer(
            asked,
            events,
            [("", prompt_T)],
            lambda _, place: self._seed(key, draw, place),
            is_chat=True,
            model=MODEL,
            temperature=params.temperature,
            max_tokens=min(asked.max_tokens or params.max_tokens, params.max_tokens),
            greedy=params.greedy,
        )
        answer.model = asked.model or MODEL
        return _Asking(answer=answer, text=text, parent=parent, prompt_T=prompt_T, number=number)

    def _seed(self, key: bytes, draw: str, place: int) -> int:
        # Seven bytes, plus one: turn -1 is the seed of the task itself, and a turn must fit in 64 bits.
        digest = hashlib.blake2b(key + f" {draw} {place}".encode(), digest_size=7).digest()
        return self._rules.streams.of(self.prompt, self.number, turn=int.from_bytes(digest, "little") + 1)

    def _plain(self, message: Mapping[str, Any]) -> Message:
        """Return a message as the chat template reads it, with the policy's own tool calls verbatim."""
        plain = plain_message(message)
        quote = self._quotes.get(_mark(plain)) if "tool_calls" in plain else None
        return plain if quote is None else {"role": "assistant", "content": quote}

    def _of(self, answer: Answer) -> _Asking | None:
        return next((each for each in self._asked if each.answer is answer), None)

    def _forget(self, asking: _Asking) -> None:
        with self._state:
            if asking in self._asked and all(self.calls.remove(call) for call in asking.calls):
                self._asked.remove(asking)
                self.dropped += 1

    def _resume(self, answer: Answer) -> None:
        # Once per call: an answer that is given again did not wait.
        if answer.works:
            answer.works = []
            self._waits -= 1
            if not self._waits:
                self._since = time.monotonic()


def _give_up(answer: Answer) -> None:
    """Stop sampling it, and notify the waiting client."""
    for work in answer.works:
        work.is_cancelled = True
        work.events.put(work, Failure(message="this call was given up", is_stopping=True))


def _joined(choice: Choice) -> Sample:

    def whole(name: str) -> Any:
        parts = [getattr(piece, name) for piece in choice.pieces]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    arrays = {name: whole(name) for name in BY_TOKEN}
    reason = StopReason.LENGTH if choice.reason == "length" else StopReason.EOS
    return first_tokens(replace(choice.pieces[-1], **arrays, stop_reason=reason), len(choice.tokens))


def _mark(message: Mapping[str, Any]) -> str:
    return json.dumps([message.get("content", ""), message["tool_calls"]], sort_keys=True)
