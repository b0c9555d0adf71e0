"""Text for attention transfer: files, a `datasets` name, or the base model's own samples, as rows of tokens."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from datasets import load_dataset
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer


BUILDERS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def documents(data: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """The documents of files (.txt, .md: a document each; .json, .jsonl, .parquet, .csv: a row each) or of the training
    split of a dataset on the Hub, `NAME` or `NAME:CONFIG`.

    A row has its text in `text`, or its chat in `messages`, which goes through the tokenizer's chat template.
    Raises: ValueError if a file does not exist or a row has neither column.
    """
    if any(Path(name).suffix in BUILDERS or Path(name).is_file() for name in data):
        for name in data:
            path = Path(name)
            if not path.is_file():
                raise ValueError(f"--data file {name!r} does not exist")
            builder = BUILDERS.get(path.suffix, "text")
            options = {"sample_by": "document"} if builder == "text" else {}
            rows = load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
            yield from (_row_text(row, name, tokenizer) for row in rows)
        return
    for name in data:
        repository, _, config = name.partition(":")
        rows = load_dataset(repository, config or None, split="train", streaming=True)
        yield from (_row_text(row, name, tokenizer) for row in rows)


def _row_text(row: dict, name: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if "text" in row:
        return row["text"]
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=False)
    raise ValueError(f"--data {name!r} has neither a 'text' nor a 'messages' column, only {sorted(row)}")


def read_tokens(data: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_rows: int | None, length: int) -> Tensor:
    """Up to `num_rows` rows of `length` tokens, `[N, length]`: documents end to end, an EOS token after each.

    Raises: ValueError if the text does not fill one row.
    """
    tokens: list[int] = []
    for document in documents(data, tokenizer):
        tokens += tokenizer(document, verbose=False).input_ids
        if tokenizer.eos_token_id is not None:
            tokens.append(tokenizer.eos_token_id)
        if num_rows is not None and len(tokens) >= num_rows * length:
            break
    rows = len(tokens) // length if num_rows is None else min(num_rows, len(tokens) // length)
    if rows == 0:
        raise ValueError(f"the text of {', '.join(data)} has {len(tokens)} tokens, fewer than one row of {length}")
    return torch.tensor(tokens[: rows * length]).view(rows, length)


class _TokenCounter(BaseStreamer):
    """Moves a progress bar by the tokens that `generate()` reads and makes."""

    def __init__(self, progress: tqdm):
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
        with tqdm(total=num_rows * length, desc="sampling text from the base model", unit="token") as progress:
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
