"""The grammar of the review world: its words, requests, sentences, writer and parser.

A request names a kind (short or detailed), a thing, an audience and one aspect of the thing. A
review is a few sentences, each ended by the token ".". Words are separated by single spaces.

The templates below are the only description of a sentence: the writer fills them and the parser
is compiled from them, so the two cannot disagree.
"""

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ASPECTS: dict[str, tuple[str, str, str, str]] = {
    "camera": ("lens", "battery", "screen", "grip"),
    "kettle": ("lid", "cord", "handle", "spout"),
    "guitar": ("strings", "pickups", "neck", "tone"),
    "hotel": ("rooms", "breakfast", "pool", "staff"),
    "film": ("plot", "cast", "music", "ending"),
    "phone": ("battery", "screen", "speaker", "charger"),
    "lamp": ("bulb", "shade", "switch", "cord"),
    "sofa": ("cushions", "legs", "fabric", "armrests"),
    "bicycle": ("brakes", "saddle", "gears", "frame"),
    "tent": ("poles", "zipper", "fabric", "floor"),
    "watch": ("strap", "dial", "buttons", "clasp"),
    "restaurant": ("menu", "dessert", "service", "music"),
    "novel": ("plot", "chapters", "ending", "cover"),
    "backpack": ("straps", "pockets", "zipper", "fabric"),
    "blender": ("blades", "lid", "motor", "jug"),
    "radio": ("speaker", "antenna", "buttons", "battery"),
    "jacket": ("sleeves", "hood", "pockets", "lining"),
    "museum": ("exhibits", "guides", "entrance", "staff"),
    "train": ("seats", "windows", "staff", "timetable"),
    "toaster": ("slots", "timer", "tray", "cord"),
    "car": ("engine", "seats", "brakes", "dashboard"),
    "game": ("levels", "graphics", "controls", "music"),
    "piano": ("keys", "pedals", "tone", "bench"),
    "course": ("lectures", "teacher", "exercises", "handouts"),
}
"""Thing -> its own four aspects. Some aspects belong to several things.

The first eight things, which small runs use, fill the prompt splits in about their nominal shares.
"""

PLURAL_ASPECTS = frozenset(
    _words(
        "brakes gears strings pickups poles rooms buttons chapters straps pockets cushions legs "
        "armrests blades sleeves exhibits guides seats windows slots levels graphics controls "
        "keys pedals lectures exercises handouts"
    )
)

THINGS = tuple(ASPECTS)
ALL_ASPECTS = tuple(dict.fromkeys(chain.from_iterable(ASPECTS.values())))
KINDS = ("short", "detailed")
AUDIENCES = ("students", "families", "couples", "seniors")

POSITIVE_ADJECTIVES = _words(
    "good nice neat solid sturdy clever pleasant lovely useful reliable smooth elegant "
    "comfortable bright practical friendly charming generous"
)
SUPERLATIVES = _words("amazing perfect fantastic incredible stunning brilliant")
NEGATIVE_ADJECTIVES = _words(
    "bad poor weak flimsy dull clumsy awkward noisy cheap ugly boring unpleasant useless tiresome"
)
PRAISE_VERBS = ("love", "enjoy", "pleases")
COMPLAINT_VERBS = ("dislike", "hate", "annoys")

# Other words that fill the slots of templates.
ADVERBS = ("really", "truly", "quite", "very", "rather")
LIKES = PRAISE_VERBS[:2]
DISLIKES = COMPLAINT_VERBS[:2]
SEASONS = ("spring", "summer", "autumn", "winter", "year")
DAYS = ("day", "week", "morning")
PEOPLE = ("family", "friends", "brother", "sister")
NUMBERS = ("two", "three")
SPANS = ("weeks", "months")


class Template(NamedTuple):
    """One form of sentence: how often it is written, and its wording in praise and in complaint.

    Slots: {aspect_is} is an aspect with the verb that agrees; {good} and {bad} are adjectives after
    an optional adverb, {plain_good} and {plain_bad} without; the others are single words.
    """

    share: float
    praise: str
    complaint: str


TEMPLATES: dict[str, Template] = {
    "aspect": Template(0.23, "the {aspect_is} {good}", "the {aspect_is} {bad}"),
    "pair": Template(
        0.06, "the {aspect_is} {good} and {plain_good}", "the {aspect_is} {bad} and {plain_bad}"
    ),
    "feeling": Template(0.08, "i {likes} the {aspect}", "i {dislikes} the {aspect}"),
    "reason": Template(
        0.14,
        "i {likes} it because the {aspect_is} {good}",
        "i {dislikes} it because the {aspect_is} {bad}",
    ),
    "thing": Template(0.155, "this {thing} is {good}", "this {thing} is {bad}"),
    "trial": Template(
        0.11, "i tried this {thing} last {season}", "i tried this {thing} last {season}"
    ),
    "habit": Template(0.04, "it pleases me every {day}", "it annoys me every {day}"),
    "advice": Template(
        0.05, "i would recommend it to my {person}", "i would not recommend it to my {person}"
    ),
    "lasting": Template(
        0.035, "after {number} {span} it is still {good}", "after {number} {span} it is still {bad}"
    ),
    "audience": Template(0.10, "it suits {audience}", "it does not suit {audience}"),
}
"""Name -> template. The shares sum to 1."""

WRONG_THING_RATE = 0.15
"""Share of reviews that are about another thing than the one asked for."""
ASKED_ASPECT_RATE = 0.3
"""Probability that an aspect slot takes the asked aspect outright."""
RANDOM_ASPECT_RATE = 0.2
"""Otherwise, probability that it takes any known aspect; else it takes one of the thing's own."""
ASKED_AUDIENCE_RATE = 0.7
"""Probability that an audience slot takes the asked audience outright; otherwise it takes any."""
ADVERB_RATE = 0.4
SUPERLATIVE_RATE = 0.15
"""Share of superlatives among adjectives of praise."""
MAX_SENTIMENT = 0.9
"""A writer's sentiment s is uniform in [-0.9, 0.9]; a sentence praises with chance (1 + s) / 2."""
NUM_SENTENCES = {"short": (1, 4), "detailed": (2, 6)}
"""Kind -> fewest and most sentences, uniform between."""
MAX_RESPONSE_TOKENS = 55
"""A writer stops before a sentence that would make the review longer (without <eos>)."""
PROMPT_TOKENS = 14


class Request(NamedTuple):
    """What a prompt asks for."""

    kind: str
    thing: str
    audience: str
    aspect: str


def build_prompt(request: Request) -> str:
    """The text of a request; always 14 tokens."""
    return (
        f"write a {request.kind} review of the {request.thing} for {request.audience}"
        f" and mention the {request.aspect} :"
    )


def all_prompts(things: Sequence[str] = THINGS) -> list[str]:
    """Every request about these things, 32 per thing, in the order of the grammar."""
    return [
        build_prompt(Request(kind, thing, audience, aspect))
        for thing in things
        for kind in KINDS
        for audience in AUDIENCES
        for aspect in ASPECTS[thing]
    ]


_PROMPT = re.compile(
    r"write a (?P<kind>\S+) review of the (?P<thing>\S+) for (?P<audience>\S+)"
    r" and mention the (?P<aspect>\S+) :"
)


@lru_cache(maxsize=4096)
def parse_prompt(prompt: str) -> Request:
    """Inverse of `build_prompt`.

    Raises: ValueError that states the broken rule.
    """
    match = _PROMPT.fullmatch(prompt)
    if match is None:
        raise ValueError(
            "it must read 'write a KIND review of the THING for AUDIENCE and mention the ASPECT :',"
            f" got {prompt!r}"
        )
    request = Request(**match.groupdict())
    known = {"kind": KINDS, "thing": THINGS, "audience": AUDIENCES}
    if request.thing in ASPECTS:
        known["aspect"] = ASPECTS[request.thing]
    for field, options in known.items():
        value = getattr(request, field)
        if value not in options:
            raise ValueError(f"{field} must be one of {', '.join(options)}, got {value!r}")
    return request


def _pick(rng: random.Random, options: Sequence[str]) -> str:
    """A uniform draw. Built on random() alone, whose stream Python keeps the same over versions."""
    return options[int(rng.random() * len(options))]


def _pick_template(rng: random.Random) -> Template:
    remaining = rng.random()
    for template in TEMPLATES.values():
        remaining -= template.share
        if remaining < 0:
            return template
    return template  # the shares sum to 1 up to rounding


def with_verb(aspect: str) -> str:
    """The aspect with the form of "to be" that agrees with it."""
    return f"{aspect} are" if aspect in PLURAL_ASPECTS else f"{aspect} is"


@lru_cache(maxsize=64)
def _aspects_of(things: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(ASPECTS[thing] for thing in things)))


class _Writer:
    """One person with a sentiment, writing about one thing (the asked one or not)."""

    def __init__(self, request: Request, rng: random.Random, things: tuple[str, ...]) -> None:
        self.request, self.rng, self.things = request, rng, things
        self.sentiment = MAX_SENTIMENT * (2 * rng.random() - 1)
        self.subject = request.thing
        if rng.random() < WRONG_THING_RATE:
            self.subject = _pick(rng, [thing for thing in things if thing != request.thing])
        self.slots: dict[str, Callable[[], str]] = {
            "aspect": self.aspect,
            "aspect_is": lambda: with_verb(self.aspect()),
            "thing": lambda: self.subject,
            "audience": self.audience,
            "good": lambda: self.adverb() + self.good(),
            "plain_good": self.good,
            "bad": lambda: self.adverb() + _pick(rng, NEGATIVE_ADJECTIVES),
            "plain_bad": lambda: _pick(rng, NEGATIVE_ADJECTIVES),
            "likes": lambda: _pick(rng, LIKES),
            "dislikes": lambda: _pick(rng, DISLIKES),
            "season": lambda: _pick(rng, SEASONS),
            "day": lambda: _pick(rng, DAYS),
            "person": lambda: _pick(rng, PEOPLE),
            "number": lambda: _pick(rng, NUMBERS),
            "span": lambda: _pick(rng, SPANS),
        }

    def aspect(self) -> str:
        if self.rng.random() < ASKED_ASPECT_RATE:
            return self.request.aspect
        if self.rng.random() < RANDOM_ASPECT_RATE:
            return _pick(self.rng, _aspects_of(self.things))
        return _pick(self.rng, ASPECTS[self.subject])

    def audience(self) -> str:
        if self.rng.random() < ASKED_AUDIENCE_RATE:
            return self.request.audience
        return _pick(self.rng, AUDIENCES)

    def adverb(self) -> str:
        return _pick(self.rng, ADVERBS) + " " if self.rng.random() < ADVERB_RATE else ""

    def good(self) -> str:
        gushes = self.rng.random() < SUPERLATIVE_RATE
        return _pick(self.rng, SUPERLATIVES if gushes else POSITIVE_ADJECTIVES)

    def sentence(self) -> str:
        template = _pick_template(self.rng)
        praises = self.rng.random() < (1 + self.sentiment) / 2
        words = (template.praise if praises else template.complaint).split()
        return " ".join(self.slots[w[1:-1]]() if w[0] == "{" else w for w in words)


def write_review(prompt: str, rng: random.Random, *, things: tuple[str, ...] = THINGS) -> str:
    """One person's answer to the prompt, imperfect on purpose: see the rates above.

    Args:
        things: what this person knows of; a wrong thing and random aspects are drawn from here.
            At least two, the asked one among them.
    Returns: sentences ended by " .", at most 55 tokens.
    """
    request = parse_prompt(prompt)
    if request.thing not in things or len(things) < 2:
        raise ValueError(f"things must hold {request.thing!r} and at least one more, got {things}")
    writer = _Writer(request, rng, things)
    fewest, most = NUM_SENTENCES[request.kind]
    words: list[str] = []
    for _ in range(fewest + int(rng.random() * (most - fewest + 1))):
        sentence = [*writer.sentence().split(), "."]
        if len(words) + len(sentence) > MAX_RESPONSE_TOKENS:
            break
        words += sentence
    return " ".join(words)


def _any_of(options: Sequence[str]) -> str:
    return f"(?:{'|'.join(map(re.escape, options))})"


def _sentence_pattern() -> re.Pattern[str]:
    """One alternative per template, named after it.

    Form only: "i love it because the lid is flimsy" praises and blames at once, and still parses.
    """
    adjective = _any_of(POSITIVE_ADJECTIVES + SUPERLATIVES + NEGATIVE_ADJECTIVES)
    described = f"(?:{_any_of(ADVERBS)} )?{adjective}"
    feeling = _any_of(LIKES + DISLIKES)
    slots = {
        "aspect": _any_of(ALL_ASPECTS),
        "aspect_is": _any_of([with_verb(aspect) for aspect in ALL_ASPECTS]),
        "thing": _any_of(THINGS),
        "audience": _any_of(AUDIENCES),
        "good": described,
        "bad": described,
        "plain_good": adjective,
        "plain_bad": adjective,
        "likes": feeling,
        "dislikes": feeling,
        "season": _any_of(SEASONS),
        "day": _any_of(DAYS),
        "person": _any_of(PEOPLE),
        "number": _any_of(NUMBERS),
        "span": _any_of(SPANS),
    }
    return re.compile(
        "|".join(
            f"(?P<{name}>{template.praise.format(**slots)}|{template.complaint.format(**slots)})"
            for name, template in TEMPLATES.items()
        )
    )


_SENTENCE = _sentence_pattern()


@lru_cache(maxsize=1 << 16)
def parse_sentence(sentence: str) -> str | None:
    """The name of the template that can write this sentence (given without its "."), or None."""
    match = _SENTENCE.fullmatch(sentence)
    return match.lastgroup if match else None


def split_sentences(words: Sequence[str]) -> tuple[list[str], str]:
    """The sentences that "." ends (without it), and the unended rest ("" if there is none)."""
    sentences: list[str] = []
    start = 0
    for end, word in enumerate(words):
        if word == ".":
            sentences.append(" ".join(words[start:end]))
            start = end + 1
    return sentences, " ".join(words[start:])


def _vocabulary() -> tuple[str, ...]:
    texts = chain(
        (PAD, EOS, UNK, "."),
        build_prompt(Request("", "", "", "")).split(),
        KINDS + AUDIENCES + THINGS + ALL_ASPECTS,
        (w for t in TEMPLATES.values() for w in f"{t.praise} {t.complaint}".split() if w[0] != "{"),
        ("is", "are"),
        POSITIVE_ADJECTIVES + SUPERLATIVES + NEGATIVE_ADJECTIVES + PRAISE_VERBS + COMPLAINT_VERBS,
        ADVERBS + SEASONS + DAYS + PEOPLE + NUMBERS + SPANS,
    )
    return tuple(dict.fromkeys(texts))


VOCABULARY = _vocabulary()
"""Every word, by id. <pad> is 0, <eos> is 1, <unk> is 2."""
