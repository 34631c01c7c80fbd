"""Every place that names blocks names them by the whole scope: what one scope's requests leave, no other's find."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tandem.rpc.messages as messages
from tandem.core.chain_hasher import ChainHasher
from tandem.core.events import BlockEvent, BlockStored
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.pins import Pin
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import ADAPTER_BYTES, MAX_SALT_CHARACTERS, CacheScope
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.gateway.pin_book import PromptPins
from tandem.gateway.request import ChoiceRequest, ServeRequest
from tandem.process.fleet_view import Chain
from tandem.rpc import message_forms as forms
from tandem.rpc.messages import GenerateCall, ModelInfo, PairCall, PrefillCall, WorkerAddress
from tandem.worker.process import WorkerProcess
from tests.helpers.checkpoints import BUILDERS
from tests.helpers.engines import TINY, drain
from tests.helpers.tokenizers import write_byte_tokenizer
from tests.helpers.workers import GREEDY, Pair, at_rest, generated, pair_of, prompt_of

MODEL, BLOCK = "weights", 8
PROMPT = prompt_of(90)
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, seed=1)
SALTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_SALT_CHARACTERS)
ADAPTERS = st.none() | st.binary(min_size=ADAPTER_BYTES, max_size=ADAPTER_BYTES)
SCOPES = st.builds(CacheScope, adapter=ADAPTERS, salt=SALTS)
TOKENS = st.lists(st.integers(6, 198), min_size=BLOCK, max_size=4 * BLOCK)


def named(scope: CacheScope, tokens: Sequence[int], model: str = MODEL) -> list[bytes]:
    """Block hashes as `core.hashing` defines them."""
    hashes: list[bytes] = []
    extend_hashes(root_hash(scope, model_fingerprint=model, block_size=BLOCK), hashes, tokens, BLOCK)
    return hashes


class AskedBook:
    """A book of pins that notes what it is asked for."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []

    async def find(self, keys: Sequence[bytes]) -> Sequence[float | None]:
        self.keys += keys
        return [None for _ in keys]

    async def keep(self, lifetimes: Mapping[bytes, float]) -> None: ...

    async def close(self) -> None: ...


def by_the_pin_book(scope: CacheScope, tokens: Sequence[int]) -> list[bytes]:
    request = ServeRequest(
        request_id="r",
        model="m",
        choices=(ChoiceRequest(0, "r", array("I", tokens), PARAMS),),
        num_expected_output=1,
        scope=scope,
        pins=(Pin(len(tokens), 60.0),),
    )
    info = ModelInfo(name="m", fingerprint=MODEL, max_model_len=99, vocab_size=199, block_size=BLOCK)
    book = AskedBook()
    asyncio.run(PromptPins.look_up(book, request, info))
    return book.keys


def by_the_router(scope: CacheScope, tokens: Sequence[int]) -> list[bytes]:
    call = PairCall(request_id="r", model="m", token_ids=array("I", tokens), num_expected_output=1, scope=scope)
    heard = forms.PAIR_CALL.decode(forms.PAIR_CALL.encode(call))
    return ChainHasher().hashes(Chain(MODEL, BLOCK, frozenset()).root(heard.scope), heard.token_ids, BLOCK)


def by_a_generate_call(scope: CacheScope, tokens: Sequence[int]) -> list[bytes]:
    call = GenerateCall(request_id="r", prompt_token_ids=tuple(tokens), params=PARAMS, scope=scope)
    heard = forms.GENERATE_CALL.decode(forms.GENERATE_CALL.encode(call))
    return named(heard.scope, heard.prompt_token_ids)


def by_a_prefill_call(scope: CacheScope, tokens: Sequence[int]) -> list[bytes]:
    reader = WorkerAddress("w", "")
    call = PrefillCall(request_id="r", reader=reader, prompt_token_ids=tuple(tokens), params=PARAMS, scope=scope)
    heard = forms.PREFILL_CALL.decode(forms.PREFILL_CALL.encode(call))
    return named(heard.scope, heard.prompt_token_ids)


PLACES: Sequence[Callable[[CacheScope, Sequence[int]], list[bytes]]] = (
    by_the_pin_book,
    by_the_router,
    by_a_generate_call,
    by_a_prefill_call,
)


@pytest.mark.parametrize("place", PLACES)
@given(scope=SCOPES, other=SCOPES, tokens=TOKENS)
def test_all_name_the_same_blocks_and_no_two_scopes_share_one(
    place: Callable[[CacheScope, Sequence[int]], list[bytes]], scope: CacheScope, other: CacheScope, tokens: list[int]
) -> None:
    assert place(scope, tokens) == named(scope, tokens)
    if other != scope:
        assert not set(place(other, tokens)) & set(place(scope, tokens))


def test_no_call_with_a_prompt_can_be_made_without_a_scope() -> None:
    """A default would let a caller drop the tenant's without anybody noticing."""
    scoped = {
        name
        for name, call in vars(messages).items()
        for one in (fields(call) if hasattr(call, "__dataclass_fields__") else ())
        if one.name == "scope"
    }
    assert scoped == {"PairCall", "ComputeCall", "GenerateCall", "PrefillCall"}
    for call in (PairCall, GenerateCall, PrefillCall, ServeRequest):
        with pytest.raises(TypeError, match="scope"):
            call(request_id="r")  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(BUILDERS["llama"](tmp_path_factory.mktemp("scope-llama")))


def test_an_engine_names_them_so_too(llama: Path) -> None:
    stored: list[bytes] = []

    def note(event: BlockEvent) -> None:
        assert isinstance(event, BlockStored)
        stored.append(event.block_hash)

    engine = build_engine(replace(TINY, model=str(llama), block_size=BLOCK), emit=note)
    for scope in (CacheScope(), CacheScope(salt="a"), CacheScope(salt="b")):
        stored.clear()
        engine.add_request(PROMPT, PARAMS, scope=scope)
        drain(engine)
        assert stored == named(scope, PROMPT, engine.model.fingerprint)


async def num_held(worker: WorkerProcess, scope: CacheScope, tokens: Sequence[int] = PROMPT) -> int:
    """Blocks that a peer would be lent under this scope."""
    chain = named(scope, tokens, worker.reports.model.fingerprint)

    def ask(engine: Engine) -> int:
        num_blocks, _ = engine.kv.hold_cached("asked", chain)
        engine.kv.drop("asked")
        return num_blocks

    return await worker.core.engine.call(ask)


def call_of(scope: CacheScope, **more: object) -> GenerateCall:
    return GenerateCall(
        request_id="r",
        prompt_token_ids=PROMPT,
        params=GREEDY,
        scope=scope,
        **more,  # type: ignore[arg-type]
    )


def test_both_workers_of_a_hand_off_keep_its_blocks_under_its_scope(llama: Path) -> None:
    async def story(pair: Pair) -> None:
        mine, other = CacheScope(salt="mine"), CacheScope(salt="other")
        await generated(pair.to_decode, call_of(mine, prefill=pair.prefill.core.me))
        await at_rest(pair.prefill, pair.decode)
        for worker in (pair.prefill, pair.decode):
            assert await num_held(worker, mine) == 11
            assert await num_held(worker, other) == await num_held(worker, CacheScope()) == 0

    with_pair(llama, story)


@pytest.mark.parametrize("salt", ["mine", "other"])
def test_a_prefix_is_fetched_from_a_peer_within_its_scope_only(llama: Path, salt: str) -> None:
    async def story(pair: Pair) -> None:
        await generated(pair.to_decode, call_of(CacheScope(salt="mine")))
        call = PrefillCall(
            request_id="p",
            reader=pair.decode.core.me,
            prompt_token_ids=PROMPT,
            params=GREEDY,
            scope=CacheScope(salt=salt),
            fetch_from=pair.decode.core.me,
            num_fetch_blocks=11,
        )
        async with asyncio.timeout(20):
            leases = {
                update.lease.lease_id async for update in pair.to_prefill.prefill(call) if update.lease is not None
            }
        await pair.to_prefill.release(sorted(leases))
        counters = await pair.prefill.core.engine.call(lambda engine: engine.counters)
        assert counters.num_fetched_tokens == (88 if salt == "mine" else 0)
        await at_rest(pair.prefill, pair.decode)

    with_pair(llama, story)


def with_pair(path: Path, story: Callable[[Pair], Awaitable[None]]) -> None:
    async def main() -> None:
        async with pair_of(path) as pair:
            await story(pair)

    asyncio.run(main())
