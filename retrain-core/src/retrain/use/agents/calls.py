"""The calls of one episode as a tree of exact tokens, and the tree as rows for training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrain.kernel.types import Completion, Sample, StopReason, Tokens
from retrain.text.transcript import Transcript, written


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One answer of the policy: its prompt, what it sampled, and the text of both, special tokens included.

    `parent` is the answer whose conversation the prompt continues: its tokens are the first ones of `prompt_T`.
    """

    prompt_T: Tokens
    sample: Sample
    text: str
    parent: Call | None
    children: list[Call] = field(default_factory=list)

    @property
    def tokens_T(self) -> Tokens:
        """Prompt and answer."""
        return np.concatenate([self.prompt_T, self.sample.tokens_T])


class Calls:
    """What an agent has asked and got.

    A prompt whose text begins with that of an earlier call, its answer included, continues that call: its tokens are
    kept as they were sampled, and only the rest of the text is tokenised. Any other prompt is tokenised whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._calls: list[Call] = []  # in the order of their answers

    def __iter__(self) -> Iterator[Call]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def prompt(self, text: str) -> tuple[Call | None, Tokens]:
        """The call that a rendered conversation continues, None for none, and all its token ids."""
        continued = [call for call in self._calls if text.startswith(call.text)]
        parent = max(continued, key=lambda call: (len(call.text), call.tokens_T.tobytes()), default=None)
        added = text if parent is None else text[len(parent.text) :]
        special = parent is None and not self._tokenizer.chat_template  # a template writes its special tokens itself
        ids_T = np.asarray(self._tokenizer(added, add_special_tokens=special)["input_ids"], dtype=np.int64)
        return parent, ids_T if parent is None else np.concatenate([parent.tokens_T, ids_T])

    def add(self, *, text: str, prompt_T: Tokens, sample: Sample, parent: Call | None) -> Call:
        """Keep an answer to the prompt with this text."""
        whole = text + written(self._tokenizer, prompt_T, sample.tokens_T)
        call = Call(prompt_T=prompt_T, sample=sample, text=whole, parent=parent)
        self._calls.append(call)
        if parent is not None:
            parent.children.append(call)
        return call

    def remove(self, call: Call) -> bool:
        """Forget an answer that nobody got; not one that has been continued, since somebody did."""
        if call not in self._calls or call.children:
            return False
        self._calls.remove(call)
        if call.parent is not None:
            call.parent.children.remove(call)
        return True

    def completion(self, stop_reason: StopReason, opening_T: Tokens) -> Completion:
        """The episode as one completion, in which every sampled token is an action once.

        A call continues the context of its parent if it is the first to do so. A further one, a branch, begins a
        context with a copy of what came before, masked. The order follows from the tokens alone, so that it is the same
        whichever of two calls at once came first. `opening_T` stands for an agent that made no call.
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
    """By length of the prompt, then by the tokens: for an agent that asks one thing after another, as it asked."""
    return sorted(calls, key=lambda call: (len(call.prompt_T), call.tokens_T.tobytes()))
