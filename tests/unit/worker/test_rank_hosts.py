"""Hand-offs of workers whose ranks are on several hosts: each moves its own part, and no byte more than missing."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoints import BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked_pairs import Side, check
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

FAMILIES = BUILDERS | RECURRENT_BUILDERS
TWO_HOSTS = (2, 1, 2)
FOUR_ON_TWO = (4, 1, 2)
FOUR_HOSTS = (4, 1, 4)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint in bfloat16, where another order of a sum shows at once."""
    made: dict[str, Path] = {}

    def model(family: str) -> Path:
        if family not in made:
            options: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
            sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
            path = FAMILIES[family](tmp_path_factory.mktemp(family), dtype="bfloat16", **sizes, **options)
            made[family] = write_byte_tokenizer(path)
        return made[family]

    return model


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TWO_HOSTS, 1),
        (1, TWO_HOSTS),
        (TWO_HOSTS, TWO_HOSTS),
        *(
            pytest.param(prefill, decode, marks=pytest.mark.slow)
            for prefill, decode in [
                *((TWO_HOSTS, FOUR_ON_TWO), (FOUR_ON_TWO, TWO_HOSTS), (2, FOUR_HOSTS), (FOUR_HOSTS, 2)),
                *((FOUR_HOSTS, FOUR_ON_TWO), (2, TWO_HOSTS), (TWO_HOSTS, (1, 2, 1))),
            ]
        ),
    ],
)
def test_hosts_hand_over_and_take_over(model_of: Callable[[str], Path], prefill: Side, decode: Side) -> None:
    asyncio.run(check(model_of("qwen2"), prefill, decode))
