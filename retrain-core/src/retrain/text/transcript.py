"""The exact tokens of an episode over its turns, observed and sampled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.types import Completion, Experts, Floats, Mask, Message, Sample, StopReason, Tokens, joined_experts
from retrain.text.chat import THOUGHT_FIELDS, chat_text
from retrain.text.template_probe import QUESTION
from retrain.text.thinking import Thinking, Thought, decoded, template_args, thinking_of

MARK = "retrain-says"  # in place of an answer, to find the text that a template writes after it
ANSWERED, THOUGHT = "Seven.", "Hm."  # with which a template is tried


@dataclass(slots=True, kw_only=True, eq=False)
class Transcript:
    """Tokens of one episode so far; sampled tokens are never tokenised again.

    The chat template renders the conversation of each turn. If the text continues the context, only the rest is
    tokenised and appended; if the template rewrites earlier turns, what it writes after the last one. Otherwise
    (environments that shorten the history), and in each turn with `history` "rows", a new context starts with the whole
    text, and `starts` gets its position.
    """

    tokenizer: Any
    template_args: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking | None = None
    history: str = "sampled"
    tokens_T: list[Tokens] = field(default_factory=list)
    action_T: list[Mask] = field(default_factory=list)
    logprobs_T: list[Floats] = field(default_factory=list)
    entropies_T: list[Floats | None] = field(default_factory=list)
    engine_logprobs_T: list[Floats | None] = field(default_factory=list)
    experts_TLK: list[Experts | None] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    stops: list[StopReason] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # of the turns, in sampled tokens
    states: list[str] = field(default_factory=list)  # that the turns began in
    _state: str = ""
    _context: str = ""
    _messages: list[Message] = field(default_factory=list)  # of the last observation
    _turns: list[tuple[str, Thought | None]] = field(default_factory=list)  # what the policy said, and its thought
    _opening: int = 0  # tokens of the first prompt, the task: not part of the text

    def observe(
        self, prompt: str | Sequence[Message], tools: Sequence[Any], *, limit: int | None = None, state: str = ""
    ) -> bool:
        """Append an observation: a chat, or plain text that no template touches; `context_T` ends with it.

        False when the context would leave no room for a token below `limit`; then only a first prompt is appended.
        `state` names the state of the environment; by default, it is a hash of everything since the last action.
        """
        is_chat = not isinstance(prompt, str)
        if isinstance(prompt, str):
            messages, text = list[Message](), prompt
        else:
            messages = self._with_thoughts(prompt)
            text = chat_text(messages, self.tokenizer, self.template_args, tools)
        rest = None if self.history == "rows" else self._rest(text, messages, tools)
        continues, added = rest is not None, text if rest is None else rest
        # Special tokens belong only at the start of a text, and a template writes them itself.
        special = not continues and not (is_chat and self.tokenizer.chat_template)
        ids_T = np.asarray(self.tokenizer(added, add_special_tokens=special)["input_ids"], dtype=np.int64)
        has_room = limit is None or len(ids_T) + (len(self.context_T) if continues else 0) < limit
        if not has_room and self.tokens_T:
            return False
        self.show(ids_T, starts=not continues)
        self._context = self._context + added if continues else text
        self._messages = messages
        acted = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        since = added if isinstance(prompt, str) else prompt[acted[-1] + 1 if acted else 0 :]
        self._state = state or hashlib.blake2b(json.dumps(since, default=str).encode(), digest_size=8).hexdigest()
        return has_room

    def _rest(self, text: str, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text to append to the context; None where the environment rewrote the conversation."""
        if self._context and text.startswith(self._context):
            return text[len(self._context) :]
        seen = len(self._messages)
        if not 0 < seen < len(messages) or messages[:seen] != self._messages:
            return None
        if not _says(messages[seen], self._turns[-1][0]):
            return None
        marked = [*messages[:seen], {"role": "assistant", "content": MARK}, *messages[seen + 1 :]]
        try:
            _, found, rest = chat_text(marked, self.tokenizer, self.template_args, tools).rpartition(MARK)
        except Exception:  # a template that wants the tool calls of this message
            return None
        if self._context.endswith("<|return|>"):  # as gpt-oss ends a turn, which its template changes later
            rest = rest.removeprefix("<|end|>")
        # The end of the turn is sampled already, unless the answer was cut off.
        overlap = next(n for n in range(len(rest), -1, -1) if self._context.endswith(rest[:n]))
        return rest[overlap:] if found else None

    def _with_thoughts(self, prompt: Sequence[Message]) -> list[Message]:
        """Return the messages, with the policy's thoughts for templates that keep some of them."""
        messages, turns = list[Message](), [thought for _, thought in self._turns if thought is not None]
        for message in prompt:
            if turns and _says(message, turns[0].answer):
                message = {**message, **dict.fromkeys(THOUGHT_FIELDS, turns.pop(0).reasoning)}
            messages.append(message)
        return messages

    def show(self, tokens_T: Tokens, *, starts: bool) -> None:
        """Append tokens that the policy did not sample, or not in this episode; `starts` begins a new context."""
        if starts:
            self.starts.append(self.length)
        self._append(tokens_T, None)
        self._opening = self._opening or self.length

    def sampled(self, sample: Sample) -> None:
        self._append(np.asarray(sample.tokens_T, dtype=np.int64), sample)
        self.stops.append(sample.stop_reason)
        self.lengths.append(int(sample.action_T.sum()))
        self.states.append(self._state)
        self.versions.append(sample.policy_version)

    def take(self, sample: Sample) -> str:
        """Append a sample of the policy; returns its text without special tokens."""
        context_T, text = self.context_T, str(self.tokenizer.decode(sample.tokens_T, skip_special_tokens=True))
        self._context += written(self.tokenizer, context_T, sample.tokens_T)
        thought = self.thinking.split(context_T, sample.tokens_T) if self.thinking else None
        said = self.thinking.seen(text, thought) if self.thinking else text
        self._turns.append((said, thought))
        self.sampled(sample)
        return said

    @property
    def context_T(self) -> Tokens:
        """Tokens since the last start: the ones that the policy sees."""
        return np.concatenate(self.tokens_T)[self.starts[-1] :]

    @property
    def length(self) -> int:
        return sum(len(part) for part in self.tokens_T)

    def completion(self, stop_reason: StopReason) -> Completion:
        """The episode as one completion; after several turns its text is the whole dialogue after the task."""
        tokens_T = np.concatenate(self.tokens_T)
        several = len(self.stops) > 1
        text = self.tokenizer.decode(tokens_T[self._opening :], skip_special_tokens=not several)
        thoughts = [thought for _, thought in self._turns if thought is not None]
        said, last = self._turns[-1] if self._turns else ("", None)
        return Completion(
            tokens_T=tokens_T,
            action_T=np.concatenate(self.action_T),
            logprobs_T=np.concatenate(self.logprobs_T),
            entropies_T=joined(self.entropies_T),
            engine_logprobs_T=joined(self.engine_logprobs_T),
            experts_TLK=joined_experts(self.experts_TLK, self.tokens_T),
            text=text,
            stop_reason=stop_reason,
            policy_version=min(self.versions, default=0),
            starts=tuple(self.starts),
            turns=len(self.stops),
            reasoning="\n\n".join(thought.reasoning for thought in thoughts),
            answer=None if not thoughts else last.answer if last else said,
        )

    def _append(self, tokens_T: Tokens, sample: Sample | None) -> None:
        zeros_T = np.zeros(len(tokens_T))
        context = None if sample is None else sample.context_experts_TLK
        if context is not None and self.tokens_T:
            self.experts_TLK[-1] = context[len(context) - len(self.tokens_T[-1]) :]
        self.experts_TLK.append(None if sample is None else sample.experts_TLK)
        self.tokens_T.append(tokens_T)
        self.action_T.append(np.zeros(len(tokens_T), np.bool_) if sample is None else sample.action_T)
        self.logprobs_T.append(zeros_T if sample is None else np.asarray(sample.logprobs_T, dtype=np.float64))
        self.entropies_T.append(zeros_T if sample is None else sample.entropies_T)
        self.engine_logprobs_T.append(zeros_T if sample is None else sample.engine_logprobs_T)


def _says(message: Message, text: str) -> bool:
    return message["role"] == "assistant" and str(message.get("content")).strip() == text.strip()


def written(tokenizer: Any, context_T: Tokens, tokens_T: Tokens) -> str:
    """The text of tokens with all special ones, as it reads after its context.

    Some tokenizers write the first piece of a text differently, so the context is decoded with it.
    """
    before, after = decoded(tokenizer, context_T), decoded(tokenizer, np.concatenate([context_T, tokens_T]))
    return after[len(before) :] if after.startswith(before) else decoded(tokenizer, tokens_T)


def joined(parts: Sequence[Floats | None]) -> Floats | None:
    """All parts as one array; None when a turn lacks its part."""
    present = [part for part in parts if part is not None]
    return np.concatenate(present) if len(present) == len(parts) else None


def history_note(config: Config, tokenizer: Any) -> str:
    """Return one line if a new turn changes the earlier ones, whose sampled tokens are kept; empty otherwise."""
    if config.environment.history == "rows" or not tokenizer.chat_template:
        return ""
    arguments, thinks = template_args(config, tokenizer), bool(thinking_of(config, tokenizer).opening)
    answer = {"role": "assistant", "content": ANSWERED, **dict.fromkeys(THOUGHT_FIELDS, THOUGHT)}
    try:
        first = chat_text([QUESTION], tokenizer, arguments)
        later = chat_text([QUESTION, answer, QUESTION], tokenizer, arguments)
    except Exception:  # it may want other roles; the environment's own messages are rendered later
        return ""
    drops = thinks and config.data.thinking != "off" and THOUGHT not in later
    if later.startswith(first) and not drops:
        return ""
    what = "drops earlier thoughts" if drops else "changes earlier text"
    kept = 'the policy still sees the tokens that it sampled; [environment] history = "rows" makes each turn a row'
    if config.environment.provider == "agent":  # whose own program keeps the conversation
        kept = "calls that it changes are separate rows"
    return f"the chat template {what} when a turn is added: {kept}"
