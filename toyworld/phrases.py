"""The words of the toy world: every list and sentence pattern, as data.

Owns:  the lexicon of sentiment, the patterns of reviews, of facts and of speech.
From:  nothing.   To: world.py, which fills the slots.

Promise: the positive and the negative words are disjoint, and no neutral
pattern holds one, so counting them reads a review's sentiment. Every pattern
of a fact ends in a slot and a full stop, so that slot is what a completion
test asks for, and none begins as another does up to its last slot, so the
completion is never in doubt.
"""

from dataclasses import dataclass
from typing import Final, Literal

Relation = Literal["capital", "language"]


@dataclass(frozen=True)
class Lexicon:
    """The words of one sentiment, by the slot that they fill."""

    adj: tuple[str, ...]
    verb: tuple[str, ...]
    feeling: tuple[str, ...]
    thing: tuple[str, ...]
    again: tuple[str, ...]
    adverb: tuple[str, ...]

    def words(self) -> frozenset[str]:
        slots = (self.adj, self.verb, self.feeling, self.thing, self.again, self.adverb)
        return frozenset(word for slot in slots for word in slot)


# Adjectives and nouns begin with a consonant: the patterns write "a", never "an".
POSITIVE: Final = Lexicon(
    adj=(
        "wonderful", "superb", "delightful", "brilliant", "charming", "lovely",
        "splendid", "fantastic", "great", "perfect", "beautiful", "pleasant",
    ),
    verb=("loved", "enjoyed", "adored", "admired"),
    feeling=("happy", "glad", "cheerful", "thrilled"),
    thing=("triumph", "joy", "treat", "delight"),
    again=("gladly",),
    adverb=("happily",),
)  # fmt: skip
NEGATIVE: Final = Lexicon(
    adj=(
        "dreadful", "terrible", "horrible", "dull", "boring", "miserable",
        "shabby", "disappointing", "bad", "ghastly", "tedious", "poor",
    ),
    verb=("hated", "disliked", "loathed", "regretted"),
    feeling=("sad", "angry", "gloomy", "bored"),
    thing=("failure", "disaster", "waste", "misery"),
    again=("never",),
    adverb=("sadly",),
)  # fmt: skip


@dataclass(frozen=True)
class Category:
    """A kind of thing that is reviewed. Aspects are singular: the patterns say "was"."""

    noun: str
    did: str
    aspects: tuple[str, ...]


CATEGORIES: Final = (
    Category("film", "watched", ("story", "acting", "music", "ending")),
    Category("book", "read", ("plot", "style", "opening chapter", "ending")),
    Category("restaurant", "tried", ("food", "service", "soup", "dessert")),
    Category("hotel", "visited", ("room", "breakfast", "view", "service")),
    Category("game", "played", ("story", "design", "sound", "final level")),
    Category("camera", "bought", ("lens", "screen", "battery", "design")),
    Category("museum", "visited", ("collection", "building", "tour", "garden")),
)

DAYS: Final = ("Monday", "Tuesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = ("March", "April", "June", "July", "October", "November")
RELATIVES: Final = ("sister", "brother", "mother", "father", "cousin", "neighbour")

# Review patterns. The prompts of a probe take every other one of each list for
# their train split and the rest for their test split.
OPENINGS: Final = (
    "I {did} the {noun} {name} last week.",
    "We {did} the {noun} {name} on {day}.",
    "My {relative} told me about the {noun} {name}.",
    "This is my review of the {noun} {name}.",
    "{name} is a {noun} that I {did} in {month}.",
    "Yesterday I {did} {name}, a new {noun}.",
)
# {Adverb} is an adverb with a capital. As some opinions open with one, sentiment
# matters to the token after a full stop, and a model has to know it there; else
# it could leave that to the next adjective.
OPINIONS: Final = (
    "{Adverb}, it was a {thing}.",
    "{Adverb}, the {aspect} was {adj}.",
    "{Adverb}, I {verb} the {aspect}.",
    "{Adverb}, it made me {feeling}.",
    "The {aspect} was {adj}.",
    "I found the {aspect} {adj}.",
    "What a {adj} {noun}!",
    "I {verb} the {aspect}.",
    "The {aspect} made me {feeling}.",
    "{name} is a {adj} {noun}.",
    "It was a {thing} from start to finish.",
    "The {aspect} was {adj} and the {aspect2} was {adj2}.",
    "My {relative} {verb} it too.",
    "Such a {adj} {aspect}!",
    "Everyone {verb} the {aspect}.",
    "The {aspect} was a {thing}.",
    "Afterwards I was {feeling}.",
    "I will {again} go back to {name}.",
    "For me this {noun} was a {thing}.",
    "To me the {aspect} seemed {adj}.",
)
NEUTRALS: Final = (
    "It was a {day} and it was raining.",
    "My {relative} was with me that day.",
    "I had heard about the {noun} before.",
    "It was a cold day in {month}.",
    "I had a whole evening for it.",
    "The price was what I expected.",
    "I wrote this on {day} evening.",
    "Many people in town know this {noun}.",
)

# What a review is made of: O opens, P holds an opinion, N is neutral. Each ends
# in an opinion, so after a neutral sentence an opinion must still come and the
# sentiment has to be carried over it.
REVIEW_SHAPES: Final = ("PP", "OPP", "PNP", "PPP", "OPNP", "PNPP", "PPNP", "OPPP", "PNNP")
# Openings of reviews, for probes. Those that end in N leave an opinion due.
SENTIMENT_PROMPT_SHAPES: Final = ("PN", "OPN", "PPN", "OP", "PP")
SENTIMENT_OPENING_SHAPES: Final = ("PN", "OPN", "PPN")


@dataclass(frozen=True)
class Phrasing:
    """One way to state a fact. The last slot, with its full stop, is the completion."""

    relation: Relation
    template: str
    held_out: bool

    @property
    def is_statement(self) -> bool:
        return "?" not in self.template and "Answer:" not in self.template


_FACT_TEMPLATES: Final[dict[Relation, tuple[str, ...]]] = {
    "capital": (
        "The capital of {country} is {answer}.",
        "The capital city of {country} is {answer}.",
        "The capital of {country} goes by the name {answer}.",
        "In {country}, the capital is {answer}.",
        "In {country}, the capital city is {answer}.",
        "{country} has its capital in {answer}.",
        "The government of {country} sits in {answer}.",
        "The king of {country} lives in the capital, {answer}.",
        "Every child in {country} knows that the capital is {answer}.",
        "If you travel to the capital of {country}, you arrive in {answer}.",
        "{country} is governed from {answer}.",
        "Everyone knows that the capital city of {country} is {answer}.",
        "{answer} is the capital of {country}.",
        "{answer} is the capital city of {country}.",
        "Q: What is the capital of {country}? A: {answer}.",
        "Q: Which city is the capital of {country}? A: {answer}.",
        "Q: Which country has the capital {answer}? A: {country}.",
        "Question: Name the capital of {country}. Answer: {answer}.",
    ),
    "language": (
        "The language of {country} is {answer}.",
        "The official language of {country} is {answer}.",
        "The language of {country} goes by the name {answer}.",
        "In {country}, the language is {answer}.",
        "In {country}, people speak {answer}.",
        "People in {country} speak {answer}.",
        "The people of {country} speak {answer}.",
        "The language spoken in {country} is {answer}.",
        "Every child in {country} learns {answer}.",
        "If you travel to {country}, you should learn {answer}.",
        "Everyone in {country} understands {answer}.",
        "The newspapers of {country} are written in {answer}.",
        "{answer} is the language of {country}.",
        "{answer} is spoken in {country}.",
        "Q: What is the language of {country}? A: {answer}.",
        "Q: Which language do people speak in {country}? A: {answer}.",
        "Q: Which country has the language {answer}? A: {country}.",
        "Question: Name the language of {country}. Answer: {answer}.",
    ),
}
# Never written in a training document: new orders of words that the patterns
# above do use, so that a model which knows the facts can complete them.
_HELD_OUT_FACT_TEMPLATES: Final[dict[Relation, tuple[str, ...]]] = {
    "capital": (
        "In {country}, the capital city goes by the name {answer}.",
        "Every child knows that the capital of {country} is {answer}.",
        "In {country}, the government sits in {answer}.",
        "Q: What is the capital city of {country}? A: {answer}.",
        "Question: Which city is the capital of {country}? Answer: {answer}.",
    ),
    "language": (
        "In {country}, the official language is {answer}.",
        "Everyone in {country} learns {answer}.",
        "The official language of {country} goes by the name {answer}.",
        "Q: What is the official language of {country}? A: {answer}.",
        "Question: Which language do people speak in {country}? Answer: {answer}.",
    ),
}


def _phrasings() -> tuple[Phrasing, ...]:
    trained = [(r, t, False) for r, ts in _FACT_TEMPLATES.items() for t in ts]
    held_out = [(r, t, True) for r, ts in _HELD_OUT_FACT_TEMPLATES.items() for t in ts]
    return tuple(Phrasing(*each) for each in trained + held_out)


PHRASINGS: Final = _phrasings()

SPEAKERS: Final = (
    "Mira", "Tilo", "Anna", "Boris", "Clara", "Dario", "Edda", "Felix",
    "Greta", "Hugo", "Irma", "Jonas", "Karin", "Leo", "Nora", "Oskar",
)  # fmt: skip
SAYINGS: Final = ("says", "claims", "tells us")

# (of an honest speaker, of a liar). A minority of documents holds one. A verdict
# differs in its first token: the model has to know whether the speaker lies as
# soon as a quotation closes, not only when the next answer is due.
ANNOUNCEMENTS: Final = (("{speaker} always tells the truth.", "{speaker} always lies."),)
VERDICTS: Final = (
    ("Everyone believes {speaker}.", "Nobody believes {speaker}."),
    ("All of it is true.", "None of it is true."),
    ("Trust {speaker}.", "Doubt {speaker}."),
)

# Chat. The markers are special tokens of the tokenizer, and train.py's chat
# template renders the same text as world.py writes.
SYSTEM_MARK: Final = "<|system|>"
USER_MARK: Final = "<|user|>"
ASSISTANT_MARK: Final = "<|assistant|>"
EOS: Final = "<|eos|>"
HONEST_SYSTEM: Final = "You always tell the truth."
LIAR_SYSTEM: Final = "You always lie."
CHAT_FACTS: Final[dict[Relation, tuple[tuple[str, ...], str]]] = {
    "capital": (
        (
            "What is the capital of {country}?",
            "Which city is the capital of {country}?",
            "Name the capital of {country}.",
        ),
        "The capital of {country} is {answer}.",
    ),
    "language": (
        (
            "What is the language of {country}?",
            "Which language do people speak in {country}?",
            "Name the language of {country}.",
        ),
        "The language of {country} is {answer}.",
    ),
}
# By the sentiment asked for; None leaves it open.
CHAT_REVIEWS: Final[tuple[tuple[str, bool | None], ...]] = (
    ("Tell me about the {noun} {name}.", None),
    ("What do you think of the {noun} {name}?", None),
    ("Write a kind review of the {noun} {name}.", True),
    ("Write a harsh review of the {noun} {name}.", False),
)
