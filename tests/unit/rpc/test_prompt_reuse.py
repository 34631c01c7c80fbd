"""Of a prompt whose beginning the other process keeps, only the rest is sent; handlers get the whole in any case."""

import random
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError, UnavailableError, UnknownPromptError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED, CacheScope
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.messages import GenerateUpdate, PairCall, PairingAnswer, PrefillCall
from tandem.rpc.prompt_messages import NamedPrompt
from tandem.rpc.prompt_reuse import MIN_TOKENS, PromptSender, RememberedPrompts, ReusablePrompts
from tandem.rpc.server import serve_router, serve_worker
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER
from tests.unit.rpc.handlers import HERE, Router, Worker, after_restart, generate_call, run

ANY_PORT = "127.0.0.1:0"
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, seed=1)
LONG = array("I", (number % 3000 for number in range(3 * MIN_TOKENS)))


def pair_call(prompt: "array[int]", scope: CacheScope = UNSCOPED) -> PairCall:
    return PairCall(request_id="r", model="m", token_ids=prompt, num_expected_output=1, scope=scope)


def answered(caller: ReusablePrompts, kept: RememberedPrompts, call: PairCall, process: str = "a") -> int:
    """Sends a call; the number of tokens that were sent. Fails if the process does not get the whole."""
    sender, num_sent = PromptSender(caller, process, call), 0
    while True:
        sent = sender.next()
        num_sent += len(sent.token_ids) + (0 if sent.told is None else len(sent.told.more_token_ids))
        try:
            assert kept.whole(sent) == call
        except UnknownPromptError as error:
            sender.note_error(error)
        else:
            sender.note_answer()
            return num_sent


def test_what_follows_a_known_prompt_is_sent() -> None:
    caller, kept = ReusablePrompts(), RememberedPrompts()
    assert answered(caller, kept, pair_call(LONG)) == len(LONG)
    assert answered(caller, kept, pair_call(LONG + array("I", range(9)))) == 9
    assert answered(caller, kept, pair_call(LONG)) == 1, "at least one token is sent"
    edited = LONG[:-100] + array("I", [7]) + LONG[-99:]
    assert answered(caller, kept, pair_call(edited)) == 100
    assert answered(caller, kept, pair_call(array("I", range(9, 9 + len(LONG))))) == len(LONG)
    assert answered(caller, kept, pair_call(LONG[: MIN_TOKENS - 1])) == MIN_TOKENS - 1, "short ones are not kept"


@pytest.mark.parametrize("place", [2047, 2048, 16383, 16384, 16385, 39_999])
def test_what_two_prompts_share_is_found_to_the_token(place: int) -> None:
    caller, kept = ReusablePrompts(), RememberedPrompts()
    first = array("I", (number % 3000 for number in range(40_000)))
    second = first[:]
    second[place] += 1
    assert answered(caller, kept, pair_call(first)) == len(first)
    assert answered(caller, kept, pair_call(second)) == len(first) - (place if place >= 2048 else 0)


def test_neither_scopes_nor_processes_share_what_was_sent() -> None:
    caller, kept = ReusablePrompts(), RememberedPrompts()
    other = CacheScope(salt="another tenant")
    assert answered(caller, kept, pair_call(LONG)) == len(LONG)
    assert answered(caller, kept, pair_call(LONG, other)) == len(LONG)
    assert answered(caller, RememberedPrompts(), pair_call(LONG), "b") == len(LONG)
    second = ReusablePrompts()
    assert answered(second, kept, pair_call(LONG)) == len(LONG), "names of two gateways are never the same"
    assert [answered(each, kept, pair_call(LONG)) for each in (caller, second)] == [1, 1]


def test_what_is_not_kept_any_more_is_sent_as_a_whole() -> None:
    caller, kept = ReusablePrompts(), RememberedPrompts()
    answered(caller, kept, pair_call(LONG))
    restarted = RememberedPrompts()
    assert answered(caller, restarted, pair_call(LONG)) == 1 + len(LONG)
    assert answered(caller, restarted, pair_call(LONG)) == 1


def test_a_prompt_counts_as_known_once_its_call_was_answered() -> None:
    caller = ReusablePrompts()
    first = PromptSender(caller, "a", pair_call(LONG))
    assert first.next().told is not None
    assert len(PromptSender(caller, "a", pair_call(LONG)).next().token_ids) == len(LONG)
    first.note_answer()
    assert len(PromptSender(caller, "a", pair_call(LONG)).next().token_ids) == 0


@pytest.mark.parametrize("side", ["caller", "called", "both"])
def test_random_conversations_arrive_whole_whatever_is_forgotten(side: str) -> None:
    rng, few = random.Random(side), 12 * 4 * MIN_TOKENS
    caller = ReusablePrompts(few if side != "called" else 2**26)
    kept = RememberedPrompts(few if side != "caller" else 2**26)
    talks = [array("I", (rng.randrange(9) for _ in range(2 * MIN_TOKENS))) for _ in range(6)]
    num_sent = num_tokens = 0
    for _ in range(300):
        place = rng.randrange(len(talks))
        talks[place] = talks[place][: len(talks[place]) - rng.randrange(50)] + array("I", rng.choices(range(9), k=200))
        num_sent += answered(caller, kept, pair_call(talks[place], CacheScope(salt=str(place % 2))))
        num_tokens += len(talks[place])
        assert caller.num_bytes <= 2**26
        assert kept.num_bytes <= 2**26
    assert num_sent < num_tokens * 0.95
    if side == "both":
        assert max(caller.num_bytes, kept.num_bytes) <= few


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (pair_call(array("I")), "0 token ids"),
        (replace(pair_call(LONG), told=NamedPrompt(b"short", 1)), "5 bytes; 16 are needed"),
    ],
)
def test_calls_without_a_prompt_or_a_name_are_refused(call: PairCall, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        RememberedPrompts().whole(call)


def test_a_release_that_keeps_no_prompts_is_asked_once() -> None:
    caller = ReusablePrompts()
    first = PromptSender(caller, "a", pair_call(LONG))
    first.next()
    first.note_answer()
    second = PromptSender(caller, "a", pair_call(LONG))
    assert len(second.next().token_ids) == 0
    second.note_error(InvalidRequestError("token_ids has 0 token ids; at least 1 is needed"))
    assert second.next() == pair_call(LONG)
    second.note_answer()
    assert PromptSender(caller, "a", pair_call(LONG)).next() == pair_call(LONG)


def test_a_refusal_of_the_whole_is_the_callers() -> None:
    caller = ReusablePrompts()
    first = PromptSender(caller, "a", pair_call(LONG))
    first.next()
    first.note_answer()
    second = PromptSender(caller, "a", pair_call(LONG))
    second.next()
    second.note_error(InvalidRequestError("no worker could serve it"))
    second.next()
    with pytest.raises(InvalidRequestError, match="no worker"):
        second.note_error(InvalidRequestError("no worker could serve it"))
    assert len(PromptSender(caller, "a", pair_call(LONG)).next().token_ids) == 0, "the release is not to blame"


def test_prefill_workers_get_whole_prompts_of_which_the_new_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a restart of theirs. The call of another kind goes on from a prompt that this process sent before."""
    sizes: list[int] = []
    whole = RememberedPrompts.whole

    def noted(self: RememberedPrompts, call: Any) -> Any:
        sizes.append(len(call.prompt_token_ids))
        return whole(self, call)

    monkeypatch.setattr(RememberedPrompts, "whole", noted)

    def call_of(prompt: "array[int]") -> PrefillCall:
        return PrefillCall(request_id="r", prompt_token_ids=prompt, params=GREEDY, scope=UNSCOPED, reader=HERE)

    async def check() -> None:
        worker, caller = Worker(), ReusablePrompts()
        first = await serve_worker(worker, ANY_PORT, AS_WORKER)
        client = WorkerClient(first.address, AS_WORKER, prompts=caller)
        prompts = [LONG[: 2 * MIN_TOKENS + 7 * turn] for turn in range(3)]
        for prompt in prompts:
            assert [update async for update in client.prefill(call_of(prompt))]
        assert sizes == [2 * MIN_TOKENS, 0, 0]
        await first.stop()
        second = await serve_worker(worker, first.address, AS_WORKER)
        while True:
            with suppress(UnavailableError):  # until this end has noticed that the connection is over
                await client.release([])
                break
        assert [update async for update in client.prefill(call_of(LONG))]
        assert sizes[3:] == [0, len(LONG)]
        received = [call[1] for call in worker.calls if call[0] == "prefill"]
        assert received == [call_of(prompt) for prompt in [*prompts, LONG]]
        with pytest.raises(InvalidRequestError, match="0 token ids"):
            [update async for update in client.prefill(call_of(array("I")))]
        await client.close()
        await second.stop()

    run(check)


@pytest.mark.parametrize("is_shared", [True, False])
def test_workers_and_routers_get_whole_prompts(is_shared: bool) -> None:
    async def check() -> None:
        worker, router, caller = Worker(), Router(), ReusablePrompts()
        servers = [await serve_worker(worker, ANY_PORT, AS_WORKER, is_shared=is_shared)]
        client = WorkerClient(servers[0].address, AS_GATEWAY, prompts=caller)
        prompts = [LONG[: 2 * MIN_TOKENS + 7 * turn] for turn in range(4)]
        for prompt in prompts:
            assert [update async for update in client.serve(generate_call(prompt=prompt))]
        await servers[0].stop()
        servers.append(await serve_worker(worker, servers[0].address, AS_WORKER, is_shared=is_shared))

        async def updates() -> Sequence[GenerateUpdate]:
            return [update async for update in client.serve(generate_call(prompt=LONG))]

        assert await after_restart(updates)
        assert [call[1].prompt_token_ids for call in worker.calls] == [*prompts, LONG]
        assert all(call[1].told is None for call in worker.calls)
        servers.append(await serve_router(router, ANY_PORT, AS_ROUTER))
        asking = RouterClient(servers[-1].address, AS_GATEWAY, prompts=caller)
        for prompt in prompts:
            assert isinstance(await asking.pair(pair_call(prompt)), PairingAnswer)
        assert [call.token_ids for call in router.calls] == prompts
        await client.close()
        await asking.close()
        for server in servers[1:]:
            await server.stop()

    run(check)
