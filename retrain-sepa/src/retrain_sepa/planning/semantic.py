"""The `semantic` planning detector: windows of words that sound more like planning than like execution."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.api import ConfigError, Mask, PlanningDetector, PluginContext, Problem, Tokens, install_line
from retrain_sepa.planning.offsets import TokenDecoder, token_decoder
from retrain_sepa.tables import PlanningTable

PLANNING = (
    "Wait, let me think about this again.",
    "Let me check whether this is right.",
    "I should verify the result before going on.",
    "Hmm, that does not look correct.",
    "On second thought, there may be a better way.",
    "Let me try a different approach.",
    "Let's go back to the beginning of the problem.",
    "I made a mistake somewhere, so let me start over.",
    "What if we look at it from another angle?",
    "The key idea is to use symmetry.",
    "First I need to understand what is being asked.",
    "Let me make a plan before computing anything.",
    "We can break the problem into smaller parts.",
    "Is there a pattern that I am missing?",
    "Notice that this is the same as the earlier case.",
    "Alternatively, we could work backwards from the answer.",
    "This approach does not work, so I need another one.",
    "Let me double-check the assumption I made.",
    "Suppose instead that the opposite were true.",
    "I am not sure about this step, let me reconsider it.",
)
EXECUTION = (
    "Two plus three equals five.",
    "Multiply both sides by four.",
    "Substituting x equals two gives seven.",
    "The sum is twelve and the product is thirty-five.",
    "So x squared minus one equals zero.",
    "Dividing by three we get nine.",
    "The area is base times height over two.",
    "Adding the numbers gives forty-two.",
    "Therefore y equals minus six.",
    "The derivative of x squared is two x.",
    "Expanding the bracket gives a squared plus two a b.",
    "There are ten choose three ways to pick them.",
    "The remainder of seventeen divided by five is two.",
    "The angle is sixty degrees.",
    "The final answer is twenty-four.",
)


WINDOW_WORDS = 12
STRIDE_WORDS = 6
MIN_WORDS = 3  # shorter texts carry too little meaning to compare
FLOOR = 0.25  # least similarity to planning: a window unlike both kinds is not planning
WORD = re.compile(r"\S+")
Vectors = NDArray[np.float32]


def semantic_detector(context: PluginContext) -> PlanningDetector:
    """The detector that `[planning] model` and `threshold` describe; ConfigError when the model cannot be loaded."""
    table = context.config.table("planning", PlanningTable)
    where = context.config.place("planning.model")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        fix = f'{install_line("retrain-sepa", "semantic")}, or use [planning] detector = "regex"'
        raise ConfigError(
            Problem(where=where, what=f"the semantic detector needs sentence-transformers: {error}", fix=fix)
        ) from error
    try:
        model = SentenceTransformer(table.model, device="cpu")
    except Exception as error:  # the library raises many exception types for a name or folder it cannot load
        reason = " ".join(str(error).split())[:300]
        fix = "give a local folder or a hub id that can be reached"
        raise ConfigError(
            Problem(where=where, what=f"no sentence model {table.model!r}", why=reason, fix=fix)
        ) from error
    return SemanticPlanningDetector(
        decoder=token_decoder(context.tokenizer),
        model=model,
        margin=table.threshold,
        planning_D=_centroid(model, PLANNING),
        execution_D=_centroid(model, EXECUTION),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SemanticPlanningDetector:
    """Marks the tokens of every window that sounds like planning.

    Windows of 12 words every 6 words, the last one ending with the text. A window plans when
    cos(window, planning) > cos(window, execution) + margin and cos(window, planning) > 0.25, where both sides are
    centroids of anchor sentences; a token in any such window is marked. `margin` is a difference of similarities.
    """

    decoder: TokenDecoder
    model: Any
    margin: float
    planning_D: Vectors
    execution_D: Vectors

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length; all windows of the step are embedded in one call."""
        decoded_G = [self.decoder.decode(tokens_T) for tokens_T in completions_G]
        windows_G = [word_windows(decoded.text) for decoded in decoded_G]
        texts = [decoded.text[a:b] for decoded, windows in zip(decoded_G, windows_G, strict=True) for a, b in windows]
        plans = iter(self._plans(texts).tolist())
        return [
            decoded.covering([window for window in windows if next(plans)])
            for decoded, windows in zip(decoded_G, windows_G, strict=True)
        ]

    def _plans(self, texts: Sequence[str]) -> Mask:
        if not texts:
            return np.zeros(0, np.bool_)
        distinct = sorted(set(texts))
        vectors = _embed(self.model, distinct)
        like_planning, like_execution = vectors @ self.planning_D, vectors @ self.execution_D
        is_planning = (like_planning > like_execution + self.margin) & (like_planning > FLOOR)
        verdict = dict(zip(distinct, is_planning.tolist(), strict=True))
        return np.array([verdict[text] for text in texts], np.bool_)


def word_windows(text: str) -> list[tuple[int, int]]:
    """Character ranges of the windows of a text; none when it has fewer than three words."""
    words = [match.span() for match in WORD.finditer(text)]
    if len(words) < MIN_WORDS:
        return []
    last = max(len(words) - WINDOW_WORDS, 0)
    firsts = [*range(0, last, STRIDE_WORDS), last]
    return [(words[first][0], words[min(first + WINDOW_WORDS, len(words)) - 1][1]) for first in firsts]


def _centroid(model: Any, sentences: Sequence[str]) -> Vectors:
    mean = _embed(model, sentences).mean(axis=0)
    centroid: Vectors = mean / np.linalg.norm(mean)
    return centroid


def _embed(model: Any, texts: Sequence[str]) -> Vectors:
    whole = [text.encode("utf-8", "replace").decode() for text in texts]  # a completion may end in half a character
    vectors: Vectors = model.encode(whole, convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False)
    return vectors
