"""Uploads to the Hub: what would refuse one is found before the work, and a failed one leaves the directory."""

import shlex
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from .write import RunStopped


# What a later upload replaces as a whole: a model in fewer shards must not keep the others.
REPLACED = ["*.safetensors", "*.safetensors.index.json", "*.py"]


def check_upload(repository: str | None) -> None:
    """Raises ValueError if the token or its rights do not allow an upload to `repository`; nothing is made there."""
    if repository is None:
        return
    flag = f"--push-to-hub {repository!r}"
    validate_repo_id(repository)
    if repository.count("/") != 1:
        raise ValueError(f"{flag} must be USER/NAME")
    api = HfApi()
    try:
        user = api.whoami()
    except Exception as error:  # no token, a token that is refused, no connection
        raise ValueError(f"{flag}: log in first with `hf auth login` or HF_TOKEN: {_one_line(error)}") from error
    owners = [user["name"], *(x["name"] for x in user.get("orgs", []))]
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise ValueError(f"{flag}: the token of {user['name']!r} may only read; make one that may write")
    try:
        api.auth_check(repository, write=True)
    except RepositoryNotFoundError as error:
        if repository.split("/")[0] not in owners:
            raise ValueError(f"{flag}: {user['name']!r} may create repositories of {', '.join(owners)} only") from error
    except HfHubHTTPError as error:
        raise ValueError(f"{flag}: {user['name']!r} may not write there: {_one_line(error)}") from error


def upload(directory: Path, repository: str | None, private: bool = False, revision: str | None = None) -> None:
    """Uploads a complete directory.

    Raises: RunStopped if that fails, KeyboardInterrupt on Ctrl-C, both with the command that uploads it again.
    """
    if repository is None:
        return
    api = HfApi()
    try:
        api.create_repo(repository, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=directory, revision=revision, delete_patterns=REPLACED,
            commit_message=f"Upload {directory.name}",
        )  # fmt: skip
    except (Exception, KeyboardInterrupt) as error:  # of the connection, of the Hub, of the files
        words = ["hf", "upload", repository, str(directory)]
        words += ["--private"] if private else []
        words += ["--revision", revision] if revision is not None else []
        stopped = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RunStopped
        raise stopped(
            f"{directory} is complete, but it could not be uploaded to {repository}: {_one_line(error)}; upload it "
            f"with: {shlex.join(words)}"
        ) from error
    print(f"uploaded {directory} to {repository}" + (f", revision {revision}" if revision else ""), flush=True)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
