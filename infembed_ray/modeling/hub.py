"""Upload of model directories to the Hugging Face hub, or to a server with its API (`HF_ENDPOINT`).

The token comes from `HF_TOKEN` or from the client's login.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infembed_ray.config.training import TrainSettings
from infembed_ray.errors import InputError, in_one_line
from infembed_ray.modeling.checkpoint import local
from infembed_ray.progress import say
from infembed_ray.storage.steps import Published

_WEIGHTS = "*.safetensors*"
_MODEL = (
    "README.md",
    "*config*.json",
    "infembed.json",
    "modules.json",
    "*tokenizer*",
    "*tokens*.json",
    "*vocab*",
    "*merges.txt",
    "*chat_template*",
    "*.model",
    _WEIGHTS,
)
"""Names of the files of a model, in any of its folders. Logs, reports and the manifest name paths of the machine."""


def create_repository(settings: TrainSettings) -> None:
    """Create the repository of `push_to_hub` unless it exists; so a wrong name or token fails before the training.

    Raises:
        InputError: the hub refuses the name or the token, or cannot be reached.
    """
    if settings.push_to_hub is None:
        return
    with _hub_errors(settings.push_to_hub):
        _client().create_repo(settings.push_to_hub, private=settings.hub_private, exist_ok=True)


def upload(settings: TrainSettings, published: Published) -> Published:
    """Upload a published model to the repository of `push_to_hub`, if there is one, and return what was published.

    Files that the repository has already are not sent again. Weights of an earlier model are deleted: a library that finds
    `model.safetensors` would load it in place of the new shards.

    Raises:
        InputError: the hub refuses the files, or cannot be reached.
    """
    if settings.push_to_hub is None:
        return published
    directory = local(published.address)
    with _hub_errors(settings.push_to_hub):
        commit = _client().upload_folder(
            repo_id=settings.push_to_hub,
            folder_path=directory,
            allow_patterns=list(_MODEL),
            delete_patterns=_WEIGHTS,
            commit_message="Model by infembed train",
        )
    say(f"train: uploaded the model to {settings.push_to_hub} ({commit.oid})")
    return published


def _client() -> Any:
    from huggingface_hub import HfApi  # takes half a second

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise InputError(
            f"push_to_hub={name}: {in_one_line(error)[:300]}; check the name, HF_TOKEN, HF_ENDPOINT and that HF_HUB_OFFLINE is "
            "not set; the same command uploads a finished model"
        ) from error
