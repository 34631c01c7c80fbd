"""A model's name to a directory on disk. Only files that the loader and the tokenizer read are downloaded.

A Hugging Face name may end with `@revision`: a branch, tag or commit, so that all of a cluster load the same.
"""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tandem.core.errors import CheckpointError

_COMMON = ("*.json", "*.model", "*.jinja", "*.txt")
_SAFETENSORS = (*_COMMON, "model*.safetensors")
_TORCH = (*_COMMON, "pytorch_model*.bin")
_IGNORED = ["[!a]*/*", "a[!d]*/*"]  # NOTE: folders, but for additional_chat_templates; patterns know no exceptions


def resolve_model_path(path_or_hub_id: str, *, has_weights: bool = True) -> Path:
    """The directory itself where it is one; otherwise the Hugging Face repository of that name, downloaded or cached.

    Args:
        has_weights: they are wanted too, not only the tokenizer and the chat template.

    Raises:
        CheckpointError: neither exists, or there is no network and no cached copy.
    """
    path = Path(path_or_hub_id).expanduser()
    if path_or_hub_id and path.is_dir():
        return path
    repository = path_or_hub_id.partition("@")[0]  # NOTE: a revision may have slashes too
    if path.exists() or path_or_hub_id.startswith(("/", "./", "../", "~")) or repository.count("/") > 1:
        raise CheckpointError(f"{path_or_hub_id!r} is not a directory; give a model directory or a Hugging Face name")
    if not has_weights:
        return _download(path_or_hub_id, _COMMON)
    snapshot = _download(path_or_hub_id, _SAFETENSORS)
    if not any(snapshot.glob("model*.safetensors")):
        snapshot = _download(path_or_hub_id, _TORCH)
    return snapshot


def served_name(path_or_hub_id: str) -> str:
    """What clients call a model that was given no other name: its directory's name, or its Hugging Face name."""
    path = Path(path_or_hub_id).expanduser()
    return path.absolute().name if path.is_dir() else path_or_hub_id.partition("@")[0]


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    repository, _, revision = name.partition("@")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=list(patterns), ignore_patterns=_IGNORED
            )
        )
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a directory nor a Hugging Face name ({error})") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is no directory here and cannot be fetched from the Hugging Face hub ({error}); "
            "check the name and the network, or download it and give its directory"
        ) from error
