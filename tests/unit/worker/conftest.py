"""One tiny checkpoint for all of a worker's tests."""

from pathlib import Path

import pytest

from tests.helpers.checkpoints import BUILDERS
from tests.helpers.handoffs import PROMPT, alone
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.helpers.workers import GREEDY


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(BUILDERS["llama"](tmp_path_factory.mktemp("worker-llama")))


@pytest.fixture(scope="session")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose weights are codes."""
    place = tmp_path_factory.mktemp("worker-int4")
    plain = write_byte_tokenizer(BUILDERS["llama"](place / "plain"))
    save_published(plain, FORMATS["compressed int4 groups"], place / "coded", place / "decoded")
    return place / "coded"


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windowed and full KV groups."""
    return write_byte_tokenizer(BUILDERS["gemma3"](tmp_path_factory.mktemp("worker-gemma3")))


@pytest.fixture(scope="session")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers that read the state of others."""
    return write_byte_tokenizer(BUILDERS["gemma4"](tmp_path_factory.mktemp("worker-gemma4")))


@pytest.fixture(scope="session")
def granite_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recurrent layers around one of attention."""
    return write_byte_tokenizer(save_tiny_granite_hybrid(tmp_path_factory.mktemp("worker-granite")))


@pytest.fixture(scope="session")
def expected(llama: Path) -> list[int]:
    """The greedy answer to the hand-off prompt."""
    return alone(llama, PROMPT, GREEDY)
