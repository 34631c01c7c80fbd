"""Workers of models with recurrent layers: a state is handed over, found damaged, given up."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.errors import IncompatiblePeerError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.rpc.messages import ConfirmCall, GenerateCall, Greeting, PrefillUpdate
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.worker.process import serving_worker
from tandem.worker.settings import DecodeSettings
from tests.helpers.callers import WorkerCaller
from tests.helpers.checkpoints import save_tiny_deepseek_v32
from tests.helpers.delta_checkpoints import save_tiny_qwen3_next
from tests.helpers.handoffs import PROMPT, Gate, alone, call_of
from tests.helpers.hybrid_checkpoints import (
    RECURRENT_BUILDERS,
    save_tiny_falcon_h1,
    save_tiny_jamba,
    save_tiny_lfm2,
    save_tiny_mamba2,
)
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.helpers.workers import (
    GREEDY,
    SAMPLED,
    TIMEOUT_S,
    Pair,
    at_rest,
    front_of,
    generated,
    pair_of,
    prompt_of,
    settings_of,
)


@pytest.fixture
def hybrid(granite_hybrid: Path) -> Path:
    return granite_hybrid


@pytest.fixture(scope="module")
def convolving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker-lfm2")
    return write_byte_tokenizer(save_tiny_lfm2(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def recurring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker-mamba2")
    return write_byte_tokenizer(save_tiny_mamba2(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def replacing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the gated delta rule."""
    path = tmp_path_factory.mktemp("worker-qwen3-next")
    return write_byte_tokenizer(save_tiny_qwen3_next(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with attention and a recurrence in each layer."""
    path = tmp_path_factory.mktemp("worker-falcon-h1")
    return write_byte_tokenizer(save_tiny_falcon_h1(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def scanning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a state of each channel."""
    path = tmp_path_factory.mktemp("worker-jamba")
    return write_byte_tokenizer(save_tiny_jamba(path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1))


@pytest.fixture(scope="module")
def expected(granite_hybrid: Path) -> list[int]:
    return alone(granite_hybrid, PROMPT, GREEDY)


async def num_fetched(pair: Pair) -> int:
    return (await pair.decode.core.engine.call(lambda engine: engine.counters)).num_fetched_tokens


def test_a_decode_worker_alone_gives_the_tokens_of_the_engine(hybrid: Path) -> None:
    async def main() -> None:
        async with serving_worker(settings_of(DecodeSettings, hybrid, "d0", transport="tcp")) as worker:
            client = WorkerCaller(worker.core.me.address)
            calls = [
                GenerateCall(request_id=str(n), prompt_token_ids=prompt_of(n, n), params=params, scope=UNSCOPED)
                for n, params in ((1, GREEDY), (33, SAMPLED), (90, GREEDY))
            ]
            answers = await asyncio.gather(*(generated(client, call) for call in calls))
            await at_rest(worker)
            await client.close()
        assert answers == [alone(hybrid, call.prompt_token_ids, call.params) for call in calls]

    asyncio.run(main())


def test_prompts_of_any_length_fit_where_no_state_grows(recurring: Path) -> None:
    """A request takes as many pages at any length, of which there are enough for so many requests. Routers counted a
    page for each block of tokens: they refused prompts of more blocks, and priced the sending of as many pages.
    """

    async def main() -> None:
        settings = settings_of(DecodeSettings, recurring, "d0", max_num_running=2, transport="tcp")
        async with serving_worker(settings) as worker:
            client = WorkerCaller(worker.core.me.address)
            await worker.reports.refresh()
            state = (await client.status()).state
            num_pages = await worker.core.engine.call(lambda engine: engine.kv_usage.total)
            await client.close()
        assert num_pages < 256 // state.block_size
        assert state.num_free_blocks == state.num_total_blocks >= 2 * 256 // state.block_size
        assert state.block_bytes == 1 < state.request_bytes

    asyncio.run(main())


def test_a_cached_hit_is_billed_to_where_a_state_let_it_resume_and_within_its_salt(hybrid: Path) -> None:
    """A prompt that parts from another after 50 tokens finds K and V of 48 and no state; the next one that parts there
    finds both.
    """
    first, parting, again = prompt_of(90, 1), prompt_of(90, 2), prompt_of(90, 3)
    asked = [
        ("mine", first, 0),
        ("mine", first, 88),
        ("mine", first[:50] + parting[50:], 0),
        ("other", first, 0),
        ("mine", first[:50] + again[50:], 48),
        ("other", first[:50] + again[50:], 0),
        ("other", first, 88),
    ]

    async def main() -> None:
        async with serving_worker(settings_of(DecodeSettings, hybrid, "d0", transport="tcp")) as worker:
            client, num_found = WorkerCaller(worker.core.me.address), 0
            for number, (salt, prompt, num_cached) in enumerate(asked):
                scope = CacheScope(salt=salt)
                call = GenerateCall(request_id=str(number), prompt_token_ids=prompt, params=GREEDY, scope=scope)
                outputs = [update.output async for update in client.generate(call)]
                assert [t for output in outputs for t in output.token_ids] == alone(hybrid, prompt, GREEDY)
                assert outputs[-1].metrics is not None
                assert outputs[-1].metrics.num_cached_tokens == num_cached, number
                num_found += num_cached
                counters = await worker.core.engine.call(lambda engine: engine.counters)
                assert counters.num_cached_prompt_tokens == num_found, number
            await at_rest(worker)
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("model", "transport", "params"),
    [
        ("hybrid", "tcp", GREEDY),
        ("hybrid", "nixl", SAMPLED),
        ("convolving", "cma", SAMPLED),
        ("recurring", "tcp", GREEDY),
        ("replacing", "nixl", GREEDY),
        ("side_by_side", "tcp", SAMPLED),
        *(
            pytest.param(family, transport, params, marks=pytest.mark.slow)
            for family, transport, params in (
                ("jamba", "tcp", GREEDY),
                ("nemotron_latent", "nixl", GREEDY),
                ("qwen3_5", "tcp", SAMPLED),
                ("qwen3_5_moe", "nixl", SAMPLED),
            )
        ),
    ],
)
def test_tokens_handed_over_are_those_of_one_engine(
    model: str, transport: str, params: SamplingParams, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Prompts that end at, before and after a block's end; and again, from what both sides hold by then. `model`: a
    fixture, or a family.
    """
    if model in RECURRENT_BUILDERS:
        sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
        path = write_byte_tokenizer(RECURRENT_BUILDERS[model](tmp_path, **sizes))
    else:
        path = request.getfixturevalue(model)
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 8, 9, 32, 33, 90)]

    async def main() -> None:
        async with pair_of(path, transport=transport) as pair:
            calls = [call_of(pair, request_id=str(len(p)), prompt_token_ids=p, params=params) for p in prompts]
            wanted = [alone(path, prompt, params) for prompt in prompts]
            assert list(await asyncio.gather(*(generated(pair.to_decode, call) for call in calls))) == wanted
            assert await num_fetched(pair) == sum(map(len, prompts))
            assert list(await asyncio.gather(*(generated(pair.to_decode, call) for call in calls))) == wanted
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("number", [1, 3, 4, 5])
@pytest.mark.parametrize("has_spare", [False, True])
def test_a_prefill_worker_that_ends_in_the_middle(
    hybrid: Path, expected: list[int], number: int, has_spare: bool
) -> None:
    """Three chunks, the token, the timeline: whichever comes no more. The state is computed by whoever goes on."""

    async def main() -> None:
        gate = Gate(number)
        async with pair_of(hybrid, lease_ttl_s=1) as pair, front_of(pair.prefill, "p1", change=gate) as front:
            spares = (pair.prefill.core.me,) if has_spare else ()
            task = asyncio.create_task(generated(pair.to_decode, call_of(pair, front.worker, spares=spares)))
            async with asyncio.timeout(TIMEOUT_S):
                await gate.reached.wait()
            await front.server.stop(0.0)
            assert await task == expected
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def states_of(pair: Pair) -> tuple[int, ...]:
    """KV groups that hold a constant state."""
    groups = pair.prefill.core.checksums._states
    assert groups
    return tuple(groups)


def test_a_damaged_state_is_found_however_small_the_share_of_compared_blocks(hybrid: Path, expected: list[int]) -> None:
    """Its source's last page differs by one bit from what was read; no other page did."""

    async def main() -> None:
        async with pair_of(hybrid, checksum_share=0.001) as pair:
            last_pages = dict[int, int]()

            async def note(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
                if update.lease is not None:
                    blocks = (pages for group in states_of(pair) for pages in update.lease.groups[group].pages())
                    last_pages.update((pages[0], pages[-1]) for pages in blocks)
                return [update]

            def flip(call: ConfirmCall) -> None:
                for block_id in last_pages.keys() & set(call.checksum_block_ids):
                    pair.prefill.core.checksums._pages.pages[0][last_pages[block_id], 5] ^= 1
                    last_pages.clear()

            async with front_of(pair.prefill, change=note, before_confirm=flip) as front:
                assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert await num_fetched(pair) == 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_state_that_is_not_finite_is_refused_by_name(
    hybrid: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Both sides' checksums agree on it."""

    async def main() -> None:
        async with pair_of(hybrid) as pair:

            async def spoil(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
                if update.lease is not None and update.lease.is_last:
                    group = states_of(pair)[0]
                    for pages in update.lease.groups[group].pages():
                        assert len(pages) > 1
                        pair.prefill.core.checksums._pages.pages[0, pages[1], :4].view(torch.float32)[0] = torch.nan
                return [update]

            async with front_of(pair.prefill, change=spoil) as front:
                assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert await num_fetched(pair) == 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
    assert "is not finite" in caplog.text


def test_a_peer_whose_state_lies_otherwise_is_refused_by_name(
    hybrid: Path, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def other(greeting: Greeting) -> Greeting:
        layout = greeting.compatibility["kv_layout"].replace("(head, row, column)", "(head, column, row)")
        return replace(greeting, compatibility={**greeting.compatibility, "kv_layout": layout})

    async def main() -> None:
        async with pair_of(hybrid) as pair, front_of(pair.prefill, change_greeting=other) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert front.handler.calls == ["greet"]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
    assert "kv_layout: peer" in caplog.text
    assert "float32 (head, column, row)" in caplog.text


def test_a_peer_that_counts_in_smaller_pieces_is_refused_by_name(
    scanning: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one of an earlier release, whose pieces are a channel's input of one token, and whose card states none."""

    def earlier(greeting: Greeting) -> Greeting:
        compatibility = dict(greeting.compatibility)
        del compatibility["piece_bytes"]
        return replace(greeting, compatibility=compatibility)

    async def main() -> None:
        expected = await asyncio.to_thread(alone, scanning, PROMPT, GREEDY)
        async with pair_of(scanning) as pair, front_of(pair.prefill, change_greeting=earlier) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert front.handler.calls == ["greet"]
            assert await num_fetched(pair) == 0
            ours = pair.decode.core.greeting(PROTOCOL_VERSION)
            with pytest.raises(IncompatiblePeerError, match=r"piece_bytes: peer '\(absent\)', here '64'"):
                await pair.to_prefill.greet(earlier(ours))
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
    assert "piece_bytes: peer '(absent)', here '64'" in caplog.text


def test_workers_of_models_with_larger_heads_share_blocks_with_those_of_earlier_releases(llama: Path) -> None:
    """They state no size of pieces, which is that of the release before."""

    async def main() -> None:
        async with pair_of(llama) as pair:
            assert "piece_bytes" not in pair.decode.core.compatibility

    asyncio.run(main())


def test_a_peer_without_index_keys_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps the latents of a model whose layers choose by them, and nothing to choose by."""
    model = write_byte_tokenizer(save_tiny_deepseek_v32(tmp_path_factory.mktemp("worker-deepseek-v32")))
    expected = alone(model, PROMPT, GREEDY)

    def other(greeting: Greeting) -> Greeting:
        layout, _, _ = greeting.compatibility["kv_layout"].partition(", index key")
        assert layout != greeting.compatibility["kv_layout"]
        return replace(greeting, compatibility={**greeting.compatibility, "kv_layout": layout})

    async def main() -> None:
        async with pair_of(model) as pair, front_of(pair.prefill, change_greeting=other) as front:
            assert await generated(pair.to_decode, call_of(pair, front.worker)) == expected
            assert front.handler.calls == ["greet"]
            assert await num_fetched(pair) == 0
            assert await generated(pair.to_decode, call_of(pair, salt="another")) == expected
            assert await num_fetched(pair) == len(PROMPT)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
    assert "kv_layout: peer" in caplog.text
    assert ", index key 24" in caplog.text


def test_of_windows_and_states_only_what_is_still_seen_is_sent(hybrid: Path, gemma3: Path) -> None:
    """By KV group, the first position that a query at 1,000 sees, and the blocks that are leased of a prompt of twelve:
    all where every token is kept, those of the last window, and the one state.
    """

    async def blocks_of(path: Path) -> list[tuple[int, int]]:
        found: dict[int, list[int]] = {}
        async with pair_of(path, prefill={"max_num_batched_tokens": 16}) as pair:

            async def note(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
                for group, blocks in enumerate(update.lease.groups if update.lease else ()):
                    found.setdefault(group, []).extend(blocks.block_ids)
                return [update]

            async with front_of(pair.prefill, change=note) as front:
                assert await generated(pair.to_decode, call_of(pair, front.worker)) == alone(path, PROMPT, GREEDY)
            layout = await pair.decode.core.engine.call(lambda engine: engine.kv.layout)
            assert await num_fetched(pair) == len(PROMPT)
        return [(layout.groups[group].spec.needed(1000), len(set(ids))) for group, ids in sorted(found.items())]

    assert asyncio.run(blocks_of(hybrid)) == [(0, 12), (999, 1)]
    assert asyncio.run(blocks_of(gemma3)) == [(0, 12), (991, 2), (991, 2)]


def test_clients_that_leave_at_random_moments_leave_nothing(hybrid: Path, expected: list[int]) -> None:
    async def main() -> None:
        async with pair_of(hybrid, prefill={"max_num_batched_tokens": 16}) as pair:
            generator = random.Random(3)
            prompts = [prompt_of(generator.randint(1, 120), seed=seed % 5) for seed in range(24)]
            num_left = 0
            for start in range(0, len(prompts), 8):
                calls = [call_of(pair, request_id=str(i), prompt_token_ids=prompts[i]) for i in range(start, start + 8)]
                tasks = [asyncio.create_task(generated(pair.to_decode, call)) for call in calls]
                for task in tasks:
                    for _ in range(generator.randrange(40)):
                        await asyncio.sleep(0)
                    if generator.random() < 0.6:
                        task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                for index, result in enumerate(results, start):
                    is_left = isinstance(result, asyncio.CancelledError)
                    num_left += is_left
                    assert is_left or result == alone(hybrid, prompts[index], GREEDY)
            assert 6 <= num_left <= 18
            await at_rest(pair.prefill, pair.decode)
            assert await generated(pair.to_decode, call_of(pair)) == expected

    asyncio.run(main())
