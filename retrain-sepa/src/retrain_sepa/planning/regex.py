"""The `regex` planning detector: curated phrases, found in the decoded text, marked on the tokens they cover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.api import ConfigError, Mask, PlanningDetector, PluginContext, Problem, Tokens
from retrain_sepa.planning.offsets import TokenDecoder, token_decoder
from retrain_sepa.planning.phrases import PhraseFinder, parse_grams
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
