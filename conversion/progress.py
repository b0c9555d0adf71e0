"""What a command shows while it works: a bar on a terminal, elsewhere a line per ten per cent, if quiet nothing."""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial

import datasets
import huggingface_hub.utils as hub
from tqdm import tqdm
from transformers import modeling_gguf_pytorch_utils as gguf
from transformers.utils import logging as transformers


LINE = "{desc}: {percentage:3.0f}% ({n_fmt} of {total_fmt} {unit}), {elapsed} so far, {remaining} to go{postfix}"


class ProgressBar(tqdm):
    """tqdm with a `total` and a `unit`."""

    hidden = False

    def __init__(self, **options):
        self.in_lines = not sys.stderr.isatty()
        if self.in_lines:
            tenth = math.ceil(options["total"] / 10)
            options |= {"bar_format": LINE, "miniters": tenth, "mininterval": 0, "maxinterval": math.inf}
        super().__init__(**options | ({"disable": True} if self.hidden else {}))

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if self.in_lines:
            print(self, file=self.fp, flush=True)
        else:
            super().display(msg, pos)

    def close(self) -> None:
        if self.in_lines and not self.disable:
            if self.n > self.last_print_n:
                self.display()
            self.disable = True
        super().close()


@contextmanager
def shown(quiet: bool) -> Iterator[None]:
    """Within this context other libraries show bars on a terminal alone; `quiet` leaves errors and warnings."""
    if sys.stderr.isatty() and not quiet:
        yield
        return
    bars = (  # is there a bar, and what switches it off and on
        (transformers.is_progress_bar_enabled(), transformers.disable_progress_bar, transformers.enable_progress_bar),
        (not datasets.are_progress_bars_disabled(), datasets.disable_progress_bars, datasets.enable_progress_bars),
        (not hub.are_progress_bars_disabled(), hub.disable_progress_bars, hub.enable_progress_bars),
        # whose bar heeds no switch
        (
            True,
            partial(setattr, gguf, "tqdm", partial(gguf.tqdm, disable=True)),
            partial(setattr, gguf, "tqdm", gguf.tqdm),
        ),
    )
    hidden, ProgressBar.hidden = ProgressBar.hidden, quiet
    for _, disable, _ in bars:
        disable()
    try:
        if not quiet:
            yield
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        ProgressBar.hidden = hidden
        for enabled, _, enable in bars:
            if enabled:
                enable()
