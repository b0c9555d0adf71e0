"""Training rows: texts or chats, tokenised and packed to one length, in an order that can be resumed anywhere.

A row is `input_ids`, `labels` and `position_ids`, each `[seq_len]`. Documents stand end to end in it; `position_ids`
restart with each, which is where the models reset their states. `labels` are the tokens themselves (models shift them)
and -100 where there is no loss: at the first token of a document, and in a chat outside the assistant's turns.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, load_dataset
from datasets import List as ListOf
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from conversion.text import BUILDERS


Batch = dict[str, Tensor]
_TOKENIZED = Features({"input_ids": ListOf(Value("int32")), "has_loss": ListOf(Value("bool"))})
_PACKED = Features({name: ListOf(Value("int32")) for name in ("input_ids", "labels", "position_ids")})
_DOCUMENTS_PER_PACK = 1000


def packed_rows(
    data: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    seq_len: int,
    *,
    streaming: bool = False,
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """The rows of files, directories and datasets, in their own order; tokenised once and cached unless streamed.

    Each thousand documents are cut into rows, and what does not fill the last row is dropped.
    Raises: ValueError if a source cannot be read, is empty or has neither a `text` nor a `messages` column.
    """
    parts = []
    for name in data:
        documents = _documents(name, streaming)
        try:
            columns = documents.column_names or list(next(iter(documents)))
        except StopIteration:
            columns = []
        if not columns or (not streaming and len(documents) == 0):
            raise ValueError(f"data {name!r} is empty")
        column = next((x for x in ("messages", "text") if x in columns), None)
        if column is None:
            raise ValueError(f"data {name!r} has neither a 'text' nor a 'messages' column, only {sorted(columns)}")
        parallel = {} if streaming else {"num_proc": num_proc, "desc": "tokenising"}
        tokenizer("")  # a fast tokenizer's first call changes its hash, which names the cache
        parts.append(
            documents.map(
                _tokenize_chat if column == "messages" else _tokenize_text, input_columns=[column],
                fn_kwargs={"tokenizer": tokenizer}, remove_columns=columns, features=_TOKENIZED, **parallel,
            )
        )  # fmt: skip
    rows = concatenate_datasets(parts).map(
        _pack, batched=True, batch_size=_DOCUMENTS_PER_PACK, fn_kwargs={"seq_len": seq_len},
        remove_columns=list(_TOKENIZED), features=_PACKED, **({} if streaming else {"desc": "packing"}),
    )  # fmt: skip
    if not streaming and len(rows) == 0:
        raise ValueError(f"data {', '.join(data)} does not fill one row of seq_len={seq_len} tokens")
    return rows


def _documents(name: str, streaming: bool) -> Dataset | IterableDataset:
    path = Path(name)
    if path.is_file():
        builder = BUILDERS.get(path.suffix, "text")
        options = {"sample_by": "document"} if builder == "text" else {}
        source = {"path": builder, "data_files": str(path), **options}
    elif path.suffix in BUILDERS:
        raise ValueError(f"data file {name!r} does not exist")
    elif path.is_dir():
        source = {"path": str(path)}
    else:
        repository, _, config = name.partition(":")
        source = {"path": repository, "name": config or None}
    try:
        return load_dataset(**source, split="train", streaming=streaming)
    except Exception as error:  # each builder has errors of its own
        raise ValueError(f"data {name!r} cannot be read: {error}") from error


def _tokenize_text(text: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    ids = tokenizer(text, verbose=False).input_ids
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": ids, "has_loss": [True] * len(ids)}


def _tokenize_chat(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
    """Raises: ValueError if the chat template is missing or does not show where the assistant's turns are."""
    template = tokenizer.chat_template
    if not template:
        raise ValueError("the data has chats ('messages'), but the tokenizer has no chat template")
    if "{% generation" in template or "{%- generation" in template:
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
                self._iterator = iter(self.rows)
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
