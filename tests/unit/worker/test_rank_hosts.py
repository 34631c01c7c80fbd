"""Hand-offs of workers whose ranks are on several hosts: each moves its own part, and no byte more than missing."""

import asyncio
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.rpc.messages import ConfirmCall
from tests.helpers.checkpoints import BUILDERS
from tests.helpers.handoffs import call_of
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked_pairs import Side, alone, answered, check, ranked_pair
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.helpers.workers import at_rest, front_of

FAMILIES = BUILDERS | RECURRENT_BUILDERS
TWO_HOSTS = (2, 1, 2)
FOUR_ON_TWO = (4, 1, 2)
FOUR_HOSTS = (4, 1, 4)
STAGES = (1, 2, 2)  # one a host
WIDE_STAGES = (2, 2, 2)
STAGES_OF_CONTEXTS = (1, 2, 2, 2)


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
        (STAGES, STAGES),
        *(
            pytest.param(prefill, decode, marks=pytest.mark.slow)
            for prefill, decode in [
                *((TWO_HOSTS, FOUR_ON_TWO), (FOUR_ON_TWO, TWO_HOSTS), (2, FOUR_HOSTS), (FOUR_HOSTS, 2)),
                *((FOUR_HOSTS, FOUR_ON_TWO), (2, TWO_HOSTS), (TWO_HOSTS, (1, 2, 1))),
                *(
                    (STAGES, 1),
                    (1, STAGES),
                    (STAGES, TWO_HOSTS),
                    (WIDE_STAGES, STAGES),
                    (STAGES_OF_CONTEXTS, WIDE_STAGES),
                ),
            ]
        ),
    ],
)
def test_hosts_hand_over_and_take_over(model_of: Callable[[str], Path], prefill: Side, decode: Side) -> None:
    asyncio.run(check(model_of("qwen2"), prefill, decode))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        *((TWO_HOSTS, 1), (1, TWO_HOSTS), (FOUR_ON_TWO, TWO_HOSTS)),
        *((STAGES, 1), (1, WIDE_STAGES), (WIDE_STAGES, TWO_HOSTS), (TWO_HOSTS, STAGES)),
    ],
)
def test_each_host_pulls_its_copy_of_latents(model_of: Callable[[str], Path], prefill: Side, decode: Side) -> None:
    asyncio.run(check(model_of("deepseek_v3"), prefill, decode, is_shared=True))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(TWO_HOSTS, 1), (2, FOUR_ON_TWO), (STAGES, TWO_HOSTS), (1, STAGES)])
@pytest.mark.parametrize("family", ["kimi_linear", "qwen3_next"])
def test_recurrent_states_of_hosts_are_handed_over(
    model_of: Callable[[str], Path], family: str, prefill: Side, decode: Side
) -> None:
    """And found to be finite where they are."""
    asyncio.run(check(model_of(family), prefill, decode))


def test_a_damaged_part_of_another_host_fails_the_whole_hand_off(model_of: Callable[[str], Path]) -> None:
    """One bit of what the other host has of the source's ranks: nothing is used, and the prompt is computed here."""
    path = model_of("qwen2")

    async def main() -> None:
        expected = await alone(path)
        async with ranked_pair(path, TWO_HOSTS, 1) as pair, front_of(pair.prefill) as front:
            (other,) = [child for child in psutil.Process().children() if "services.rank_host" in child.cmdline()]
            pages = pair.prefill.core.checksums._pages.pages

            def flip(call: ConfirmCall) -> None:
                place = pages[0].numel() + (call.checksum_block_ids[0] + 1) * pages.shape[2] - 1
                with kv_memory_of(other.pid) as memory:
                    memory[place] ^= 1

            front.handler.before_confirm = flip
            tokens, _ = await answered(pair, call_of(pair, front.worker))
            assert tokens == expected[0]
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == 0
            assert front.handler.calls.count("confirm") >= 1
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@contextmanager
def kv_memory_of(process_id: int) -> Iterator[mmap.mmap]:
    """The memory that a host has for KV, whose descriptor is open there."""
    (found,) = [each for each in Path(f"/proc/{process_id}/fd").iterdir() if "tandem-kv" in os.readlink(each)]
    with found.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory
