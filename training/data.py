"""Training rows: texts or chats, tokenised and packed to one length, in an order that can be resumed anywhere.

A row is `input_ids`, `labels` and `position_ids`, each `[seq_len]`. Documents stand end to end in it; `position_ids`
restart with each, which is where the models reset their states. `labels` are the tokens themselves (models shift them)
and -100 where there is no loss: at the first token of a document, and in a chat outside the assistant's turns.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, pairwise

import jinja2
import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import List as ListOf
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from conversion.text import DataError, Tokens, rows_of, tokenized

from .recipe import Recipe


Batch = dict[str, Tensor]
_PACKED = Features({name: ListOf(Value("int32")) for name in ("input_ids", "labels", "position_ids")})
_DOCUMENTS_PER_PACK = 1000


def packed_rows(
    data: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    streaming: bool = False,
    num_proc: int | None = None,
    flag: str = "--data",
) -> Dataset | IterableDataset:
    """The rows of files, directories and datasets, in their own order; tokenised once and cached unless streamed.

    Each thousand documents are cut into rows, and what does not fill the last row is dropped.
    Raises: DataError, also while it is streamed, if a source cannot be read, is empty, or a row of it is broken.
    """
    parts = [
        tokenized(name, tokenizer, chat_tokens=assistant_tokens, streaming=streaming, num_proc=num_proc, flag=flag)
        for name in data
    ]
    rows = concatenate_datasets(parts).map(
        _pack, batched=True, batch_size=_DOCUMENTS_PER_PACK, fn_kwargs={"seq_len": seq_len},
        remove_columns=["input_ids", "has_loss"], features=_PACKED, **({} if streaming else {"desc": "packing"}),
    )  # fmt: skip
    if not streaming and len(rows) == 0:
        raise DataError(f"{flag} {', '.join(data)} does not fill one row of seq_len={seq_len} tokens")
    return rows


def make_rows(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, process: int = 0, num_processes: int = 1
) -> tuple["ShuffledRows | StreamedRows", list[dict], list[dict] | None, int]:
    """The endless training batches, the rows of evaluation and of test, and the steps that the recipe asks for."""

    def read(data: list[str], seq_len: int, flag: str) -> Dataset | IterableDataset:
        options = {"streaming": recipe.streaming, "num_proc": recipe.num_proc, "flag": flag}
        return packed_rows(data, tokenizer, seq_len, **options)

    rows = read(recipe.data, recipe.seq_len, "--data")
    eval_len = recipe.eval_seq_len or recipe.seq_len
    if recipe.eval_data:
        evaluation = _first(read(recipe.eval_data, eval_len, "--eval_data"), recipe.eval_rows)
    else:
        # Held out are the first rows of data, cut anew if evaluation has another length.
        taken = math.ceil(recipe.eval_rows * eval_len / recipe.seq_len)
        evaluation = _first(read(recipe.data, eval_len, "--data"), recipe.eval_rows)
        if not recipe.streaming and len(rows) <= taken:
            raise ValueError(
                f"data has {len(rows)} rows of seq_len={recipe.seq_len} tokens, of which {taken} are held out for "
                f"eval_rows={recipe.eval_rows}: none is left; give more data, a smaller eval_rows or eval_data"
            )
        rows = rows.skip(taken)
    test = _first(read(recipe.test_data, eval_len, "--test_data"), recipe.eval_rows) if recipe.test_data else None
    if recipe.streaming:
        return StreamedRows(rows, recipe.batch_size, process, num_processes), evaluation, test, recipe.steps
    per_step = recipe.batch_size * recipe.accumulation * num_processes
    steps = recipe.steps or max(1, math.ceil(recipe.epochs * len(rows) / per_step))
    return ShuffledRows(rows, recipe.batch_size, recipe.seed, process, num_processes), evaluation, test, steps


def _first(rows: Dataset | IterableDataset, count: int) -> list[dict]:
    first = list(islice(rows_of(rows), count))
    if not first:
        raise ValueError("the evaluation data does not fill one row")
    return first


def assistant_tokens(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """A chat with loss on the assistant's turns alone.

    Raises: ValueError if the chat template is missing or does not show where the assistant's turns are.
    """
    if not tokenizer.chat_template:
        raise ValueError("the data has chats ('messages'), but the tokenizer has no chat template")
    if marks_answers(tokenizer.get_chat_template()):
        chat = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": chat["input_ids"], "has_loss": [bool(x) for x in chat["assistant_masks"]]}
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    turns = []  # the characters of each assistant turn: what its rendering adds to the prompt before it
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            answered = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False)
            if not (text.startswith(answered) and answered.startswith(prompt)):
                raise ValueError(
                    "the chat template renders earlier turns differently once others follow, so the assistant's turns "
                    "cannot be found; mark them in the template with {% generation %}"
                )
            turns.append((len(prompt), len(answered)))
    tokens = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    has_loss = [any(start <= a < end for start, end in turns) for a, _ in tokens.offset_mapping]
    return {"input_ids": tokens.input_ids, "has_loss": has_loss}


@cache
def marks_answers(template: str) -> bool:
    """Whether a chat template marks the assistant's turns: has a `generation` block, however it is spelled."""
    words = [(kind, word) for _, kind, word in jinja2.Environment().lex(template) if kind != "whitespace"]
    return any(a == "block_begin" and b == ("name", "generation") for (a, _), b in pairwise(words))


def _pack(documents: dict[str, list], seq_len: int) -> dict[str, np.ndarray]:
    lengths = [len(x) for x in documents["input_ids"]]
    size = sum(lengths) // seq_len * seq_len
    starts = np.zeros(sum(lengths), dtype=np.int64)
    starts[np.cumsum([0, *lengths])[:-1][np.array(lengths) > 0]] = 1
    starts[::seq_len] = 1
    index = np.arange(len(starts))
    positions = (index - np.maximum.accumulate(index * starts))[:size]
    ids = np.concatenate([np.asarray(x, dtype=np.int32) for x in documents["input_ids"]])[:size]
    has_loss = np.concatenate([np.asarray(x, dtype=bool) for x in documents["has_loss"]])[:size]
    labels = np.where(has_loss & (positions > 0), ids, -100)
    return {
        name: x.astype(np.int32).reshape(-1, seq_len)
        for name, x in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
    }


def as_batch(rows: list[dict]) -> Batch:
    """Rows as int64 tensors `[B, seq_len]`."""
    return {name: torch.tensor(np.array([row[name] for row in rows]), dtype=torch.long) for name in _PACKED}


class ShuffledRows:
    """Batches of prepared rows without end, each epoch in a seeded order of its own.

    Row i of the run is the same whatever the number of processes; a process takes its `batch_size` of each
    `batch_size * num_processes`. Resuming reads nothing again.
    """

    def __init__(self, rows: Dataset, batch_size: int, seed: int, process: int = 0, num_processes: int = 1):
        self.rows, self.batch_size, self.seed = rows, batch_size, seed
        self.process, self.num_processes = process, num_processes
        self.position = 0  # rows that all processes have had
        self._epoch, self._order = None, None

    def _row(self, i: int) -> dict:
        epoch, i = divmod(i, len(self.rows))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.rows), generator=generator).tolist()
        return self.rows[self._order[i]]

    def __next__(self) -> Batch:
        start = self.position + self.process * self.batch_size
        self.position += self.num_processes * self.batch_size
        return as_batch([self._row(i) for i in range(start, start + self.batch_size)])

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


class StreamedRows:
    """Batches of streamed rows without end, in the order of the data; `datasets` resumes it where it stood."""

    def __init__(self, rows: IterableDataset, batch_size: int, process: int = 0, num_processes: int = 1):
        self.rows = split_dataset_by_node(rows, process, num_processes)
        self.batch_size, self.epoch = batch_size, 0
        self._iterator: Iterator | None = None

    def _row(self) -> dict:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = rows_of(self.rows)
            row = next(self._iterator, None)
            if row is not None:
                return row
            self.epoch += 1
            self.rows.set_epoch(self.epoch)
            self._iterator = None
        raise ValueError("data does not fill one row of seq_len tokens for every process")

    def __next__(self) -> Batch:
        return as_batch([self._row() for _ in range(self.batch_size)])

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = state["epoch"]
        self.rows.set_epoch(self.epoch)
        self.rows.load_state_dict(state["rows"])
        self._iterator = None
