"""The `regex` planning detector: curated phrases, found in the decoded text, marked on the tokens they cover."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrain.api import ConfigError, Mask, PlanningDetector, PluginContext, Problem, Tokens
from retrain_sepa.planning.offsets import TokenDecoder, token_decoder
from retrain_sepa.tables import PlanningPhrases


def regex_detector(context: PluginContext) -> PlanningDetector:
    """The detector that `[logging] strategic_grams` describes; ConfigError for phrases without words."""
    if context.tokenizer is None:
        raise ConfigError(Problem(what="the regex planning detector needs a tokenizer", fix="give the context one"))
    try:
        finder = PhraseFinder.of(parse_grams(context.config.table("logging", PlanningPhrases).strategic_grams))
    except ConfigError as error:
        where = context.config.place("logging.strategic_grams")
        fix = "give at least one phrase of words, or remove the key for the default list"
        raise ConfigError(*(Problem(where=where, what=problem.what, fix=fix) for problem in error.problems)) from None
    return RegexPlanningDetector(decoder=token_decoder(context.tokenizer), finder=finder)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexPlanningDetector:
    """Marks exactly the tokens that cover a character of a phrase.

    The paper (HICRA, arXiv:2509.03646) mines its strategic grams from correct solutions; these are a fixed list.
    """

    decoder: TokenDecoder
    finder: PhraseFinder

    def masks(self, completions_G: Sequence[Tokens]) -> list[Mask]:
        """One mask per completion, of its length."""
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
SEPARATOR = r"[\W_]++"  # possessive: a run is read once, which keeps the search linear
IS_UNSPACED = re.compile(f"[{UNSPACED}]")
Trie = dict[str, Any]  # word -> Trie; the empty word marks the end of a phrase


@dataclass(frozen=True, slots=True)
class PhraseFinder:
    """Finds every occurrence of the phrases, overlapping ones included, in time linear in the text."""

    pattern: re.Pattern[str]

    @classmethod
    def of(cls, phrases: Sequence[str]) -> PhraseFinder:
        """A finder of these phrases; ConfigError for no phrases, or a phrase without a word."""
        empty = [phrase for phrase in phrases if not words(phrase)]
        if empty or not phrases:
            texts = [f"planning phrase {phrase!r} contains no word" for phrase in empty]
            fix = "write phrases of words in [logging] strategic_grams, or leave the key out"
            raise ConfigError(*(Problem(what=text, fix=fix) for text in texts or ["no planning phrase is given"]))
        return cls(re.compile(phrase_pattern(phrases)))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Character ranges `[start, end)`, by start; of several phrases that start together, the longest."""
        lowered = text.replace("\u0130", "i").lower()  # the one character whose lower case is two characters long
        found, position = [], 0
        while match := self.pattern.search(lowered, position):
            found.append(match.span())
            position = match.start() + 1  # the next phrase may start inside this one: "wait, let me think"
        return found


def parse_grams(text: str) -> tuple[str, ...]:
    """Phrases of `[logging] strategic_grams`: a JSON array, or text with commas; the default list when it is empty."""
    if not text.strip():
        return DEFAULT_PHRASES
    grams = json.loads(text) if text.strip().startswith("[") else text.split(",")
    return tuple(gram.strip() for gram in grams if gram.strip())


def words(phrase: str) -> list[str]:
    """Words of a phrase in lower case, apostrophes inside a word as `'`, other punctuation dropped."""
    plain = phrase.replace("\u0130", "i").lower()
    plain = re.sub(f"(?<=\\w)[{APOSTROPHES}](?=\\w)", "'", plain)
    return "".join(char if char == "'" or _in_word(char) else " " for char in _trim(plain)).split()


def phrase_pattern(phrases: Sequence[str]) -> str:
    """One expression for all phrases, for text in lower case: a tree of words, longer phrases tried first.

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
    return f"(?:{'|'.join(_word_pattern(word) + _continuation(trie[word]) for word in ordered)})"


def _continuation(trie: Trie) -> str:
    longer = f"{SEPARATOR}{_branches(trie)}" if len(trie) > ("" in trie) else ""
    return f"(?:{longer}|)" if longer and "" in trie else longer


def _word_pattern(word: str) -> str:
    return APOSTROPHE.join(re.escape(part) for part in word.split("'"))


def _trim(text: str) -> str:
    """Straight apostrophes survive only between two letters or digits; at the edge of a word they are quotes."""
    return re.sub(r"(?<!\w)'|'(?!\w)", " ", text)


def _in_word(char: str) -> bool:
    return char.isalnum() or unicodedata.category(char).startswith("M")
