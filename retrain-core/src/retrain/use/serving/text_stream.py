"""The text of a completion while its tokens arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.text.tokenizer import BROKEN, CONTEXT


class TextStream:
    """Turns the tokens of one completion into text that can be shown at once.

    Returned text never changes: half a character waits for the other half, and a possible beginning of one of the
    `stops` waits until it is decided. A stop, and all after it, is not part of the text. Without a stop the text equals
    `tokenizer.decode(tokens, skip_special_tokens=True)`. Linear in length.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._tokens: list[int] = []
        # The first token that is decoded again, and the first one that is not part of the text.
        self._start = self._read = 0
        self._shown = 0
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stopped_by is not None

    def add(self, token: int) -> str:
        """Return the text that has become certain; nothing after a stop."""
        if self.is_stopped:
            return ""
        self._tokens.append(token)
        piece = self._unread()
        # Half a character waits for the rest, but a model may also sample bytes that never become one.
        return "" if piece.endswith(BROKEN) and len(self._tokens) - self._read < CONTEXT else self._grown(piece)

    def finish(self) -> str:
        piece = ""
        if not self.is_stopped and self._read < len(self._tokens):
            piece = self._grown(self._unread())
        return piece + self._show(len(self.text))

    def _grown(self, piece: str) -> str:
        if piece:
            self._start, self._read = self._read, len(self._tokens)
        searched = max(0, len(self.text) - max(map(len, self._stops), default=0))
        self.text += piece
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]
        return self._show(len(self.text) - (0 if found else self._held()))

    def _held(self) -> int:
        """Return the length of the longest end of the text with which a stop begins."""
        sizes = range(max(map(len, self._stops), default=1) - 1, 0, -1)
        return next(
            (n for n in sizes if any(stop.startswith(self.text[-n:]) for stop in self._stops if n < len(stop))), 0
        )

    def _show(self, end: int) -> str:
        piece, self._shown = self.text[self._shown : end], max(self._shown, end)
        return piece

    def _unread(self) -> str:
        """Return the text of the tokens since `_read`, decoded with those before them."""
        # A decoder may drop the space before its first token, so tokens before it are decoded, too.
        tokens = self._tokens[self._start :]
        before, after = (
            str(self._tokenizer.decode(some, skip_special_tokens=True))
            for some in (tokens[: self._read - self._start], tokens)
        )
        return after[len(before) :] if after.startswith(before) else after
