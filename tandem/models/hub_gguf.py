"""Headers of GGUF files in a Hugging Face repository, fetched without the weights, for processes that only need the
tokenizer and the configuration.

The directory made from them is remembered by the model's name, so that it is found again without a network.
"""

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub

from tandem.compute.native.build import default_cache_dir
from tandem.models.gguf import VERSION

if TYPE_CHECKING:  # NOTE: what they need takes a moment to import, and most models are no GGUF files
    from tandem.models.gguf.source import GgufSource

_TIMEOUT_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HubFiles:
    """`Files` of one commit of a repository.

    Args:
        fetch_whole: downloads the file of that name, for servers that do not support ranges.
    """

    repository: str
    commit: str
    fetch_whole: Callable[[str], Path]

    @property
    def root(self) -> Path:
        """Path under which messages name the files of the repository."""
        return Path(f"{self.repository}@{self.commit}")

    def digest(self, path: Path) -> bytes:
        """Digest of the file's name and commit."""
        return hashlib.sha256(f"hub {path}".encode()).digest()

    def open(self, path: Path) -> "GgufSource":
        """Opens the cached file, or reads the remote one by ranges; if the server has none, downloads it whole."""
        import httpx

        from tandem.models.gguf.source import MappedFile
        from tandem.models.ranged_file import NoRangesError, RangedFile

        name = str(path.relative_to(self.root))
        cached = huggingface_hub.try_to_load_from_cache(self.repository, name, revision=self.commit)
        if isinstance(cached, str):
            return MappedFile(Path(cached))
        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.commit)
        headers, token = {"Accept-Encoding": "identity"}, huggingface_hub.get_token()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        try:
            return RangedFile(path, url, httpx.Client(follow_redirects=True, headers=headers, timeout=_TIMEOUT_S))
        except NoRangesError as error:
            _log.warning("%s, so the whole file is downloaded, though only its header is needed", error)
            return MappedFile(self.fetch_whole(name))


def remember(name: str, made: Path) -> None:
    """Records the directory made for the model `name`, see `recall`."""
    record = _record(name)
    record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=record.parent, suffix=".new", delete=False) as file:
        json.dump({"name": name, "made": str(made)}, file)
    Path(file.name).replace(record)


def recall(name: str) -> Path | None:
    """The directory last recorded for the model `name`, if it still exists."""
    try:
        made = Path(json.loads(_record(name).read_text())["made"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not made.is_dir():
        return None
    with suppress(OSError):  # NOTE: another user's directory, which this one may only read
        os.utime(made)
    return made


def _record(name: str) -> Path:
    return default_cache_dir() / "hub" / f"{hashlib.sha256(f'{VERSION} {name}'.encode()).hexdigest()[:32]}.json"
