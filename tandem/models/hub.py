"""A model's name to a directory on disk. Only files that the loader and the tokenizer read are downloaded.

A GGUF file is converted into the cache. A Hugging Face name may end with `@revision`: a branch, tag or commit, so that
all of a cluster load the same. The commit that was fetched is logged.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from tandem.compute.native.build import default_cache_dir
from tandem.core.errors import CheckpointError, UnsupportedCheckpointError
from tandem.models.default_model import NAME, SAMPLING, fetch_default_model
from tandem.models.pickles import ALLOW

_COMMON = ("*.json", "*.model", "*.jinja", "*.txt")
_SAFETENSORS = (*_COMMON, "model*.safetensors")
_GGUF = ".gguf"
_TORCH = (*_COMMON, "pytorch_model*.bin")
_COMMIT = re.compile("[0-9a-f]{40}")
_IGNORED = ["[!a]*/*", "a[!d]*/*"]  # NOTE: folders, but for additional_chat_templates; patterns know no exceptions

_log = logging.getLogger(__name__)


def resolve_model_path(
    path_or_hub_id: str, *, decoded_to: str | None = None, has_weights: bool = True, allow_pickle: bool = False
) -> Path:
    """The directory itself where it is one; that of a GGUF file or the default model, converted or cached; otherwise
    the Hugging Face repository of that name, downloaded or cached.

    Args:
        decoded_to: the dtype to which a GGUF file's codes are decoded; None = they stay codes.
        has_weights: they are wanted too, not only the tokenizer and the chat template.
        allow_pickle: PyTorch files are fetched where a repository has no safetensors.

    Raises:
        CheckpointError: nothing of that name exists, or there is no network and no cached copy; or a GGUF file that
            would not be served exactly.
        UnsupportedCheckpointError: a repository has no safetensors, and its PyTorch files may not be fetched.
    """
    path = Path(path_or_hub_id).expanduser()
    if path_or_hub_id and path.exists():
        file = _gguf_file(path)
        if file is not None:
            return _converted(file, decoded_to=decoded_to, has_weights=has_weights)
        if path.is_dir():
            return path
    if path_or_hub_id == NAME and not path.exists():
        return _converted(
            fetch_default_model(default_cache_dir() / "models"),
            decoded_to=decoded_to,
            has_weights=has_weights,
            sampling=SAMPLING,
        )
    repository = path_or_hub_id.partition("@")[0]  # NOTE: a revision may have slashes too
    if path.exists() or path_or_hub_id.startswith(("/", "./", "../", "~")) or repository.count("/") > 1:
        raise CheckpointError(
            f"{path_or_hub_id!r} is not a directory or a GGUF file; give a model directory, a file whose name ends "
            f"with {_GGUF} or a Hugging Face name"
        )
    if not has_weights:
        return _logged(path_or_hub_id, _download(path_or_hub_id, _COMMON))
    snapshot = _logged(path_or_hub_id, _download(path_or_hub_id, _SAFETENSORS))
    if any(snapshot.glob("model*.safetensors")):
        return snapshot
    commit = f"{repository}@{snapshot.name}"
    if not allow_pickle:
        raise UnsupportedCheckpointError(
            f"{commit} has no safetensors; name a repository or a revision that has, or have its pytorch_model*.bin "
            f"fetched, which are pickles, by {ALLOW}"
        )
    return _download(commit, _TORCH)


def served_name(path_or_hub_id: str) -> str:
    """Name of a model that was given no other: its directory's or GGUF file's name without the ending,
    or its Hugging Face name.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_file():
        return path.absolute().stem
    return path.absolute().name if path.is_dir() else path_or_hub_id.partition("@")[0]


def _converted(
    file: Path, *, decoded_to: str | None, has_weights: bool, sampling: Mapping[str, float] | None = None
) -> Path:
    from tandem.models.gguf.convert import converted  # NOTE: most models are none, and it takes a moment

    cache_dir = default_cache_dir() / "gguf"
    return converted(file, cache_dir, decoded_to=decoded_to, has_weights=has_weights, sampling=sampling)


def _gguf_file(path: Path) -> Path | None:
    """The file itself, or the only one of a directory that holds no other model."""
    if path.is_file():
        return path if path.suffix == _GGUF else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob(f"*{_GGUF}"))
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} GGUF files ({files[0].name}, …); name one of them")
    return files[0] if files else None


def _logged(name: str, snapshot: Path) -> Path:
    """A snapshot's directory is named after its commit, to which branches and tags are resolved when it is fetched."""
    repository, _, revision = name.partition("@")
    if _COMMIT.fullmatch(revision):
        _log.info("%s is served at commit %s", repository, snapshot.name)
    else:
        _log.info(
            "%s at %s is commit %s; name %s@%s to keep to it",
            *(repository, revision or "its default branch", snapshot.name, repository, snapshot.name),
        )
    return snapshot


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
