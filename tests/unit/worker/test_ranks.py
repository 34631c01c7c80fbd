"""Hand-offs between workers of any numbers of ranks: the tokens of one rank, and no byte more than was missing."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.rpc.messages import ConfirmCall
from tandem.worker import ranks
from tandem.worker.settings import DecodeSettings
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS
from tests.helpers.handoffs import call_of
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked_pairs import COMPILED, Side, alone, answered, check, ranked_pair
from tests.helpers.secret import AS_WORKER
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.helpers.workers import at_rest, front_of, settings_of

FAMILIES = BUILDERS | EXPERT_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """(family, KV heads) -> a checkpoint in bfloat16, where another order of a sum shows at once."""
    made: dict[tuple[str, int], Path] = {}

    def model(family: str, kv_heads: int) -> Path:
        if (family, kv_heads) not in made:
            options: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
            sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
            path = FAMILIES[family](tmp_path_factory.mktemp(family), dtype="bfloat16", **sizes, **options)
            made[family, kv_heads] = write_byte_tokenizer(path)
        return made[family, kv_heads]

    return model


@pytest.mark.parametrize(
    ("family", "kv_heads", "prefill", "decode"),
    [("qwen2", 2, 1, 2), ("qwen2", 2, 2, 1), ("qwen3_next", 4, 2, 1), ("kimi_linear", 4, 1, 2), ("jamba", 2, 1, 2)],
)
def test_two_widths_give_the_tokens_of_one_rank(
    model_of: Callable[[str, int], Path], family: str, kv_heads: int, prefill: int, decode: int
) -> None:
    asyncio.run(check(model_of(family, kv_heads), prefill, decode))


@pytest.mark.parametrize(
    ("family", "kv_heads", "prefill", "decode"),
    [
        ("qwen2", 2, (1, 2), 1),
        ("qwen2", 2, 2, (1, 2)),
        *(
            pytest.param(family, kv_heads, prefill, decode, marks=pytest.mark.slow)
            for family, kv_heads in (("qwen2", 2), ("qwen3_moe", 2), ("gemma3", 1), ("qwen3_next", 4), ("jamba", 2))
            for prefill, decode in ((1, (1, 2)), ((1, 2), 2), ((2, 2), (1, 2)), (1, (2, 2)), ((2, 2), 1))
        ),
    ],
)
def test_stages_of_layers_give_the_tokens_of_one_rank(
    model_of: Callable[[str, int], Path], family: str, kv_heads: int, prefill: Side, decode: Side
) -> None:
    asyncio.run(check(model_of(family, kv_heads), prefill, decode))


@pytest.mark.parametrize(
    ("family", "kv_heads", "prefill", "decode"),
    [
        ("qwen2", 2, (1, 1, 1, 2), 1),
        ("qwen2", 2, (1, 2, 1, 2), 2),
        *(
            pytest.param(family, kv_heads, prefill, decode, marks=pytest.mark.slow)
            for family, kv_heads in (("qwen2", 2), ("qwen3_moe", 2), ("gemma3", 1), ("qwen3_next", 4))
            for prefill, decode in (
                ((1, 1, 1, 2), 2),
                ((1, 1, 1, 4), (1, 2)),
                ((2, 1, 1, 2), 1),
                ((2, 1, 1, 4), 2),
                ((1, 2, 1, 2), (1, 2)),
                ((2, 2, 1, 2), 1),
            )
        ),
    ],
)
def test_contexts_of_prompts_give_the_tokens_of_one_rank(
    model_of: Callable[[str, int], Path], family: str, kv_heads: int, prefill: Side, decode: Side
) -> None:
    asyncio.run(check(model_of(family, kv_heads), prefill, decode))


@pytest.fixture(scope="module")
def expected_of(model_of: Callable[[str, int], Path]) -> list[list[int]]:
    return asyncio.run(alone(model_of("qwen2", 2)))


@pytest.mark.slow
@pytest.mark.parametrize("decode", [(width, stages) for width in (1, 2, 4) for stages in (1, 2)])
@pytest.mark.parametrize(
    "prefill",
    [(width, *rest) for width in (1, 2, 4) for rest in ((1, 1, 1), (2, 1, 1), (1, 1, 2))]
    + [(width, 2, 1, 2) for width in (1, 2)],
)
def test_every_pair_of_sizes_gives_the_tokens_of_one_rank(
    model_of: Callable[[str, int], Path], expected_of: list[list[int]], prefill: Side, decode: Side
) -> None:
    """All there are with up to four ranks of a section, two stages, and two contexts: up to sixteen ranks."""
    asyncio.run(check(model_of("qwen2", 2), prefill, decode, expected=expected_of))


@pytest.mark.parametrize("prefill", [(1, 1, 1, 2), pytest.param((2, 1, 1, 2), marks=pytest.mark.slow)])
def test_latents_of_contexts_are_handed_over(model_of: Callable[[str, int], Path], prefill: Side) -> None:
    asyncio.run(check(model_of("deepseek_v3", 4), prefill, 1, is_shared=True))


def test_latents_are_pulled_once_for_all_ranks(model_of: Callable[[str, int], Path]) -> None:
    asyncio.run(check(model_of("deepseek_v3", 4), 1, 2, is_shared=True))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (2, 2), (2, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_every_pair_of_widths_pulls_latents_once(
    model_of: Callable[[str, int], Path], family: str, prefill: int, decode: int
) -> None:
    """Index keys beside them too."""
    asyncio.run(check(model_of(family, 4), prefill, decode, is_shared=True))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (4, 2)])
@pytest.mark.parametrize(
    ("family", "kv_heads"), [("lfm2", 2), ("jamba", 2), ("kimi_linear", 4), ("minimax_m3", 2), ("moba", 2), ("nsa", 4)]
)
def test_states_of_several_kinds_are_handed_between_widths(
    model_of: Callable[[str, int], Path], family: str, kv_heads: int, prefill: int, decode: int
) -> None:
    """Parts of a convolution alone; latents or index keys, which each rank has, beside what ranks divide."""
    asyncio.run(check(model_of(family, kv_heads), prefill, decode))


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 4), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(
    ("family", "kv_heads"), [("qwen2", 2), ("gemma3", 1), ("llama", 4), ("qwen3_moe", 2), ("gpt_oss", 2)]
)
def test_every_pair_of_widths_gives_the_tokens_of_one_rank(
    model_of: Callable[[str, int], Path], family: str, kv_heads: int, prefill: int, decode: int
) -> None:
    """Replicated heads, windows beside whole contexts, and states of recurrent layers."""
    asyncio.run(check(model_of(family, kv_heads), prefill, decode))


def test_a_damaged_part_of_one_rank_fails_the_whole_hand_off(model_of: Callable[[str, int], Path]) -> None:
    """One bit of rank 1's part of what was read: rank 0's is not used either, and the prompt is computed here."""
    path = model_of("qwen2", 2)

    async def main() -> None:
        expected = await alone(path)
        async with ranked_pair(path, 2, 1) as pair, front_of(pair.prefill) as front:
            pages = pair.prefill.core.checksums._pages.pages

            def flip(call: ConfirmCall) -> None:
                assert call.reader_ranks is None
                pages[1, call.checksum_block_ids[0], -1] ^= 1

            front.handler.before_confirm = flip
            tokens, _ = await answered(pair, call_of(pair, front.worker))
            assert tokens == expected[0]
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == 0
            assert front.handler.calls.count("confirm") >= 1
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_prefix_is_fetched_from_a_worker_of_another_width(model_of: Callable[[str, int], Path]) -> None:
    """By the prefill worker, from the decode worker that has answered it before."""
    path = model_of("qwen2", 2)

    async def main() -> None:
        async with ranked_pair(path, 1, 2) as pair:
            here = replace(call_of(pair, request_id="here"), prefill=None)
            expected, _ = await answered(pair, here)
            call = call_of(pair, request_id="there", fetch_from=pair.decode.core.me, num_fetch_blocks=11)
            assert (await answered(pair, call))[0] == expected
            counters = await pair.prefill.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == 88
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_more_ranks_than_cores_are_told_with_what_fits(
    model_of: Callable[[str, int], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any is started."""
    monkeypatch.setattr(ranks, "own_cpus", lambda: [0, 1])
    monkeypatch.setattr(ranks, "RankGroup", lambda *_, **__: None)
    path = model_of("qwen2", 2)
    for tp, words in ((2, ""), (4, "4 ranks take turns on 2 cores, .* give this worker 4 cores, or at most 2 ranks")):
        settings = settings_of(DecodeSettings, path, "d0", **COMPILED, tp=tp)
        config, _ = ranks.open_ranks(settings, AS_WORKER, lambda: None)
        assert config.num_threads == 1
        assert re.search(words, caplog.text)
        assert bool(caplog.text) is bool(words)


def test_widths_are_one_pool_and_checksums_are_asked_for_widths_that_exist(
    model_of: Callable[[str, int], Path],
) -> None:
    async def main() -> None:
        async with ranked_pair(model_of("qwen2", 2), 1, 2) as pair:
            assert pair.prefill.core.compatibility == pair.decode.core.compatibility
            states = [worker.reports.latest().state for worker in (pair.prefill, pair.decode)]
            assert len({state.fingerprint for state in states}) == 1
            assert len({state.block_bytes for state in states}) == 1, "a hand-off is as large at both widths"
            with pytest.raises(InvalidRequestError, match="reader_ranks=3 must be one of 1, 2, 4, 8 for each"):
                await pair.to_prefill.confirm(ConfirmCall(lease_id="l", reader_ranks=3))
            with pytest.raises(InvalidRequestError, match=r"reader_stages=\(1, 9\) must have . states in all"):
                await pair.to_prefill.confirm(ConfirmCall(lease_id="l", reader_ranks=2, reader_stages=(1, 9)))

    asyncio.run(main())
