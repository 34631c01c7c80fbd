"""Drafters' state over real gRPC: warm where both workers have the same head, cold and exact everywhere else."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import TransportError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.head_drafter import HeadDrafter
from tandem.rpc.messages import PrefillUpdate
from tandem.rpc.prefill_messages import LeasedDraftState
from tandem.worker import draft_states
from tandem.worker.process import WorkerProcess
from tests.helpers.checkpoints import BUILDERS, save_tiny_llama
from tests.helpers.handoffs import PROMPT, alone, call_of
from tests.helpers.heads import save_eagle3, save_with_mtp
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.helpers.workers import GREEDY, SAMPLED, Pair, at_rest, front_of, generated, pair_of, prompt_of, until
from tests.unit.worker.test_fetch import HandMoved, has_read, source_of

LONG_GREEDY = replace(GREEDY, max_tokens=24)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """By name a checkpoint and the setting of its drafter; two heads of one model among them."""
    directory = tmp_path_factory.mktemp("heads")
    llama = write_byte_tokenizer(save_tiny_llama(directory / "llama", num_hidden_layers=3))
    mtp = write_byte_tokenizer(save_with_mtp(BUILDERS["deepseek_v3"], directory / "deepseek_v3"))
    return {
        "eagle": (llama, f"eagle={save_eagle3(directory / 'eagle', llama)}"),
        "another": (llama, f"eagle={save_eagle3(directory / 'another', llama, seed=9)}"),
        "mtp": (mtp, "mtp"),
    }


def drafter(worker: WorkerProcess) -> HeadDrafter:
    assert worker.core.draft_states is not None
    found = worker.core.draft_states.carrier
    assert isinstance(found, HeadDrafter)
    return found


class Resumed:
    """Counts the rows that requests of a worker began with."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.num_rows: list[int] = []
        self._drafter = drafter(worker)
        self._begin = self._drafter.begin
        self._drafter.begin = self._note  # type: ignore[method-assign]

    def _note(self, request: Any) -> None:
        self._begin(request)
        state = self._drafter.give(request.request_id)
        self.num_rows.append(0 if state is None else state.num_rows)


async def answers(pair: Pair, path: Path, params: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
    """They are those of one engine without drafts."""
    calls = [
        call_of(pair, request_id=str(index), prompt_token_ids=tuple(prompt), params=params)
        for index, prompt in enumerate(prompts)
    ]
    found = await asyncio.gather(*(generated(pair.to_decode, call) for call in calls))
    assert found == [alone(path, prompt, params) for prompt in prompts]


@pytest.mark.parametrize(("name", "transport"), [("eagle", "cma"), ("mtp", "tcp"), ("eagle", "inproc")])
def test_a_head_goes_on_where_prefill_ended(heads: dict[str, tuple[Path, str]], name: str, transport: str) -> None:
    """With prompts of one token, of whole blocks and of several chunks; found in the cache of prefill, the second time,
    up to a block's end, whose last row depends on the token behind it.
    """
    path, setting = heads[name]
    prompts = [prompt_of(num, seed=num) for num in (1, 16, 64, 90)]

    async def main() -> None:
        async with pair_of(path, transport=transport, speculate=setting) as pair:
            resumed = Resumed(pair.decode)
            for params in (LONG_GREEDY, SAMPLED):
                resumed.num_rows.clear()
                await answers(pair, path, params, prompts)
                assert sorted(resumed.num_rows) == [1, 16, 64, 90]
            assert (await pair.prefill.core.engine.call(lambda e: e.counters)).num_cached_prompt_tokens > 0
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(("prefill", "decode"), [("off", "eagle"), ("eagle", "off"), ("another", "eagle")])
def test_other_drafters_pair_and_start_cold(heads: dict[str, tuple[Path, str]], prefill: str, decode: str) -> None:
    path, _ = heads["eagle"]
    settings = {name: setting for name, (_, setting) in heads.items()} | {"off": "off"}

    async def main() -> None:
        own = {"speculate": settings[prefill]}
        async with pair_of(path, prefill=own, speculate=settings[decode]) as pair:
            resumed = Resumed(pair.decode) if decode != "off" else None
            await answers(pair, path, LONG_GREEDY, [PROMPT, PROMPT[:17]])
            assert resumed is None or resumed.num_rows == [0, 0]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize("damage", ["none came", "other pages", "too many rows", "more bytes"])
def test_a_state_that_does_not_arrive_is_not_missed(heads: dict[str, tuple[Path, str]], damage: str) -> None:
    path, setting = heads["eagle"]

    async def change(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
        state = update.draft_state
        if state is None:
            return [update]
        damaged = {
            "none came": None,
            "other pages": replace(state, page_ids=tuple(page + 1 for page in state.page_ids)),
            "too many rows": replace(state, num_rows=state.num_rows + 1),
            "more bytes": replace(state, num_bytes=1 << 40),
        }[damage]
        return [replace(update, draft_state=damaged)]

    async def main() -> None:
        async with pair_of(path, speculate=setting) as pair, front_of(pair.prefill, change=change) as front:
            resumed = Resumed(pair.decode)
            call = call_of(pair, front.worker, params=LONG_GREEDY)
            assert await generated(pair.to_decode, call) == alone(path, PROMPT, LONG_GREEDY)
            assert resumed.num_rows == [0]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_a_state_that_takes_too_long_is_not_waited_for(
    heads: dict[str, tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, setting = heads["eagle"]
    num_waits = 0

    async def never(_: object) -> None:
        nonlocal num_waits
        num_waits += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(draft_states, "succeeded", never)
    monkeypatch.setattr(draft_states, "_FETCH_S", 0.05)

    async def main() -> None:
        async with pair_of(path, speculate=setting) as pair:
            resumed = Resumed(pair.decode)
            await answers(pair, path, LONG_GREEDY, [PROMPT])
            assert (resumed.num_rows, num_waits) == ([0], 1)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_pages_that_a_read_may_still_write_stay_held_when_another_worker_lends_the_state(
    heads: dict[str, tuple[Path, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: both reads of a request had one hold, so the end of the second gave away the pages of the first."""
    path, setting = heads["eagle"]
    monkeypatch.setattr(draft_states, "_FETCH_S", 20.0)
    leased = LeasedDraftState(first=0, num_rows=1, num_bytes=1, page_ids=(5,))

    async def main() -> None:
        async with pair_of(path, speculate=setting) as pair:
            core, moved = pair.decode.core, HandMoved()
            source = source_of(moved)
            ended = asyncio.create_task(draft_states.fetch_draft_state(core, source, "a" * 32, leased, "r"))
            await until(lambda: has_read(moved, 1), "the first read")
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            fetching = asyncio.create_task(draft_states.fetch_draft_state(core, source, "b" * 32, leased, "r"))
            await until(lambda: has_read(moved, 2), "the second read")
            (_, first, slow), (_, second, cut) = moved.reads
            assert first != second
            cut.fail(TransportError("cut"))
            assert await fetching is None
            assert (await core.engine.call(lambda engine: engine.kv_usage)).transferring == 1
            slow.fail(TransportError("late"))
            await at_rest(pair.decode)

    asyncio.run(main())


def test_an_answer_that_another_worker_began_goes_on_warm(heads: dict[str, tuple[Path, str]]) -> None:
    """As after a failure of its decode worker: prefill computes prompt and answer again, and the head both's rows."""
    path, setting = heads["eagle"]

    async def main() -> None:
        async with pair_of(path, speculate=setting) as pair:
            resumed = Resumed(pair.decode)
            expected = alone(path, PROMPT, LONG_GREEDY)
            call = call_of(pair, params=LONG_GREEDY, output_token_ids=tuple(expected[:5]))
            assert await generated(pair.to_decode, call) == expected[5:]
            assert resumed.num_rows == [len(PROMPT) + 5]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "prefill", "num_rows"),
    [
        ("mtp", 1, len(PROMPT)),
        pytest.param("eagle", 2, len(PROMPT), marks=pytest.mark.slow),
        pytest.param("eagle", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_widths_with_the_same_pages_go_on_warm(
    heads: dict[str, tuple[Path, str]], name: str, prefill: int, num_rows: int
) -> None:
    """To two ranks. Latents lie on pages of one copy whatever the width; parts of K and V do not: that starts cold."""
    load_or_skip()
    path, setting = heads[name]
    compiled = {"native_kernels": True, "attention_backend": "auto", "speculate": setting}

    async def main() -> None:
        async with pair_of(path, prefill={"tp": prefill}, tp=2, **compiled) as pair:
            whole = await generated(
                pair.to_decode, replace(call_of(pair, params=LONG_GREEDY, salt="own"), prefill=None)
            )
            resumed = Resumed(pair.decode)
            assert await generated(pair.to_decode, call_of(pair, params=LONG_GREEDY)) == whole
            assert resumed.num_rows == [num_rows]
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_who_wants_no_drafts_moves_no_state(heads: dict[str, tuple[Path, str]]) -> None:
    path, setting = heads["eagle"]
    params = replace(LONG_GREEDY, speculate="off")

    async def main() -> None:
        seen: list[PrefillUpdate] = []

        async def change(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
            seen.append(update)
            return [update]

        async with pair_of(path, speculate=setting) as pair, front_of(pair.prefill, change=change) as front:
            call = call_of(pair, front.worker, params=params)
            assert await generated(pair.to_decode, call) == alone(path, PROMPT, LONG_GREEDY)
            assert not any(update.draft_state for update in seen)
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())
