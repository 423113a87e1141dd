"""What people want of a review, in ten plain parts that add up.

This is the gold reward: it labels preferences and evaluates policies. Nothing that trains
imports it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from rlhf.worlds.reviews import grammar
from rlhf.worlds.reviews.grammar import Request

PARTS: dict[str, str] = {
    "sentiment": "praises in varied words and complains little",
    "topic": "names the asked thing and no other",
    "detail": "names aspects of the asked thing, none of other things, and gives a reason",
    "grammar": "every sentence is one the grammar can write",
    "repetition": "repeats neither words nor sentences",
    "length": "keeps within 20 tokens (short) or 40 (detailed)",
    "gush": "uses at most two superlatives",
    "truncation": "comes to an end",
    "asked": "names the asked aspect",
    "audience": "names the asked audience and no other",
}
"""Part -> what a high value means. The columns of `score`, before `total`."""

_THINGS = frozenset(grammar.THINGS)
_ASPECTS = frozenset(grammar.ALL_ASPECTS)
_AUDIENCES = frozenset(grammar.AUDIENCES)
_OWN = {thing: frozenset(aspects) for thing, aspects in grammar.ASPECTS.items()}
_SUPERLATIVES = frozenset(grammar.SUPERLATIVES)
_POSITIVE = frozenset(grammar.POSITIVE_ADJECTIVES + grammar.PRAISE_VERBS) | _SUPERLATIVES
_NEGATIVE = frozenset((*grammar.NEGATIVE_ADJECTIVES, *grammar.COMPLAINT_VERBS, "not"))
_CONTENT = (
    _THINGS
    | _ASPECTS
    | _AUDIENCES
    | _SUPERLATIVES
    | frozenset(grammar.POSITIVE_ADJECTIVES + grammar.NEGATIVE_ADJECTIVES)
)
_MAX_TOKENS = {"short": 20, "detailed": 40}
_MAX_OWN = {"short": 2, "detailed": 4}


class _Review(NamedTuple):
    counts: Counter[str]  # word -> occurrences
    num_tokens: int  # words and ".", without <eos>
    sentences: list[str]  # without "."; an unended rest is the last one
    num_unparsed: int
    ended: bool


def _read(response: str, ended: bool) -> _Review:
    words = response.split()
    sentences, rest = grammar.split_sentences(words)
    num_unparsed = sum(grammar.parse_sentence(sentence) is None for sentence in sentences)
    if rest or not sentences:
        sentences, num_unparsed = [*sentences, rest], num_unparsed + 1
    return _Review(Counter(words), len(words), sentences, num_unparsed, ended)


def _sentiment(request: Request, review: _Review) -> float:
    """1.5 (1 - 0.6^p) - 0.35 min(n, 4).

    p: distinct positive words (adjectives, superlatives; love, enjoy, pleases).
    n: negative words, each occurrence (adjectives; dislike, hate, annoys; not).
    """
    num_positive = len(_POSITIVE & review.counts.keys())
    num_negative = sum(review.counts[word] for word in _NEGATIVE & review.counts.keys())
    return 1.5 * (1 - 0.6**num_positive) - 0.35 * min(num_negative, 4)


def _topic(request: Request, review: _Review) -> float:
    """0.5 if the asked thing is named, else -0.3; -0.4 per other thing named, at most two."""
    named = _THINGS & review.counts.keys()
    others = len(named - {request.thing})
    return (0.5 if request.thing in named else -0.3) - 0.4 * min(others, 2)


def _detail(request: Request, review: _Review) -> float:
    """0.35 min(own, 2 if short else 4) - 0.25 min(foreign, 3) + 0.3 [names "because"].

    own, foreign: distinct aspects named that belong, or do not, to the asked thing.
    """
    named = _ASPECTS & review.counts.keys()
    num_own = len(named & _OWN[request.thing])
    return (
        0.35 * min(num_own, _MAX_OWN[request.kind])
        - 0.25 * min(len(named) - num_own, 3)
        + 0.3 * ("because" in review.counts)
    )


def _grammar(request: Request, review: _Review) -> float:
    """-1.2 times the fraction of sentences that do not parse.

    Words after the last "." are a sentence that does not parse, and so is an empty response.
    """
    return -1.2 * review.num_unparsed / len(review.sentences)


def _repetition(request: Request, review: _Review) -> float:
    """-0.25 min(w, 8) - 0.4 min(s, 5).

    w: occurrences of content words (things, aspects, audiences, adjectives) after each one's first.
    s: the same for whole sentences.
    """
    repeated_words = sum(review.counts[word] - 1 for word in _CONTENT & review.counts.keys())
    repeated_sentences = len(review.sentences) - len(set(review.sentences))
    return -0.25 * min(repeated_words, 8) - 0.4 * min(repeated_sentences, 5)


def _length(request: Request, review: _Review) -> float:
    """-0.06 per token over 20 (short) or 40 (detailed); <eos> is not counted."""
    return -0.06 * max(review.num_tokens - _MAX_TOKENS[request.kind], 0)


def _gush(request: Request, review: _Review) -> float:
    """-0.35 per superlative, each occurrence, over two."""
    return -0.35 * max(sum(review.counts[word] for word in _SUPERLATIVES) - 2, 0)


def _truncation(request: Request, review: _Review) -> float:
    """-0.8 if the response was cut off before <eos>."""
    return 0.0 if review.ended else -0.8


def _asked(request: Request, review: _Review) -> float:
    """0.6 if the asked aspect is named, else -0.3."""
    return 0.6 if request.aspect in review.counts else -0.3


def _audience(request: Request, review: _Review) -> float:
    """0.4 if the asked audience is named; -0.3 per other audience named, at most two."""
    named = _AUDIENCES & review.counts.keys()
    others = len(named - {request.audience})
    return 0.4 * (request.audience in named) - 0.3 * min(others, 2)


_FORMULAS: dict[str, Callable[[Request, _Review], float]] = {
    "sentiment": _sentiment,
    "topic": _topic,
    "detail": _detail,
    "grammar": _grammar,
    "repetition": _repetition,
    "length": _length,
    "gush": _gush,
    "truncation": _truncation,
    "asked": _asked,
    "audience": _audience,
}


def score(prompts: Sequence[str], responses: Sequence[str], ended: Sequence[bool]) -> pd.DataFrame:
    """Gold reward of each response, part by part.

    Args:
        prompts: requests in the form of `grammar.build_prompt`.
        responses: any text, without <eos>.
        ended: whether the response came to <eos>; False where it was cut off.
    Returns: one row per response, float64; a column per part (see `PARTS`; the formula of part x is
        the docstring of `_x`) and `total`, their sum.
    Raises: ValueError if the lengths differ, or a prompt is of another form (names row and rule).
    """
    if not len(prompts) == len(responses) == len(ended):
        raise ValueError(
            "prompts, responses and ended must be equally long,"
            f" got {len(prompts)}, {len(responses)} and {len(ended)}"
        )
    rows = []
    for row, (prompt, response, is_ended) in enumerate(zip(prompts, responses, ended, strict=True)):
        try:
            request = grammar.parse_prompt(prompt)
        except ValueError as error:
            raise ValueError(f"prompts[{row}]: {error}") from None
        review = _read(response, bool(is_ended))
        rows.append([formula(request, review) for formula in _FORMULAS.values()])
    table = pd.DataFrame(rows, columns=list(_FORMULAS), dtype="float64") + 0.0  # no -0.0
    table["total"] = table.sum(axis="columns")
    return table
