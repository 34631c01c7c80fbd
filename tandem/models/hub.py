"""Resolution of a model's name to a directory on disk: a path, the default model, or a Hugging Face repository, of
which only files that the loader and the tokenizer read are downloaded.

A GGUF file is converted into the cache. A Hugging Face name has the form `repository:part@revision`. The revision is a
branch, tag or commit, so that all of a cluster load the same; the fetched commit is logged. The part, such as
`:Q4_K_M`, selects the one GGUF file with that text in its name, and the further files of a split model. If no weights
are needed, only headers of GGUF files are fetched.
"""

import glob
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the HTTP library it uses
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
)

from tandem.compute.native.build import default_cache_dir
from tandem.core.errors import CheckpointError, UnsupportedCheckpointError
from tandem.core.paths import expanded
from tandem.models.default_model import NAME, SAMPLING, fetch_default_model
from tandem.models.gguf.parts import part_paths, whole_name
from tandem.models.hub_gguf import HubFiles, recall, remember
from tandem.models.pickles import ALLOW

_COMMON = ("*.json", "*.model", "*.jinja", "*.txt")
_SAFETENSORS = (*_COMMON, "model*.safetensors")
_GGUF = ".gguf"
_TORCH = (*_COMMON, "pytorch_model*.bin")
_SHOWN = 6  # names of files in a message
_COMMIT = re.compile("[0-9a-f]{40}")
_IGNORED = ["[!a]*/*", "a[!d]*/*"]  # NOTE: all folders except additional_chat_templates

_log = logging.getLogger(__name__)


class _UnreachableError(CheckpointError):
    """The hub does not answer or does not have the name, and the local download cache does not have it either."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model's name on the hub, `repository:part@revision`; absent pieces are empty."""

    repository: str
    part: str
    revision: str

    @classmethod
    def parse(cls, name: str) -> "HubName":
        """Splits a name. NOTE: a revision may contain slashes and colons."""
        model, _, revision = name.partition("@")
        repository, _, part = model.partition(":")
        return cls(repository, part, revision)

    def __str__(self) -> str:
        part, revision = (mark * bool(text) + text for mark, text in ((":", self.part), ("@", self.revision)))
        return f"{self.repository}{part}{revision}"


def resolve_model_path(
    path_or_hub_id: str, *, decoded_to: str | None = None, has_weights: bool = True, allow_pickle: bool = False
) -> Path:
    """Directory of a model: the path itself if it is a model directory; the converted one of a GGUF file or of the
    default model; otherwise the Hugging Face repository of that name, downloaded or cached.

    Args:
        decoded_to: dtype to which a GGUF file's quantised numbers are decoded; None = they stay quantised.
        has_weights: whether weights are needed too, not only the tokenizer and the chat template.
        allow_pickle: PyTorch files are fetched if a repository has no safetensors.

    Raises:
        CheckpointError: nothing of that name exists, or there is neither a network nor a cached copy; or a GGUF file
            that would not be served exactly.
        UnsupportedCheckpointError: a repository has no safetensors, and its PyTorch files may not be fetched.
        ConfigurationError: a path that cannot be looked up.
    """
    path = expanded(path_or_hub_id)
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
    named = HubName.parse(path_or_hub_id)
    if path.exists() or path_or_hub_id.startswith(("/", "./", "../", "~")) or named.repository.count("/") > 1:
        raise CheckpointError(
            f"{path_or_hub_id!r} is not a directory or a GGUF file; give a model directory, a file whose name ends "
            f"with {_GGUF} or a Hugging Face name"
        )
    try:
        return _of_hub(named, decoded_to, has_weights, allow_pickle)
    except _UnreachableError as error:
        known = None if has_weights else recall(str(named))
        if known is None:
            raise CheckpointError(str(error)) from error
        _log.info("%s cannot be reached; %s was made of it before", named, known)
        return known


def served_name(path_or_hub_id: str) -> str:
    """Default name under which a model is served: the name of its directory, of its GGUF file without the ending, or
    its Hugging Face name. Raises ConfigurationError for a path that cannot be looked up.
    """
    path = expanded(path_or_hub_id)
    if path.is_file():
        return whole_name(path.absolute())
    return path.absolute().name if path.is_dir() else path_or_hub_id.partition("@")[0]


def _of_hub(named: HubName, decoded_to: str | None, has_weights: bool, allow_pickle: bool) -> Path:
    known = _known(named, has_weights)
    if known is not None:
        _log_commit(named, named.revision)
        return known
    file = _find_gguf(named, named.part, has_weights) if named.part else None
    pinned = named
    if file is None:
        snapshot = _logged(named, _download(named, _SAFETENSORS if has_weights else _COMMON))
        pinned = replace(named, revision=snapshot.name)
        known = _known(pinned, has_weights)
        if known is not None:
            return known
        is_whole = any(snapshot.glob("model*.safetensors" if has_weights else "tokenizer*"))
        file = None if is_whole else _find_gguf(pinned, "", has_weights, snapshot)
        if is_whole or (file is None and not has_weights):
            return snapshot
    if file is not None and has_weights:
        return _converted(_fetched(pinned, file.name), decoded_to=decoded_to, has_weights=True)
    if file is not None:
        return _described(named, file)
    commit = f"{pinned.repository}@{pinned.revision}"
    if not allow_pickle:
        raise UnsupportedCheckpointError(
            f"{commit} has no safetensors; name a repository or a revision that has, or have its pytorch_model*.bin "
            f"fetched, which are pickles, by {ALLOW}"
        )
    return _download(pinned, _TORCH)


def _converted(
    file: Path,
    *,
    decoded_to: str | None,
    has_weights: bool,
    sampling: Mapping[str, float] | None = None,
    files: HubFiles | None = None,
) -> Path:
    from tandem.models.gguf.convert import converted  # NOTE: most models are none, and it takes a moment

    cache_dir = default_cache_dir() / "gguf"
    return converted(file, cache_dir, files=files, decoded_to=decoded_to, has_weights=has_weights, sampling=sampling)


def _known(named: HubName, has_weights: bool) -> Path | None:
    """Directory without weights that an earlier call made for the same commit."""
    return recall(str(named)) if _COMMIT.fullmatch(named.revision) and not has_weights else None


def _described(named: HubName, file: "_HubFile") -> Path:
    """Directory without weights, made from the header of a GGUF file on the hub."""
    pinned = replace(named, revision=file.commit)
    files = HubFiles(named.repository, file.commit, lambda part: _fetched(pinned, part))
    made = _converted(files.root / file.name, files=files, decoded_to=None, has_weights=False)
    _log_commit(named, file.commit)
    with suppress(OSError):  # NOTE: another user's cache, which this one may only read
        for name in {str(named), str(pinned)}:
            remember(name, made)
    return made


def _gguf_file(path: Path) -> Path | None:
    """`path` if it is a GGUF file, or the only GGUF model of a directory that holds no other."""
    if path.is_file():
        return path if path.suffix == _GGUF else None
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = [file for file in sorted(path.glob(f"*{_GGUF}")) if _is_model(file)]
    if len(files) > 1:
        raise CheckpointError(f"{path} has {len(files)} GGUF files ({files[0].name}, …); name one of them")
    return files[0] if files else None


@dataclass(frozen=True, slots=True)
class _HubFile:
    """A GGUF file on the hub, the first one of a split model."""

    name: str
    commit: str


def _find_gguf(named: HubName, part: str, has_weights: bool, snapshot: Path | None = None) -> _HubFile | None:
    """The repository's GGUF file with `part` in its name; None if `part` is empty and there is no such file."""
    names, commit = _gguf_names(named, part, has_weights, snapshot)
    if not names and not part:
        return None
    wanted, stems = part.lower(), {name: Path(name).stem.lower() for name in names}
    exact = [name for name in names if wanted in re.split("[-.]", stems[name])]  # NOTE: BF16 is not F16
    fitting = exact or [name for name in names if wanted in stems[name]]
    if len(fitting) == 1:
        return _HubFile(fitting[0], commit)
    if not names:
        raise CheckpointError(f"{named.repository!r} has no GGUF file; leave :{part} away")
    if not fitting:
        raise CheckpointError(f"{named.repository!r} has no GGUF file with {part!r} in its name; it has {_few(names)}")
    raise CheckpointError(
        f"{named.repository!r} has {len(fitting)} GGUF files that fit ({_few(fitting)}); name one of them by a part of "
        f"its name, as {replace(named, part='Q4_K_M')}"
    )


def _gguf_names(named: HubName, part: str, has_weights: bool, snapshot: Path | None) -> tuple[list[str], str]:
    """Names of a repository's GGUF files (of local ones without a network), and its commit. Only the first file of a
    split model, and no image projectors.
    """
    try:  # NOTE: a trial download asks for each file that is not here, for 23 s where nothing answers
        found = huggingface_hub.HfApi().model_info(named.repository, revision=named.revision or None)
        names, commit = [each.rfilename for each in found.siblings or ()], found.sha or ""
    except HFValidationError as error:
        raise _invalid(named, error) from error
    except (HTTPError, OSError) as error:
        in_any_case = "".join(f"[{each.lower()}{each.upper()}]" if each.isalpha() else each for each in part)
        snapshot = snapshot or _download(named, (f"*{in_any_case}*{_GGUF}",))
        names, commit = [str(path.relative_to(snapshot)) for path in snapshot.rglob(f"*{_GGUF}")], snapshot.name
        if not names and not has_weights:
            raise _unreachable(named, error) from error
    files = (Path(name) for name in names if name.endswith(_GGUF))
    return sorted(map(str, filter(_is_model, files))), commit


def _is_model(file: Path) -> bool:
    """Whether a GGUF file's name is that of a model, or of the first file of a split one; not an image projector's."""
    return file == part_paths(file)[0] and not file.name.startswith("mmproj")


def _fetched(named: HubName, name: str) -> Path:
    """Path of a GGUF file, downloaded with the other files of a split model."""
    parts = (glob.escape(str(part)) for part in part_paths(Path(name)))
    return _logged(named, _download(named, tuple(parts))) / name


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _logged(named: HubName, snapshot: Path) -> Path:
    """Logs the commit after which a snapshot's directory is named; branches and tags are resolved to it on download."""
    _log_commit(named, snapshot.name)
    return snapshot


def _log_commit(named: HubName, commit: str) -> None:
    repository, revision = named.repository, named.revision
    if _COMMIT.fullmatch(revision):
        _log.info("%s is served at commit %s", repository, commit)
    else:
        _log.info(
            "%s at %s is commit %s; name %s to keep to it",
            *(repository, revision or "its default branch", commit, replace(named, revision=commit)),
        )


def _download(named: HubName, patterns: tuple[str, ...]) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(
                named.repository,
                revision=named.revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=[] if patterns[-1].endswith(_GGUF) else _IGNORED,
            )
        )
    except HFValidationError as error:
        raise _invalid(named, error) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise _unreachable(named, error) from error


def _invalid(named: HubName, error: HFValidationError) -> CheckpointError:
    return CheckpointError(f"{str(named)!r} is neither a directory nor a Hugging Face name ({error})")


def _unreachable(named: HubName, error: Exception) -> _UnreachableError:
    return _UnreachableError(
        f"{str(named)!r} is no directory here and cannot be fetched from the Hugging Face hub ({error}); "
        "check the name and the network, or download it and give its directory"
    )
