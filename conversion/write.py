"""Directories that are complete or do not exist, tried before the work whose result they are to hold."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase


class RunStopped(RuntimeError):
    """The work cannot go on; the message names what to continue from."""


@contextmanager
def written_beside(target: Path) -> Iterator[Path]:
    """Yields a new directory, which becomes `target`, replacing it, if the block ends without an error."""
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        remove(target)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Deletes a directory if it exists."""
    if path.exists():  # renamed first: what is half deleted must not look complete
        removed = path.with_name(f".{path.name}.removed-{os.getpid()}")
        try:
            path.rename(removed)
            shutil.rmtree(removed)
        finally:
            shutil.rmtree(removed, ignore_errors=True)


def write_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, directory: Path) -> None:
    """Writes weights, config, generation config, Python files, and the tokenizer if there is one."""
    generation_config, model.generation_config = model.generation_config, GenerationConfig()
    try:
        model.save_pretrained(directory)
    finally:
        model.generation_config = generation_config
    # As it was read. Transformers before 5.23 refuses to write one that published models have: a temperature without
    # do_sample.
    generation_config.to_json_file(directory / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def try_writing(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, target: Path) -> None:
    """Writes the model where `target` will be and deletes it, so that what would stop the writing is known now.

    Raises: ValueError if it cannot be written.
    """
    existing = next(path for path in target.absolute().parents if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.trial-", dir=existing) as directory:
            write_model(model, tokenizer, Path(directory))
    except Exception as error:  # each writer has errors of its own
        raise ValueError(f"the model cannot be written to {str(target)!r}: {error}") from error
