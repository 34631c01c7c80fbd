"""A model's name to a directory on disk. Only files that the loader and the tokenizer read are downloaded."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tandem.core.errors import CheckpointError

_COMMON = ("*.json", "*.model", "*.jinja", "*.txt")
_SAFETENSORS = (*_COMMON, "model*.safetensors")
_TORCH = (*_COMMON, "pytorch_model*.bin")
_IGNORED = ["*/*"]


def resolve_model_path(path_or_hub_id: str) -> Path:
    """The directory itself where it is one; otherwise the Hugging Face repository of that name, downloaded or cached.

    Raises:
        CheckpointError: neither exists, or there is no network and no cached copy.
    """
    path = Path(path_or_hub_id).expanduser()
    if path_or_hub_id and path.is_dir():
        return path
    if path.exists() or path_or_hub_id.startswith(("/", "./", "../", "~")) or path_or_hub_id.count("/") > 1:
        raise CheckpointError(f"{path_or_hub_id!r} is not a directory; give a model directory or a Hugging Face name")
    snapshot = _download(path_or_hub_id, _SAFETENSORS)
    if not any(snapshot.glob("model*.safetensors")):
        snapshot = _download(path_or_hub_id, _TORCH)
    return snapshot


def _download(name: str, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=_IGNORED))
    except HFValidationError as error:
        raise CheckpointError(f"{name!r} is neither a directory nor a Hugging Face name ({error})") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{name!r} is no directory here and cannot be fetched from the Hugging Face hub ({error}); "
            "check the name and the network, or download it and give its directory"
        ) from error
