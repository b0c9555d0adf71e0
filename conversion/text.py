"""Text: files, directories, datasets, or the base model's own samples, as documents of tokens and as rows of them."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import fsspec
import torch
from datasets import Dataset, Features, IterableDataset, Value, load_dataset
from datasets import List as ListOf
from datasets.data_files import DataFilesDict, get_data_patterns
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .progress import ProgressBar


TEXT, JSON, BUILDERS = (".txt", ".md"), (".json", ".jsonl", ".ndjson"), {".parquet": "parquet", ".csv": "csv"}
KINDS = (*TEXT, *JSON, *BUILDERS)
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
Tokens = dict[str, list]  # of one document: `input_ids`, and `has_loss` of each
_TOKENIZED = Features({"input_ids": ListOf(Value("int32")), "has_loss": ListOf(Value("bool"))})
_ROW = Features({"json": Value("string"), "where": Value("string")})  # a row, in whatever types the file has


class DataError(ValueError):
    """A source of text, or a row of it, cannot be used; the message names both."""


def tokenized(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_tokens: Callable[[list[dict], PreTrainedTokenizerBase], Tokens] | None = None,
    streaming: bool = False,
    num_proc: int | None = None,
    flag: str = "--data",
) -> Dataset | IterableDataset:
    """The documents of a source: a file, a directory, or the training split of a dataset, `NAME` or `NAME:CONFIG`.

    A .txt or .md file is one document. A row of another kind is one, with its text in `text`, which gets the special
    tokens of the tokenizer and an EOS, or its chat in `messages`, which goes through the chat template and gets no
    others. Every kind may be compressed. Tokenised once and cached unless streamed.

    Args:
        chat_tokens: from a chat to its tokens, where more than `rendered_tokens` is needed.
        flag: the argument that named the source, for errors.
    Raises: DataError, also while it is streamed, if the source does not exist, is of an unknown kind or empty, or a row
    is broken.
    """
    options = {} if streaming else {"num_proc": num_proc, "desc": "tokenising"}
    options["fn_kwargs"] = {"tokenizer": tokenizer, "name": name, "chat_tokens": chat_tokens or rendered_tokens}
    tokenizer("")  # a fast tokenizer's first call changes its hash, which names the cache
    try:
        rows, columns = _rows(name, streaming, flag)
        return rows.map(_tokenize, with_indices=True, remove_columns=columns, features=_TOKENIZED, **options)
    except DataError:
        raise
    except Exception as error:  # each builder has errors of its own
        cause = error.__cause__ if isinstance(error, DatasetGenerationError) else error
        if isinstance(cause, DataError):
            raise cause from None
        raise DataError(f"{flag} {name!r} cannot be read: {_one_line(cause or error)}") from error


def _rows(name: str, streaming: bool, flag: str) -> tuple[Dataset | IterableDataset, list[str]]:
    """The rows of a source, and which columns they have."""
    files = _files(name, flag)
    if files:
        if next(_file_rows(files), None) is None:
            raise DataError(f"{flag} {name!r} is empty")
        status = [Path(file).stat() for file in files]
        options = {"files": files, "versions": [f"{x.st_mtime_ns} {x.st_size}" for x in status]}  # names the cache
        make = (IterableDataset if streaming else Dataset).from_generator
        return make(_file_rows, features=_ROW, gen_kwargs=options), list(_ROW)
    repository, _, config = name.partition(":")
    rows = load_dataset(repository, config or None, split="train", streaming=streaming)
    columns = rows.column_names or list(next(iter(rows), {}))
    if not columns or (not streaming and len(rows) == 0):
        raise DataError(f"{flag} {name!r} is empty")
    used = [x for x in ("messages", "text") if x in columns]
    if not used:
        raise DataError(f"{flag} {name!r} has neither a 'text' nor a 'messages' column, only {sorted(columns)}")
    return rows.select_columns(used), used


def _kind(name: str) -> str:
    return next((x for x in map(str.lower, reversed(Path(name).suffixes)) if x not in COMPRESSED), "")


def _files(name: str, flag: str) -> list[str]:
    """The files of a source on this machine; of a directory its training split, without text beside rows."""
    known = f"known are {', '.join(KINDS)}, also compressed as {', '.join(COMPRESSED)}"
    if Path(name).is_dir():
        found = DataFilesDict.from_patterns(get_data_patterns(name), base_path=name)["train"]
        files = [str(file) for file in found if _kind(file) in KINDS]
        if not files:
            raise DataError(f"{flag} directory {name!r} has no files of a known kind; {known}")
        return [file for file in files if _kind(file) not in TEXT] or files
    if Path(name).is_file() and _kind(name) not in KINDS:
        raise DataError(f"{flag} file {name!r} is of an unknown kind; {known}")
    if not Path(name).is_file() and _kind(name) in KINDS:
        raise DataError(f"{flag} file {name!r} does not exist")
    return [name] if Path(name).is_file() else []


def _file_rows(files: list[str], versions: Sequence[str] = ()) -> Iterator[dict[str, str]]:
    """The rows of files, as `_ROW`. Raises: DataError naming file and row."""
    for name in files:
        kind = _kind(name)
        if kind in JSON:
            rows = _json_rows(name, kind)
        elif kind in BUILDERS:
            rows = load_dataset(BUILDERS[kind], data_files=name, split="train", streaming=True)
        else:
            with fsspec.open(name, "rb", compression="infer") as file:
                text = _decoded(file.read(), name, "")
            rows = [{"text": text}] if text else []
        try:
            for i, row in enumerate(rows, 1):
                where = f"{name!r}, row {i}"
                if not isinstance(row, dict):
                    got = f"{json.dumps(row):.80}"
                    raise DataError(f"{where}: must be an object with 'text' or 'messages', got {got}")
                used = {x: row[x] for x in ("text", "messages") if x in row} or dict.fromkeys(row)
                yield {"json": json.dumps(used), "where": where}
        except DataError:
            raise
        except Exception as error:  # each builder has errors of its own
            raise DataError(f"{name!r} cannot be read: {_one_line(error)}") from error


def _json_rows(name: str, kind: str) -> Iterator:
    # Not `datasets`' own builder: it ends the process on a row that is null, and does not say which row is broken.
    with fsspec.open(name, "rb", compression="infer") as file:
        lines = file
        if kind == ".json":  # an array, an object, or an object per line
            content = file.read()
            lines = content.splitlines()
            try:
                rows = json.loads(content)
            except ValueError:
                pass
            else:
                yield from rows if isinstance(rows, list) else [rows]
                return
        for i, line in enumerate(filter(bytes.strip, lines), 1):
            text = _decoded(line, name, f", row {i}")
            try:
                row = json.loads(text)
            except ValueError as error:
                raise DataError(f"{name!r}, row {i}: not JSON: {_one_line(error)}") from None
            yield row


def _decoded(content: bytes, name: str, where: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = where or f", line {content[: error.start].count(10) + 1}"
        raise DataError(f"{name!r}{where}: not UTF-8: {error.reason} at byte {error.start}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _tokenize(
    row: dict, i: int, tokenizer: PreTrainedTokenizerBase, name: str, chat_tokens: Callable[..., Tokens]
) -> Tokens:
    where = row.get("where", f"{name!r}, row {i + 1}")
    row = json.loads(row["json"]) if "json" in row else row
    if not row.keys() & {"text", "messages"}:
        raise DataError(f"{where}: has neither a 'text' nor a 'messages' column, only {sorted(row)}")
    messages, text = row.get("messages"), row.get("text")
    if messages is None and not isinstance(text, str):
        column = "text" if "text" in row else "messages"
        raise DataError(
            f"{where}: {column} must be {'a string' if column == 'text' else 'a list'}, got {row[column]!r}"
        )
    if messages is not None and not (
        isinstance(messages, list) and messages and all(isinstance(x, dict) and x.get("role") for x in messages)
    ):
        raise DataError(
            f"{where}: messages must be a list of objects with 'role' and 'content', got {json.dumps(messages):.80}"
        )
    try:
        return text_tokens(text, tokenizer) if messages is None else chat_tokens(messages, tokenizer)
    except Exception as error:  # of the tokenizer, or raised by a chat template
        raise DataError(f"{where}: {_one_line(error)}") from error


def text_tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """A text with the special tokens of the tokenizer, and EOS at its end."""
    ids = tokenizer(text, verbose=False).input_ids
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return {"input_ids": ids, "has_loss": [True] * len(ids)}


def rendered_tokens(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """A chat as its template renders it, which writes the special tokens itself."""
    if not tokenizer.chat_template:
        raise ValueError("the data has chats ('messages'), but the tokenizer has no chat template")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return {"input_ids": ids, "has_loss": [True] * len(ids)}


def read_tokens(
    data: Sequence[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    num_rows: int | None,
    length: int,
    flag: str = "--data",
) -> Tensor:
    """Up to `num_rows` rows of `length` tokens, `[N, length]`: the documents of `tokenized`, end to end.

    Raises: DataError if a source cannot be read; ValueError if the text does not fill one row.
    """
    tokens: list[int] = []
    names = [str(x) for x in data]
    sources = (tokenized(name, tokenizer, streaming=True, flag=flag) for name in names)
    for document in chain.from_iterable(map(rows_of, sources)):
        tokens += document["input_ids"]
        if num_rows is not None and len(tokens) >= num_rows * length:
            break
    rows = len(tokens) // length if num_rows is None else min(num_rows, len(tokens) // length)
    if rows == 0:
        raise ValueError(f"the text of {', '.join(names)} has {len(tokens)} tokens, fewer than one row of {length}")
    return torch.tensor(tokens[: rows * length]).view(rows, length)


def rows_of(dataset: Dataset | IterableDataset) -> Iterator[dict]:
    """Iterates over a dataset that may be streamed. Raises: DataError whatever its reader raises."""
    try:
        yield from dataset
    except DataError:
        raise
    except Exception as error:  # each builder has errors of its own
        raise DataError(f"the data cannot be read: {_one_line(error)}") from error


class _TokenCounter(BaseStreamer):
    """Moves a progress bar by the tokens that `generate()` reads and makes."""

    def __init__(self, progress: ProgressBar):
        self.progress = progress

    def put(self, value: Tensor) -> None:
        self.progress.update(value.numel())

    def end(self) -> None:
        pass


def sample_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, num_rows: int, length: int, batch_size: int = 48
) -> Tensor:
    """`num_rows` rows of `length` tokens that the model samples from its own BOS and, every other row, from the start
    of a user turn of its chat template, `[N, length]`. Documents end and begin again within a row as the model has it.
    """
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    prompts = [[bos]]
    if tokenizer.chat_template:
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False)
        prompts.append(tokenizer(chat.split("\0")[0], add_special_tokens=False).input_ids)
    longest = max(map(len, prompts))
    rows: list[Tensor] = []
    defaults, model.generation_config = model.generation_config, GenerationConfig()  # no EOS: rows are full
    try:
        with ProgressBar(total=num_rows * length, desc="sampling text from the base model", unit="tokens") as progress:
            while len(rows) < num_rows:
                batch = [prompts[i % len(prompts)] for i in range(len(rows), min(num_rows, len(rows) + batch_size))]
                padding = [longest - len(prompt) for prompt in batch]
                ids = torch.tensor([[bos] * n + prompt for n, prompt in zip(padding, batch, strict=True)])
                mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
                sampled = model.generate(
                    ids.to(model.device), attention_mask=mask.to(model.device), do_sample=True, temperature=1.0,
                    top_k=0, top_p=1.0, max_length=length + longest - 1, pad_token_id=bos,
                    streamer=_TokenCounter(progress),
                ).cpu()  # fmt: skip
                rows += [row[n : n + length] for n, row in zip(padding, sampled, strict=True)]
    finally:
        model.generation_config = defaults
    return torch.stack(rows)
