"""Recall on running text: facts that are stated in a text and asked for at its end."""

import copy
import itertools
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .serving import cache_bytes, read


TOKENS_AT_ONCE = 32768  # in one batch


class Wording(NamedTuple):
    """Sentences of a fact, each with a number of its own, and the words that the first one's number completes."""

    sentences: tuple[str, ...]
    question: str


WORDINGS = {
    "passkey": Wording(("The pass key is {key}. Remember it. {key} is the pass key.",), "The pass key is"),
    "vault": Wording(("To open the vault, dial {key}.",), "To open the vault, dial"),
    "attributes": Wording(
        (
            "Clara's locker number is {key}.",
            "Bruno's house number is {key}.",
            "The number of Alice's bank account is {key}.",
        ),
        "Clara's locker number is",
    ),
}


def evenly_spaced_rows(tokens: Tensor, num_rows: int, length: int) -> Tensor:
    """`[num_rows, length]` of the text `tokens [T]`, from its start to its end; they overlap where it is short."""
    if len(tokens) < length:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than one context of {length}")
    return torch.stack([tokens[i : i + length] for i in torch.linspace(0, len(tokens) - length, num_rows).long()])


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Without special tokens."""
    return tokenizer(text, add_special_tokens=False).input_ids


def with_facts(
    text: Tensor,
    tokenizer: PreTrainedTokenizerBase,
    depths: Sequence[float],
    wordings: dict[str, Wording],
    seed: str,
) -> tuple[list[int], dict[str, str]]:
    """`text [T]` with a fact of each wording at its depth, its end left out so that the longest question fits, and the
    number that each question asks for."""
    random, facts, keys = Random(seed), [], {}
    for (name, wording), depth in zip(wordings.items(), itertools.cycle(depths)):
        numbers = [str(random.randrange(10_000, 100_000)) for _ in wording.sentences]
        keys[name] = numbers[0]
        sentences = [sentence.format(key=key) for sentence, key in zip(wording.sentences, numbers, strict=True)]
        random.shuffle(sentences)
        facts.append((depth, encode(tokenizer, "\n" + " ".join(sentences) + "\n")))
    longest = max(len(encode(tokenizer, "\n" + wording.question)) for wording in wordings.values())
    room = len(text) - longest - sum(len(fact) for _, fact in facts)
    if room < 0:
        raise ValueError(f"a context of {len(text)} tokens is too short for the facts and their questions")
    row, taken = [], 0
    for depth, fact in sorted(facts, key=lambda fact: fact[0]):
        row += text[taken : int(depth * room)].tolist() + fact
        taken = int(depth * room)
    return row + text[taken:room].tolist(), keys


@torch.no_grad()
def recall(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Tensor,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    wordings: dict[str, Wording] = WORDINGS,
) -> tuple[dict[str, dict[float, float]], int]:
    """By wording and depth, the share of trials in which greedy decoding gives the number that was stated at that depth
    of the context, and the cache's bytes per row after reading it. The trials are the rows of `text [N, T]`.

    A context states a fact of every wording, each at another depth, so that it is read once for all questions; there
    are as many contexts per trial as depths, and each wording stands at each depth in one of them.
    """
    found = {name: dict.fromkeys(depths, 0) for name in wordings}
    shifts = [[*depths[i:], *depths[:i]] for i in range(len(depths))]
    contexts = [
        (shift, *with_facts(row, tokenizer, shift, wordings, f"{trial} {i}"))
        for trial, row in enumerate(text)
        for i, shift in enumerate(shifts)
    ]
    steps = len(encode(tokenizer, " 98765")) + 1
    at_once = max(1, TOKENS_AT_ONCE // text.shape[1])
    for batch in (contexts[i : i + at_once] for i in range(0, len(contexts), at_once)):
        cache = read(model, torch.tensor([row for _, row, _ in batch]))[1]
        size = cache_bytes(cache) // len(batch)
        for index, (name, wording) in enumerate(wordings.items()):
            question = torch.tensor([encode(tokenizer, "\n" + wording.question)] * len(batch))
            token, copied = read(model, question, copy.deepcopy(cache))
            tokens = [token]
            for _ in range(steps - 1):
                token, copied = read(model, token, copied)
                tokens.append(token)
            for (shift, _, keys), answer in zip(batch, torch.cat(tokens, 1), strict=True):
                correct = tokenizer.decode(answer).strip().startswith(keys[name])
                found[name][shift[index % len(shift)]] += correct
    return {name: {depth: n / len(text) for depth, n in at.items()} for name, at in found.items()}, size
