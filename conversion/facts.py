"""Text that asks for what it said: rows of tokens in which facts are stated and, at random distances, asked for."""

import math
import string
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, cycle
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


DESCRIPTION = (
    "facts (numbers, codes, names, places, preferences, lists of pairs, made from templates) and passages of the text "
    "itself are stated and asked for later"
)
PEOPLE = (
    "Amir Beatriz Chen Daria Emeka Freya Goran Hana Ibrahim Jolanta Kwame Leila Mateo Nadia Oskar Priya Quentin Rosa "
    "Sergei Tomoko Ulla Viktor Wen Yusuf Zoe"
).split()
CITIES = (
    "Accra Bergen Cusco Dakar Edirne Fukuoka Ghent Hobart Izmir Jaipur Krakow Lima Mombasa Nantes Oaxaca Porto Quito "
    "Riga Seville Tbilisi Utrecht Varna Wellington"
).split()
THINGS = (
    "amber basil candle drum engine feather guitar hammer ink jacket kettle lantern mirror needle oyster pepper quilt "
    "ribbon saddle teapot umbrella violin walnut"
).split()
KINDS = "parcel invoice ticket flight sample shipment recipe machine contract garden theatre ferry".split()
LIKINGS = (
    "crimson turquoise olive mustard papaya quince cherries otter heron badger cello banjo oboe fencing rowing judo "
    "chess poetry opera noodles dumplings cinnamon lemonade snow thunder"
).split()
SYLLABLES = "ba dor el fen gar hi jo kal lum mar nes or pra qui rav sil tor ul vek wim xan yor zet".split()


class Template(NamedTuple):
    """How a fact is stated, and the beginnings that its answer, the field of that name, completes."""

    answer: str
    statement: str
    questions: tuple[str, ...]


TEMPLATES = (
    Template("number", "{who} paid {number} crowns for the {thing}.",
             ("How many crowns did {who} pay for the {thing}? It was", "Price of {who}'s {thing}:")),
    Template("number", "Serial number of the {thing} from {place}: {number}.",
             ("Q: Which serial number has the {thing} from {place}?\nA:", "On the {thing} from {place} one reads")),
    Template("number", "You can reach {who} at extension {number}.",
             ("To speak with {who}, ask for extension", "Q: At which extension is {who}?\nA:")),
    Template("number", "In all, {who} counted {number} {kind} forms in {place}.",
             ("{who}'s count of {kind} forms in {place} was", "How many {kind} forms were counted in {place}?")),
    Template("code", "{who} gets into the {thing} room with the code {code}.",
             ("To open the {thing} room {who} types", "Code for the {thing} room:")),
    Template("code", "Write this down: {kind} {code} belongs to {who}.",
             ("Which {kind} belongs to {who}? It is {kind}", "{who} owns {kind}")),
    Template("code", "owner={who} item={thing} reference={code}",
             ("owner={who} item={thing} reference=", "The reference given to {who} for the {thing} reads")),
    Template("code", "The label on the {thing} sent to {place} says {code}.",
             ("What does the label on the {thing} for {place} say? It says", "{thing}, {place}, label:")),
    Template("person", "The {thing} from {place} was repaired by {person}.",
             ("Who repaired the {thing} from {place}? It was", "The {thing} from {place} had been mended by")),
    Template("person", "{who} lives next door to {person}.",
             ("{who}'s neighbour is called", "Q: Who lives next door to {who}?\nA:")),
    Template("person", "{person} is in charge of the {kind} in {place}.",
             ("Head of the {kind} in {place}:", "The {kind} in {place} is led by")),
    Template("city", "{who} moved to {city} two years ago.",
             ("Where does {who} live now? In", "These days {who} is at home in")),
    Template("city", "The next {kind} for {who} will leave from {city}.",
             ("From where does {who}'s next {kind} leave? From", "{who}'s {kind} departs from")),
    Template("city", "{who} left the {thing} with a friend in {city}.",
             ("{who} will find the {thing} in", "Q: In which city is {who}'s {thing}?\nA:")),
    Template("liking", "{who} likes {liking} best of all.",
             ("Most of all {who} likes", "Q: What does {who} like best?\nA:")),
    Template("liking", "If you ask {who}, nothing is better than {liking}.",
             ("{who} would always choose", "What is {who}'s first choice?")),
)  # fmt: skip
PAIRS = (
    ("{} = {}", "\n", "{} ="),
    ("{}: {}", "; ", "{}:"),
    ("{} -> {}", ", ", "{} ->"),
    ("| {} | {} |", "\n", "| {} |"),
)
QUOTES = (("", "To quote what stands above:"), ("Note: ", "The note again:"), ("Copy this. ", "The copy:"))


class Fact(NamedTuple):
    """A statement, and for each question about it what follows the question."""

    statement: str
    answers: dict[str, str]


def invented_name(random: Random) -> str:
    """Two or three syllables that no model has learned as a name."""
    return "".join(random.choices(SYLLABLES, k=random.choice((2, 3)))).capitalize()


def draw_fields(random: Random) -> dict[str, str]:
    """A value for every field of the templates."""
    letters = random.choices(string.ascii_uppercase, k=random.choice((1, 2, 3)))
    digits = random.choices(string.digits, k=random.choice((2, 3, 4)))
    return {
        "who": f"{random.choice(PEOPLE)} {invented_name(random)}",
        "person": f"{random.choice(PEOPLE)} {invented_name(random)}",
        "thing": random.choice(THINGS),
        "kind": random.choice(KINDS),
        "place": invented_name(random),
        "city": random.choice((random.choice(CITIES), invented_name(random))),
        "liking": f"{random.choice(LIKINGS)} and {random.choice(LIKINGS)}",
        "number": str(random.randrange(10, 10 ** random.randrange(3, 8))),
        "code": random.choice(("", "-", " ")).join(random.sample(["".join(letters), "".join(digits)], 2)),
    }


def draw_fact(random: Random, read_passage: Callable[[], str]) -> Fact:
    """A fact of a template, a list of pairs, or a passage, with one or two questions."""
    kind = random.choices(("template", "pairs", "passage"), (6, 2, 1))[0]
    count = random.choice((1, 2))
    if kind == "passage":
        passage = read_passage()
        before, question = random.choice(QUOTES)
        return Fact(before + passage, {question: f" {passage}"})
    if kind == "pairs":
        pair, separator, question = random.choice(PAIRS)
        field = random.choice(("number", "code", "city"))
        values = {thing: draw_fields(random)[field] for thing in random.sample(THINGS, random.randrange(3, 7))}
        statement = separator.join(pair.format(*item) for item in values.items())
        return Fact(statement, {question.format(x): f" {values[x]}" for x in random.sample(list(values), count)})
    template = random.choice(TEMPLATES)
    fields = draw_fields(random)
    questions = [question.format(**fields) for question in random.sample(template.questions, count)]
    answer = fields[template.answer]
    return Fact(
        template.statement.format(**fields), {x: answer if x.endswith("=") else f" {answer}." for x in questions}
    )


def fact_row(random: Random, filler: Iterator[int], tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """One row of `length` tokens, about half of them facts and their questions.

    Raises: ValueError if no fact fits.
    """

    def read_passage() -> str:
        passage = [next(filler) for _ in range(random.randrange(8, 24))]
        return " ".join(tokenizer.decode(passage, skip_special_tokens=True).split())

    inserts: list[tuple[float, list[int]]] = []  # tokens, and where in the filler they stand, from 0 to 1
    used, asked, nearest = 0, set(), math.log(8 / length)
    for _ in range(length):
        fact = draw_fact(random, read_passage)
        texts = [fact.statement] + [question + answer for question, answer in fact.answers.items()]
        texts = [random.choice(("\n", " ")) + text + random.choice(("\n", " ")) for text in texts]
        parts = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        size = sum(map(len, parts))
        if used + size > 0.6 * length or not asked.isdisjoint(fact.answers):
            continue
        distance = math.exp(random.uniform(nearest, 0))
        start = random.uniform(0, 1 - distance)
        inserts.append((start, parts[0]))
        for part in parts[1:]:
            inserts.append((start + distance, part))
            distance = math.exp(random.uniform(nearest, math.log(1 - start)))
        used += size
        asked.update(fact.answers)
        if used > 0.5 * length:
            break
    if not inserts:
        raise ValueError(f"length={length} is too short for a fact and its question")
    row, room, taken = [], length - used, 0
    for place, part in sorted(inserts, key=lambda insert: insert[0]):
        row += [next(filler) for _ in range(int(place * room) - taken)] + part
        taken = int(place * room)
    return row + [next(filler) for _ in range(room - taken)]


def fact_rows(
    filler: Iterable[Tensor], tokenizer: PreTrainedTokenizerBase, num_rows: int, length: int, seed: int = 0
) -> Tensor:
    """`num_rows` rows of tokens, `[num_rows, length]`: running text in which facts are stated and later asked for and
    answered, at distances from a few tokens to the whole row. The text is that of `filler`, rows of tokens `[T]`, which
    is read again from its start when it ends.

    Raises: ValueError if the filler has no token or `length` is below 16 or too short for a fact.
    """
    if length < 16:
        raise ValueError(f"length={length} is too short for a fact and its question")
    filler = [row for row in filler if len(row)]
    if not filler:
        raise ValueError("filler has no tokens")
    tokens = chain.from_iterable(row.tolist() for row in cycle(filler))
    random = Random(seed)
    return torch.tensor([fact_row(random, tokens, tokenizer, length) for _ in range(num_rows)])
