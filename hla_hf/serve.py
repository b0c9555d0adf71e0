"""Transformers' own server, `transformers serve`, for HLA models.

    python -m hla_hf.serve MODEL [--prompt-state FILE] [any option of `transformers serve`]

MODEL is a directory or a Hub id. Endpoints, streaming and the queue of requests are Transformers'; any client of its
server talks to this one, `transformers chat MODEL http://localhost:8000` too.
"""

import copy
import functools
import inspect
from pathlib import Path
from typing import Annotated

import torch
import typer
from jinja2 import TemplateError
from torch import Tensor
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serve import Serve
from transformers.utils.import_utils import is_serve_available

import hla_hf

from .modeling_hla import _CACHE_ARGUMENT


_STATE_TEXT = "(the text of the prompt state)"  # stands for it where a chat template renders what follows it


class FollowingTokenizer:
    """Mixed over a tokenizer's class: what it tokenises follows the text of a prompt state.

    Raises: fastapi.HTTPException, status 400, if there is nothing to tokenise, or if the chat template cannot tell what
    follows a system message from the message itself.
    """

    def __call__(self, *args, **kwargs) -> BatchEncoding:
        encoding = super().__call__(*args, **kwargs | {"add_special_tokens": False})
        if torch.as_tensor(encoding["input_ids"]).numel() == 0:
            raise _bad_request("the prompt is empty: at least one token must follow the prompt state")
        return encoding

    def apply_chat_template(
        self, conversation: list[dict], return_tensors: str | None = None, **kwargs
    ) -> BatchEncoding:
        kwargs |= {"tokenize": False, "return_dict": False}
        system = {"role": "system", "content": _STATE_TEXT}
        try:
            before = super().apply_chat_template([system], tokenize=False)
            text = super().apply_chat_template([system, *conversation], **kwargs)
        except TemplateError as error:
            raise _bad_request(
                f"the chat template does not let these messages follow a system message: {error}"
            ) from error
        if not text.startswith(before) or _STATE_TEXT not in before:
            raise _bad_request(
                "the chat template renders the system message, which the prompt state has read, otherwise with these "
                "messages, tools or chat_template_kwargs; leave them out, or use /v1/completions"
            )
        return self(text.removeprefix(before), return_tensors=return_tensors)


def _bad_request(detail: str) -> Exception:
    from fastapi import HTTPException

    return HTTPException(status_code=400, detail=detail)


def follow_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes it leave out what comes before the text that follows a prompt state."""
    if not isinstance(tokenizer, FollowingTokenizer):
        tokenizer.__class__ = type("FollowingTokenizer", (FollowingTokenizer, type(tokenizer)), {})


def follow_prompt_state(model: PreTrainedModel, path: Path) -> None:
    """Makes `model.generate` go on from a saved cache in each call.

    Raises: FileNotFoundError; ValueError if the file is not a cache of one row that this model saved.
    """
    if not hasattr(model, "load_cache"):
        raise ValueError(f"{type(model).__name__} is not an HLA model, so {path} cannot be its state")
    state = model.load_cache(path)
    try:
        with torch.no_grad():
            token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
            model(token, **{_CACHE_ARGUMENT: copy.deepcopy(state)})
    except RuntimeError as error:
        raise ValueError(f"a prompt state is of one row of text, and this one does not take one: {error}") from error
    generate = model.generate

    @functools.wraps(generate)
    def generate_after(input_ids: Tensor, attention_mask: Tensor, **kwargs):
        past = attention_mask.new_ones(attention_mask.shape[0], state.get_seq_length())
        mask = torch.cat([past, attention_mask], 1)
        return generate(input_ids, attention_mask=mask, **kwargs | {_CACHE_ARGUMENT: copy.deepcopy(state)})

    def refuse_without_state(_, args: tuple, kwargs: dict) -> None:
        if kwargs.get(_CACHE_ARGUMENT) is None:
            raise ValueError("this endpoint does not generate, so it cannot follow the prompt state")

    generate_after.follows_state = True
    model.generate = generate_after
    model.register_forward_pre_hook(refuse_without_state, with_kwargs=True)


if is_serve_available():
    from transformers.cli.serving import model_manager

    class _Loader(getattr(model_manager, "ModelLoader", model_manager.ModelManager)):
        """How the server loads a model: since Transformers 5.25 a copy of it does, in a process of the model's own."""

        prompt_state: Path | None = None

        def __init__(self, *args, **kwargs):
            self.prompt_state = _Loader.prompt_state
            super().__init__(*args, **kwargs)

        def load_processor(self, model_id: str) -> PreTrainedTokenizerBase:
            tokenizer = super().load_processor(model_id)
            if self.prompt_state is not None:
                follow_tokens(tokenizer)
            return tokenizer

        def load_model_and_processor(self, *args, **kwargs) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
            for name in hla_hf.__all__:
                if name.startswith("HLA") and name.endswith("ForCausalLM"):
                    setattr(model_manager.transformers, name, getattr(hla_hf, name))  # where it looks for it
            model, tokenizer = super().load_model_and_processor(*args, **kwargs)
            if self.prompt_state is not None and not hasattr(model.generate, "follows_state"):
                try:
                    follow_prompt_state(model, self.prompt_state)
                except (FileNotFoundError, ValueError) as error:
                    raise typer.BadParameter(f"--prompt-state {self.prompt_state}: {error}") from error
                follow_tokens(tokenizer)
            return model, tokenizer


def serve(prompt_state: Path | None = None, **options) -> None:
    """Runs the server until it is interrupted; `options` are the arguments of Transformers' `Serve`.

    Raises: typer.BadParameter if `prompt_state` cannot be used with the model, or an option not with HLA.
    """
    if not is_serve_available():
        raise typer.BadParameter("serving needs more packages: pip install 'hla_hf[serve]'")
    if options["continuous_batching"]:
        raise typer.BadParameter("--continuous-batching pages keys and values, which HLA layers do not keep")
    if prompt_state is not None and (options["force_model"] is None or options["compile"]):
        raise typer.BadParameter("--prompt-state belongs to one MODEL, which must be named, and excludes --compile")
    _Loader.prompt_state = prompt_state
    setattr(model_manager, _Loader.__base__.__name__, _Loader)
    try:
        Serve(**options)
    except RuntimeError as error:  # of the process that loads the model
        name, _, message = str(error).partition(": ")
        if name == typer.BadParameter.__name__:
            raise typer.BadParameter(message) from error
        raise


def main() -> None:
    """The command: the options of `transformers serve` and `--prompt-state`."""
    option = typer.Option(
        help="A cache saved with model.save_cache(): prompts follow the text that it read, and a chat's messages "
        "that of a system message. Penalties on repeated tokens count the request's tokens alone."
    )
    parameter = inspect.Parameter(
        "prompt_state", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[Path | None, option]
    )
    own = inspect.signature(Serve)

    def command(**options) -> None:
        serve(**options)

    command.__signature__ = own.replace(parameters=[*own.parameters.values(), parameter])
    command.__doc__ = Serve.__doc__
    typer.run(command)


if __name__ == "__main__":
    main()
