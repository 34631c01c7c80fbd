"""Names and paths of models, without a network."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import CheckpointError
from tandem.models.hub import resolve_model_path


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_path_that_is_no_directory(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve_model_path(name)


def test_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve_model_path(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("name", ["not a name", "", "--", "a..b"])
def test_impossible_name(name: str) -> None:
    with pytest.raises(CheckpointError):
        resolve_model_path(name)


def test_without_network_or_cache_the_message_says_what_to_do(tmp_path: Path) -> None:
    """A process of its own: the hub's client reads its environment when it is imported."""
    code = "from tandem.models.hub import resolve_model_path; resolve_model_path('someone/some-model')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "CheckpointError: 'someone/some-model' is no directory here" in done.stderr
    assert "check the name and the network" in done.stderr
