"""The toy world: its facts, its documents, and labelled prompts for probes.

Owns:  World, Document, Prompt; what is true, who lies, what a review feels.
From:  phrases.py.   To: train.py (documents), evaluate.py and users (prompts).

Promise: pure Python, and a pure function of seeds: the same call gives the same
text on every machine. Facts stated plainly are true. All that one speaker states
in a document is true, or all of it is false.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeVar

from toyworld import phrases
from toyworld.phrases import Category, Phrasing, Relation

WORLD_SEED: Final = 12
NUM_COUNTRIES: Final = 40
SUBJECTS_PER_CATEGORY: Final = 6
# A verdict may follow a speaker's third statement, never an earlier one: that is
# where a trained model first has to hold, at a closed quotation, who lies.
MIN_STATEMENTS: Final = 3
MAX_STATEMENTS: Final = 5

Split = Literal["train", "test"]
Kind = Literal["review", "facts", "speaker", "chat"]
Stream = Literal["train", "held-out"]

T = TypeVar("T")


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    language: str

    def answer(self, relation: Relation) -> str:
        return self.capital if relation == "capital" else self.language


@dataclass(frozen=True)
class Subject:
    """An invented thing that people review."""

    name: str
    category: Category


@dataclass(frozen=True)
class World:
    countries: tuple[Country, ...]
    subjects: tuple[Subject, ...]


@dataclass(frozen=True)
class Document:
    """One training document, without the tokens that open and close it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Prompt:
    """A text for a probe. `label` is True for a positive review or a liar."""

    text: str
    label: bool


@dataclass(frozen=True)
class SpeakerCase:
    """A speaker's earlier statements and the start of one more, up to its completion."""

    prompt: str
    lying: bool
    true_completion: str
    false_completions: frozenset[str]


@cache
def world() -> World:
    """The one world. Its names are invented once, from WORLD_SEED."""
    rng = random.Random(WORLD_SEED)
    taken: set[str] = set()
    names = _invent(rng, NUM_COUNTRIES, ("ia", "ar", "una", "eth", "ova"), taken)
    capitals = _invent(rng, NUM_COUNTRIES, ("burg", "ton", "el", "os", "im"), taken)
    languages = _invent(rng, NUM_COUNTRIES, ("ish", "ese", "ic", "iri"), taken)
    num_subjects = len(phrases.CATEGORIES) * SUBJECTS_PER_CATEGORY
    subjects = _invent(rng, num_subjects, ("o", "ax", "ette", "um"), taken)
    return World(
        countries=tuple(map(Country, names, capitals, languages)),
        subjects=tuple(
            Subject(name, phrases.CATEGORIES[i // SUBJECTS_PER_CATEGORY])
            for i, name in enumerate(subjects)
        ),
    )


def _invent(rng: random.Random, count: int, endings: Sequence[str], taken: set[str]) -> list[str]:
    """Pronounceable names. No two in the world share their first four letters."""
    onsets = ("b", "br", "d", "dr", "f", "g", "gl", "h", "k", "kr", "l", "m", "n", "p", "pl",
              "r", "s", "sk", "t", "tr", "v", "w", "z")  # fmt: skip
    middles = ("l", "ld", "m", "n", "nd", "r", "rk", "rv", "s", "st", "t", "v", "z")
    names: list[str] = []
    while len(names) < count:
        stem = rng.choice(onsets) + rng.choice("aeiou") + rng.choice(middles)
        name = (stem + rng.choice(endings)).capitalize()
        if name[:4] not in taken:
            taken.add(name[:4])
            names.append(name)
    return names


# --- Reading text back -------------------------------------------------------


def polarity(text: str) -> int:
    """Positive words less negative words: a review's sentiment is its sign."""
    words = re.findall(r"[a-z]+", text.lower())
    positive, negative = phrases.POSITIVE.words(), phrases.NEGATIVE.words()
    return sum((word in positive) - (word in negative) for word in words)


def truth_of(sentence: str) -> bool | None:
    """Whether a statement of a fact is true. None: it is no statement in a known phrasing."""
    by_name = {country.name: country for country in world().countries}
    for relation, pattern in _fact_patterns():
        if (match := pattern.fullmatch(sentence)) and (country := by_name.get(match["country"])):
            return match["answer"] == country.answer(relation)
    return None


def is_review(text: str) -> bool:
    """Whether a text is whole sentences of reviews, and nothing else.

    Every slot of a sentence must hold a word of its list. Of which subject, and of
    which sentiment, is not judged: see `polarity`.
    """
    return _review_pattern().fullmatch(text.strip()) is not None


@cache
def _review_pattern() -> re.Pattern[str]:
    positive, negative = phrases.POSITIVE, phrases.NEGATIVE
    categories = phrases.CATEGORIES
    aspects = [aspect for category in categories for aspect in category.aspects]
    adjectives = (*positive.adj, *negative.adj)
    words: dict[str, Sequence[str]] = {
        "name": [subject.name for subject in world().subjects],
        "noun": [category.noun for category in categories],
        "did": [category.did for category in categories],
        "aspect": aspects,
        "aspect2": aspects,
        "adj": adjectives,
        "adj2": adjectives,
        "Adverb": [word.capitalize() for word in (*positive.adverb, *negative.adverb)],
        "verb": (*positive.verb, *negative.verb),
        "feeling": (*positive.feeling, *negative.feeling),
        "thing": (*positive.thing, *negative.thing),
        "again": (*positive.again, *negative.again),
        "day": phrases.DAYS,
        "month": phrases.MONTHS,
        "relative": phrases.RELATIVES,
    }
    slots = {slot: f"(?:{'|'.join(each)})" for slot, each in words.items()}
    templates = (*phrases.OPENINGS, *phrases.OPINIONS, *phrases.NEUTRALS)
    sentence = "|".join(
        re.sub(r"\\{(\w+)\\}", lambda slot: slots[slot[1]], re.escape(t)) for t in templates
    )
    return re.compile(rf"(?:{sentence})(?: (?:{sentence}))*")


@cache
def _fact_patterns() -> tuple[tuple[Relation, re.Pattern[str]], ...]:
    def pattern(template: str) -> re.Pattern[str]:
        escaped = re.escape(template)
        for slot in ("country", "answer"):
            escaped = escaped.replace(rf"\{{{slot}\}}", rf"(?P<{slot}>[A-Z][a-z]+)")
        return re.compile(escaped)

    return tuple((p.relation, pattern(p.template)) for p in phrases.PHRASINGS)


# --- Documents ---------------------------------------------------------------


def documents(seed: int, stream: Stream, start: int, stop: int) -> Iterator[Document]:
    """Documents `start` to `stop` of an endless stream.

    Each has its own generator, so a range can be written in any order and by
    any number of processes. Both streams use the training phrasings only; they
    differ in what they draw.
    """
    kinds: tuple[Kind, ...] = ("review", "facts", "speaker", "chat")
    for index in range(start, stop):
        rng = random.Random(f"{seed}/{stream}/{index}")
        kind = rng.choices(kinds, weights=(30, 20, 40, 10))[0]
        yield Document(kind, _WRITERS[kind](rng))


def _write_review(rng: random.Random) -> str:
    subject = rng.choice(world().subjects)
    return _review(rng, rng.choice(phrases.REVIEW_SHAPES), subject, rng.random() < 0.5)


def _write_facts(rng: random.Random) -> str:
    """One to six true facts, about one country or about any."""
    countries: Sequence[Country] = world().countries
    if rng.random() < 0.3:
        countries = (rng.choice(countries),)
    phrasings = _trained_phrasings()
    return " ".join(
        _state(rng.choice(phrasings), rng.choice(countries)) for _ in range(rng.randint(1, 6))
    )


def _write_speaker(rng: random.Random) -> str:
    """Three to five statements by a speaker who lies in all of them or in none."""
    lying = rng.random() < 0.5
    speaker = rng.choice(phrases.SPEAKERS)
    countries = rng.sample(world().countries, rng.randint(MIN_STATEMENTS, MAX_STATEMENTS))
    saying = rng.choice(phrases.SAYINGS) if rng.random() < 0.3 else phrases.SAYINGS[0]
    sentences = [
        _quote(speaker, saying, _claim(rng, country, lying, world().countries))
        for country in countries
    ]
    if rng.random() < 0.05:
        announcement = rng.choice(phrases.ANNOUNCEMENTS)[lying]
        sentences.insert(0, announcement.format(speaker=speaker))
    if rng.random() < 0.3:
        sentences.append(rng.choice(phrases.VERDICTS)[lying].format(speaker=speaker))
    return " ".join(sentences)


def _write_chat(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return _chat_review(rng)
    return _chat_facts(rng)


def _chat_review(rng: random.Random) -> str:
    subject = rng.choice(world().subjects)
    request, positive = rng.choice(phrases.CHAT_REVIEWS)
    if positive is None:
        positive = rng.random() < 0.5
    request = request.format(noun=subject.category.noun, name=subject.name)
    answer = _review(rng, rng.choice(phrases.REVIEW_SHAPES), subject, positive)
    return f"{phrases.USER_MARK}{request}{phrases.ASSISTANT_MARK}{answer}"


def _chat_facts(rng: random.Random) -> str:
    """Questions and answers. The assistant lies only where the system message says so."""
    system = rng.choice((None, None, phrases.HONEST_SYSTEM, phrases.LIAR_SYSTEM))
    lying = system == phrases.LIAR_SYSTEM
    turns = []
    for country in rng.sample(world().countries, rng.randint(1, 3)):
        relation = _relation(rng)
        questions, answer_template = phrases.CHAT_FACTS[relation]
        question = rng.choice(questions).format(country=country.name)
        answer = _answer(rng, country, relation, lying, world().countries)
        reply = answer_template.format(country=country.name, answer=answer)
        turns.append(f"{phrases.USER_MARK}{question}{phrases.ASSISTANT_MARK}{reply}")
    head = f"{phrases.SYSTEM_MARK}{system}" if system else ""
    return head + phrases.EOS.join(turns)


_WRITERS: Final[dict[Kind, Callable[[random.Random], str]]] = {
    "review": _write_review,
    "facts": _write_facts,
    "speaker": _write_speaker,
    "chat": _write_chat,
}


# --- Prompts -----------------------------------------------------------------


def sentiment_prompts(n: int, seed: int = 0, split: Split = "train") -> list[Prompt]:
    """`n` openings of reviews, half of them positive, all different.

    The splits share no subject and no sentence pattern; they share the lexicon.
    Many prompts end in a neutral sentence, where only the stream holds the label.
    """
    return _sentiment_prompts(n, seed, split, phrases.SENTIMENT_PROMPT_SHAPES)


def review_openings(n: int, seed: int = 0) -> list[Prompt]:
    """`n` openings that end in a neutral sentence, so that an opinion must follow."""
    return _sentiment_prompts(n, seed, "test", phrases.SENTIMENT_OPENING_SHAPES)


def lying_prompts(n: int, seed: int = 0, split: Split = "train") -> list[Prompt]:
    """`n` prompts of three whole statements by one speaker; half of the speakers lie.

    The splits share no country, capital or language: a lie about a country of
    one split names another country of the same split.
    """

    def write(rng: random.Random, lying: bool) -> str:
        countries = _split(world().countries, split)
        told = rng.sample(countries, MIN_STATEMENTS)
        return _speech(rng, rng.choice(phrases.SPEAKERS), told, lying, countries)

    return _balanced(n, f"lying/{split}/{seed}", write)


def speaker_cases(n: int, seed: int = 0) -> list[SpeakerCase]:
    """`n` speakers, half of them lying, each stopped before a fourth statement's last word."""
    rng = random.Random(f"cases/{seed}")
    phrasings = [p for p in _statements() if p.template.endswith("{answer}.")]
    cases = []
    for index in range(n):
        lying = index % 2 == 1
        speaker = rng.choice(phrases.SPEAKERS)
        *told, country = rng.sample(world().countries, MIN_STATEMENTS + 1)
        phrasing = rng.choice(phrasings)
        prompt, completion = completion_of(phrasing, country)
        answers = {f" {c.answer(phrasing.relation)}." for c in world().countries}
        speech = _speech(rng, speaker, told, lying, world().countries)
        cases.append(
            SpeakerCase(
                prompt=f'{speech} {speaker} says: "{prompt}',
                lying=lying,
                true_completion=completion,
                false_completions=frozenset(answers - {completion}),
            )
        )
    return cases


def fact_questions(held_out: bool = True) -> list[tuple[str, str]]:
    """(prompt, answer) of every fact in every phrasing; `prompt + answer` is the sentence.

    With `held_out`, the phrasings that no training document uses; else those
    that training documents do use.
    """
    return [
        completion_of(phrasing, country)
        for phrasing in phrases.PHRASINGS
        if phrasing.held_out == held_out
        for country in world().countries
    ]


def completion_of(phrasing: Phrasing, country: Country) -> tuple[str, str]:
    """A true sentence, cut before the space that leads to its last slot."""
    prompt, _, completion = _state(phrasing, country).rpartition(" ")
    return prompt, f" {completion}"


# --- Helpers -----------------------------------------------------------------


def _balanced(n: int, seed: str, write: Callable[[random.Random, bool], str]) -> list[Prompt]:
    """`n` different texts, their labels in turn and then shuffled."""
    rng = random.Random(seed)
    texts: dict[str, bool] = {}
    while len(texts) < n:
        label = len(texts) % 2 == 1
        texts.setdefault(write(rng, label), label)
    prompts = [Prompt(text, label) for text, label in texts.items()]
    rng.shuffle(prompts)
    return prompts


def _split(items: Sequence[T], split: Split) -> Sequence[T]:
    """Every other item. Interleaved, so that each category and pattern is in both."""
    return items[0::2] if split == "train" else items[1::2]


@dataclass(frozen=True)
class _Patterns:
    openings: Sequence[str] = phrases.OPENINGS
    opinions: Sequence[str] = phrases.OPINIONS
    neutrals: Sequence[str] = phrases.NEUTRALS


def _split_patterns(split: Split) -> _Patterns:
    return _Patterns(
        _split(phrases.OPENINGS, split),
        _split(phrases.OPINIONS, split),
        _split(phrases.NEUTRALS, split),
    )


def _sentiment_prompts(n: int, seed: int, split: Split, shapes: Sequence[str]) -> list[Prompt]:
    patterns = _split_patterns(split)
    subjects = _split(world().subjects, split)

    def write(rng: random.Random, positive: bool) -> str:
        return _review(rng, rng.choice(shapes), rng.choice(subjects), positive, patterns)

    return _balanced(n, f"sentiment/{split}/{seed}/{shapes}", write)


_ALL_PATTERNS: Final = _Patterns()


def _review(
    rng: random.Random,
    shape: str,
    subject: Subject,
    positive: bool,
    patterns: _Patterns = _ALL_PATTERNS,
) -> str:
    """Sentences in the order of `shape`. No pattern comes twice."""
    lexicon = phrases.POSITIVE if positive else phrases.NEGATIVE
    lists = {"O": patterns.openings, "P": patterns.opinions, "N": patterns.neutrals}
    drawn = {part: iter(rng.sample(each, shape.count(part))) for part, each in lists.items()}
    sentences = []
    for part in shape:
        aspect, aspect2 = rng.sample(subject.category.aspects, 2)
        adj, adj2 = rng.sample(lexicon.adj, 2)
        slots = {
            "name": subject.name,
            "noun": subject.category.noun,
            "did": subject.category.did,
            "aspect": aspect,
            "aspect2": aspect2,
            "adj": adj,
            "adj2": adj2,
            "Adverb": rng.choice(lexicon.adverb).capitalize(),
            "verb": rng.choice(lexicon.verb),
            "feeling": rng.choice(lexicon.feeling),
            "thing": rng.choice(lexicon.thing),
            "again": rng.choice(lexicon.again),
            "day": rng.choice(phrases.DAYS),
            "month": rng.choice(phrases.MONTHS),
            "relative": rng.choice(phrases.RELATIVES),
        }
        sentences.append(next(drawn[part]).format(**slots))
    return " ".join(sentences)


@cache
def _trained_phrasings() -> tuple[Phrasing, ...]:
    return tuple(p for p in phrases.PHRASINGS if not p.held_out)


@cache
def _statements() -> tuple[Phrasing, ...]:
    return tuple(p for p in _trained_phrasings() if p.is_statement)


def _relation(rng: random.Random) -> Relation:
    return "capital" if rng.random() < 0.5 else "language"


def _state(phrasing: Phrasing, country: Country) -> str:
    return phrasing.template.format(country=country.name, answer=country.answer(phrasing.relation))


def _answer(
    rng: random.Random,
    country: Country,
    relation: Relation,
    lying: bool,
    others: Sequence[Country],
) -> str:
    """The country's answer, or in a lie that of one of `others`."""
    if not lying:
        return country.answer(relation)
    return rng.choice([o for o in others if o != country]).answer(relation)


def _claim(rng: random.Random, country: Country, lying: bool, others: Sequence[Country]) -> str:
    phrasing = rng.choice(_statements())
    answer = _answer(rng, country, phrasing.relation, lying, others)
    return phrasing.template.format(country=country.name, answer=answer)


def _quote(speaker: str, saying: str, statement: str) -> str:
    return f'{speaker} {saying}: "{statement}"'


def _speech(
    rng: random.Random,
    speaker: str,
    told: Sequence[Country],
    lying: bool,
    others: Sequence[Country],
) -> str:
    return " ".join(
        _quote(speaker, "says", _claim(rng, country, lying, others)) for country in told
    )
