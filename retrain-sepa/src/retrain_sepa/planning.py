"""The planning detectors: `regex` finds curated phrases, `semantic` windows of words that resemble planning."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.api import ConfigError, Mask, PlanningDetector, PluginContext, Problem, Tokens
from retrain_sepa.tables import PlanningPhrases, PlanningTable
from retrain_sepa.token_text import TokenDecoder, token_decoder


def regex_detector(context: PluginContext) -> PlanningDetector:
    """Build the detector of `[logging] strategic_grams`; ConfigError for phrases without words."""
    if context.tokenizer is None:
        what, fix = "the regex planning detector needs a tokenizer", "give the context one"
        raise ConfigError(Problem(code="planning.no-tokenizer", what=what, fix=fix))
    try:
        finder = PhraseFinder.of(parse_grams(context.config.table("logging", PlanningPhrases).strategic_grams))
    except ConfigError as error:
        where = context.config.place("logging.strategic_grams")
        fix = "give at least one phrase of words, or remove the key for the default list"
        raise ConfigError(*(replace(problem, where=where, fix=fix) for problem in error.problems)) from None
    return RegexPlanningDetector(decoder=token_decoder(context.tokenizer), finder=finder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexPlanningDetector:
    """Marks exactly the tokens that cover a character of a phrase.

    The paper (HICRA, arXiv:2509.03646) mines its strategic grams from correct solutions; these are a fixed list.
    """

    decoder: TokenDecoder
    finder: PhraseFinder

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        decoded_G = (self.decoder.decode(tokens_T) for tokens_T in completions_G)
        return [decoded.covering(self.finder.spans(decoded.text)) for decoded in decoded_G]


THEMES: dict[str, tuple[str, ...]] = {
    "hesitation": ("wait let me", "let me think", "on second thought"),
    "verification": ("let me check", "let me verify", "is this right", "double check"),
    "backtracking": ("try another", "go back", "start over", "that's not right", "that doesn't work"),
    "alternatives": ("another way", "alternatively we", "what if"),
    "metacognition": ("notice that", "the key is", "key insight"),
}
DEFAULT_PHRASES = tuple(phrase for phrases in THEMES.values() for phrase in phrases)

# Scripts written without spaces, and Hangul, whose particles directly follow a foreign word: their letters do not mark
# the edge of a word, so a phrase next to one still counts.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff"
    "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff"
)
LETTER = rf"[^\W_{UNSPACED}]"
APOSTROPHES = "'\u2019\u2018\u02bc\uff07\u2032`\u00b4"
APOSTROPHE = rf"\s?[{APOSTROPHES}]\s?"  # WordPiece decodes "that's" as "that ' s"
END = f"(?:(?<=[{UNSPACED}])|(?!{LETTER}))"
SEPARATOR = r"[\W_]++"  # possessive: a run is read once, so the search stays linear
IS_UNSPACED = re.compile(f"[{UNSPACED}]")
Trie = dict[str, Any]  # word -> Trie; the empty word marks the end of a phrase


@dataclass(frozen=True, slots=True)
class PhraseFinder:
    """Finds every occurrence of the phrases, overlapping ones included, in time linear in the text."""

    pattern: re.Pattern[str]

    @classmethod
    def of(cls, phrases: Sequence[str]) -> PhraseFinder:
        """Compile the phrases; ConfigError for no phrases, or a phrase without a word."""
        empty = [phrase for phrase in phrases if not words(phrase)]
        if empty or not phrases:
            what = f"a planning phrase contains no word: {', '.join(map(repr, empty)) or 'none is given'}"
            fix = "write phrases of words in [logging] strategic_grams, or remove the key"
            raise ConfigError(Problem(code="planning.empty-phrase", what=what, fix=fix))
        return cls(re.compile(phrase_pattern(phrases)))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return character ranges `[start, end)`, by start; the longest of phrases that start together."""
        # The one character whose lower case is two characters long would shift all offsets after it.
        lowered = text.replace("\u0130", "i").lower()
        found, position = [], 0
        while match := self.pattern.search(lowered, position):
            found.append(match.span())
            # The next phrase may start inside this one: "wait, let me think".
            position = match.start() + 1
        return found


def parse_grams(text: str) -> tuple[str, ...]:
    """Return the phrases of a JSON array, or of a text with commas; the default list for an empty text."""
    if not text.strip():
        return DEFAULT_PHRASES
    grams = json.loads(text) if text.strip().startswith("[") else text.split(",")
    return tuple(gram.strip() for gram in grams if gram.strip())


def words(phrase: str) -> list[str]:
    """Return the words of a phrase in lower case, apostrophes inside a word as `'`, without other punctuation."""
    plain = phrase.replace("\u0130", "i").lower()
    plain = re.sub(f"(?<=\\w)[{APOSTROPHES}](?=\\w)", "'", plain)
    plain = re.sub(r"(?<!\w)'|'(?!\w)", " ", plain)  # at the edge of a word it is a quote
    return "".join(
        char if char == "'" or (char.isalnum() or unicodedata.category(char).startswith("M")) else " " for char in plain
    ).split()


def phrase_pattern(phrases: Sequence[str]) -> str:
    """Return one expression for all phrases, for text in lower case: a tree of words, longer phrases tried first.

    Any run of spaces and punctuation may separate words; no letter or digit may precede the first or follow the last,
    except in scripts written without spaces. No quantifier is nested in another. Each edge is written once, not once
    per phrase, because `re` takes a millisecond to compile each set of letters.
    """
    trie: Trie = {}
    for phrase in phrases:
        node = trie
        for word in words(phrase):
            node = node.setdefault(word, {})
        node[""] = {}
    bounded = {word: node for word, node in trie.items() if not IS_UNSPACED.match(word)}
    free = {word: node for word, node in trie.items() if word not in bounded}
    alternatives = [f"(?<!{LETTER}){_branches(bounded)}"] if bounded else []
    return f"(?:{'|'.join([*alternatives, *([_branches(free)] if free else [])])}){END}"


def _branches(trie: Trie) -> str:
    ordered = sorted((word for word in trie if word), key=len, reverse=True)
    patterns = (APOSTROPHE.join(map(re.escape, word.split("'"))) + _continuation(trie[word]) for word in ordered)
    return f"(?:{'|'.join(patterns)})"


def _continuation(trie: Trie) -> str:
    longer = f"{SEPARATOR}{_branches(trie)}" if len(trie) > ("" in trie) else ""
    return f"(?:{longer}|)" if longer and "" in trie else longer


# The `semantic` detector: anchor sentences, and windows of words compared with them.

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
    """Build the detector of `[planning] model` and `threshold`; ConfigError when the model cannot be loaded."""
    table = context.config.table("planning", PlanningTable)
    where = context.config.place("planning.model")
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        from retrain.api import install_line  # only the message needs it

        fix = f'{install_line("retrain-sepa", "semantic")}, or use [planning] detector = "regex"'
        what = f"the semantic detector needs sentence-transformers: {error}"
        raise ConfigError(Problem(code="planning.not-installed", where=where, what=what, fix=fix)) from error
    try:
        model = SentenceTransformer(table.model, device="cpu")
    except Exception as error:  # the library raises many exception types for a name or folder it cannot load
        reason = " ".join(str(error).split())[:300]
        what, fix = f"no sentence model {table.model!r}", "give a local folder or a hub id that can be reached"
        raise ConfigError(Problem(code="planning.no-model", where=where, what=what, why=reason, fix=fix)) from error
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
        """Embed all windows of the step in one call."""
        decoded_G = [self.decoder.decode(tokens_T) for tokens_T in completions_G]
        windows_G = [word_windows(decoded.text) for decoded in decoded_G]
        plans = self._planning(
            {decoded.text[a:b] for decoded, windows in zip(decoded_G, windows_G, strict=True) for a, b in windows}
        )
        return [
            decoded.covering([(a, b) for a, b in windows if decoded.text[a:b] in plans])
            for decoded, windows in zip(decoded_G, windows_G, strict=True)
        ]

    def _planning(self, texts: set[str]) -> set[str]:
        if not texts:
            return set()
        distinct = sorted(texts)
        vectors = _embed(self.model, distinct)
        like_planning, like_execution = vectors @ self.planning_D, vectors @ self.execution_D
        is_planning = (like_planning > like_execution + self.margin) & (like_planning > FLOOR)
        return {text for text, plans in zip(distinct, is_planning, strict=True) if plans}


def word_windows(text: str) -> list[tuple[int, int]]:
    """Return character ranges of the windows of a text, without any for fewer than three words."""
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
