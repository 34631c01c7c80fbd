"""One request over two engines: one computes the prompt under a lease, the other takes its blocks and goes on."""

import random
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.kvcache.manager import HoldKind
from tandem.scheduler.output import KVComputed, SampledToken
from tandem.scheduler.request import Handoff
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, MORE_BUILDERS, family_params
from tests.helpers.engines import serve_alone
from tests.helpers.handoff import Side, copy_blocks, hand_off, prefill
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.tokenizers import write_byte_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=1.0, top_p=0.95, seed=5, max_tokens=12, presence_penalty=0.5, min_tokens=6, logprobs=2
)
FAMILIES = BUILDERS | EXPERT_BUILDERS | MORE_BUILDERS
CHUNKED = {"max_num_batched_tokens": 32, "max_num_running": 16, "block_size": 8, "kv_cache_bytes": 2 << 20}


@pytest.fixture(scope="module", params=family_params(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_tokenizer(BUILDERS["llama"](tmp_path_factory.mktemp("llama")))


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(6, 199) for _ in range(num_tokens)]


def alone(path: Path, prompt: list[int], params: SamplingParams) -> list[int]:
    return serve_alone(path, {"r": prompt}, {"r": params})["r"]


def assert_idle(side: Side) -> None:
    usage = side.engine.kv_usage
    assert (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
    side.engine.check()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 61, 96])
def test_tokens_are_those_of_one_engine(model: Path, params: SamplingParams, num_tokens: int) -> None:
    source, destination = Side(model, **CHUNKED), Side(model, **CHUNKED)
    prompt = prompt_of(num_tokens)
    assert hand_off(source, destination, prompt, params) == alone(model, prompt, params)
    assert_idle(source)
    assert_idle(destination)


@pytest.mark.parametrize("num_chunks", [0, 1, 2])
def test_what_does_not_arrive_is_computed(model: Path, num_chunks: int) -> None:
    source, destination = Side(model, **CHUNKED), Side(model, **CHUNKED)
    prompt = prompt_of(90)
    assert hand_off(source, destination, prompt, SAMPLED, num_chunks=num_chunks) == alone(model, prompt, SAMPLED)
    assert_idle(source)
    assert_idle(destination)


@pytest.mark.parametrize(("at_source", "at_destination"), [(40, 0), (0, 40), (40, 24), (24, 40), (88, 88), (90, 90)])
def test_prefixes_held_on_either_side_are_used(model: Path, at_source: int, at_destination: int) -> None:
    source, destination = Side(model, **CHUNKED), Side(model, **CHUNKED)
    prompt = prompt_of(90)
    for side, held in ((source, at_source), (destination, at_destination)):
        if held:
            side.engine.add_request(prompt[:held], SamplingParams(temperature=0.0, max_tokens=1))
            side.run()
    assert hand_off(source, destination, prompt, GREEDY) == alone(model, prompt, GREEDY)
    assert_idle(source)
    assert_idle(destination)


def test_only_missing_blocks_are_to_be_fetched(llama: Path) -> None:
    source, destination = Side(llama, **CHUNKED), Side(llama, **CHUNKED)
    prompt = prompt_of(90)
    destination.engine.add_request(prompt[:41], SamplingParams(temperature=0.0, max_tokens=1))
    destination.run()
    destination.engine.add_request(prompt, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=90))
    destination.step()
    reserved = destination.reserved()
    assert reserved.num_held_tokens == 40
    assert [(group.first_index, len(group.block_ids)) for group in reserved.groups] == [(5, 7)]
    assert copy_blocks(source, prefill(source, prompt, GREEDY), destination, reserved) == 7


@pytest.mark.parametrize("num_chunks", [None, 0, 1, 2])
@pytest.mark.parametrize("family", ["gpt_oss", "gemma3", "granite_hybrid"])
def test_a_beginning_that_layers_of_every_token_hold_is_not_fetched_again(
    family: str, num_chunks: int | None, tmp_path: Path
) -> None:
    """Regression: where other layers have a window or a state, each prompt's common beginning was sent anew."""
    path = write_byte_tokenizer((BUILDERS | EXPERT_BUILDERS | MORE_BUILDERS | RECURRENT_BUILDERS)[family](tmp_path))
    source, destination = Side(path, **CHUNKED), Side(path, **CHUNKED)
    beginning = prompt_of(51)
    first, second = (beginning + prompt_of(39, seed) for seed in (1, 2))
    layout = destination.engine.kv.layout
    growing = [group for group, found in enumerate(layout.groups) if not found.spec.is_bounded]
    assert growing
    assert layout.is_bounded
    assert hand_off(source, destination, first, GREEDY) == alone(path, first, GREEDY)
    assert hand_off(source, destination, second, GREEDY, num_chunks=num_chunks) == alone(path, second, GREEDY)
    reserved = destination.reserved()
    assert reserved.num_held_tokens == 0
    for group in growing:
        assert (reserved.groups[group].first_index, len(reserved.groups[group].block_ids)) == (6, 6)
    assert_idle(source)
    assert_idle(destination)


@pytest.mark.parametrize("family", ["gpt_oss", "granite_hybrid"])
def test_a_beginning_that_arrives_is_shared_before_the_rest_has_come(family: str, tmp_path: Path) -> None:
    """The second prompt waits for the beginning, which the first one's worker sends, and then fetches only its rest."""
    path = write_byte_tokenizer((EXPERT_BUILDERS | RECURRENT_BUILDERS)[family](tmp_path))
    source, destination = Side(path, **CHUNKED), Side(path, **CHUNKED)
    prompts = {name: prompt_of(64) + prompt_of(26, seed) for seed, name in enumerate(("first", "second"), 1)}
    for name, prompt in prompts.items():
        handoff = Handoff(num_expected_tokens=90)
        destination.engine.add_request(prompt, GREEDY, request_id=name, handoff=handoff)
        destination.step()
    reserved = {"first": destination.reserved()}
    assert reserved["first"].request_id == "first", "the second one does not wait"
    chunks = prefill(source, prompts["first"], GREEDY)
    copy_blocks(source, chunks[:1], destination, reserved["first"])
    destination.engine.note_kv_offered("first", chunks[0].num_tokens)
    destination.step()
    assert destination.reserved().request_id == "first", "the second one waits for less than both have in common"
    copy_blocks(source, chunks[1:2], destination, reserved["first"])
    destination.engine.note_kv_offered("first", chunks[1].num_tokens)
    destination.step()
    reserved["second"] = destination.reserved()
    for group, found in enumerate(destination.engine.kv.layout.groups):
        if not found.spec.is_bounded:
            assert reserved["second"].groups[group].first_index == 8
    tokens = {"first": source.token_ids("prefill")[0]}
    copy_blocks(source, chunks[2:], destination, reserved["first"])
    source.engine.kv.drop("lease")
    copy_blocks(source, prefill(source, prompts["second"], GREEDY), destination, reserved["second"])
    source.engine.kv.drop("lease")
    tokens["second"] = source.token_ids("prefill")[0]
    for name in prompts:
        destination.outputs += destination.engine.accept_token(name, SampledToken(tokens[name]))
        destination.engine.note_kv_ended(name, 90)
        destination.engine.kv.drop(reserved[name].fetch_id)
    destination.run()
    for name, prompt in prompts.items():
        assert destination.token_ids(name) == alone(path, prompt, GREEDY)
    assert_idle(destination)


def test_chunks_are_leased_while_the_prompt_is_computed(llama: Path) -> None:
    source = Side(llama, **CHUNKED)
    chunks = prefill(source, prompt_of(90), GREEDY)
    assert [(chunk.num_tokens, chunk.is_last) for chunk in chunks] == [(32, False), (64, False), (90, True)]
    assert [len(chunk.groups[0].block_ids) for chunk in chunks] == [4, 4, 4]
    assert source.engine.kv_usage.leased == 12


def test_a_cached_prefix_is_leased_before_the_first_step_ends(llama: Path) -> None:
    source = Side(llama, **CHUNKED)
    prompt = prompt_of(90)
    source.engine.add_request(prompt[:64], SamplingParams(temperature=0.0, max_tokens=1))
    source.run()
    chunks = prefill(source, prompt, GREEDY)
    assert [chunk.num_tokens for chunk in chunks] == [64, 90]


def test_leased_blocks_are_not_reused_before_the_lease_ends(llama: Path) -> None:
    source = Side(llama, **CHUNKED | {"kv_cache_bytes": 13 * 8 * 3 * 2 * 2 * 16 * 4, "max_model_len": 100})
    chunks = prefill(source, prompt_of(90), GREEDY)
    leased = source.assembly.arena.pages[[*chunks[0].groups[0].block_ids]].clone()
    source.engine.add_request(prompt_of(80, seed=1), GREEDY, request_id="other")
    source.run()
    assert source.engine.is_stalled
    assert source.token_ids("other") == []
    assert leased.equal(source.assembly.arena.pages[[*chunks[0].groups[0].block_ids]])
    source.engine.kv.drop("lease")
    source.run()
    assert len(source.token_ids("other")) == 12


def test_an_aborted_request_leaves_its_destination_pinned_until_the_transfer_is_over(llama: Path) -> None:
    destination = Side(llama, **CHUNKED)
    destination.engine.add_request(prompt_of(90), GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=90))
    destination.step()
    assert destination.engine.kv_usage.transferring == 12
    destination.engine.abort("r")
    assert destination.engine.kv_usage.transferring == 12
    destination.engine.kv.drop(destination.reserved().fetch_id)
    assert_idle(destination)


def test_a_failed_transfer_that_may_still_write_keeps_its_blocks_from_the_recomputation(llama: Path) -> None:
    destination = Side(llama, **CHUNKED)
    prompt = prompt_of(90)
    destination.engine.add_request(prompt, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=90))
    destination.step()
    pinned = list(destination.reserved().groups[0].block_ids)
    destination.engine.note_kv_ended("r", 0)
    destination.step()
    destination.assembly.arena.pages[pinned] = 255
    destination.run()
    assert destination.token_ids("r") == alone(llama, prompt, GREEDY)
    destination.engine.kv.drop(destination.reserved().fetch_id)
    assert_idle(destination)


def test_the_first_token_is_told_before_any_kv_arrives_and_only_once(llama: Path) -> None:
    destination = Side(llama, **CHUNKED)
    destination.engine.add_request(prompt_of(20), GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=20))
    destination.step()
    told = destination.engine.accept_token("r", SampledToken(77))
    assert [output.token_ids for output in told] == [(77,)]
    assert destination.engine.accept_token("r", SampledToken(78)) == []


def test_a_first_token_that_ends_the_request_frees_it_at_once(llama: Path) -> None:
    destination = Side(llama, **CHUNKED)
    params = SamplingParams(temperature=0.0, max_tokens=1)
    destination.engine.add_request(prompt_of(20), params, request_id="r", handoff=Handoff(num_expected_tokens=20))
    destination.step()
    told = destination.engine.accept_token("r", SampledToken(77))
    assert told[0].finish_reason is FinishReason.LENGTH
    destination.engine.note_kv_ended("r", 20)
    destination.engine.kv.drop(destination.reserved().fetch_id)
    assert_idle(destination)


def test_all_kv_without_the_token_costs_one_position(llama: Path) -> None:
    source, destination = Side(llama, **CHUNKED), Side(llama, **CHUNKED)
    prompt = prompt_of(64)
    destination.engine.add_request(prompt, GREEDY, request_id="r", handoff=Handoff(num_expected_tokens=64))
    destination.step()
    copy_blocks(source, prefill(source, prompt, GREEDY), destination, destination.reserved())
    destination.engine.note_kv_ended("r", 64)
    destination.run()
    assert destination.token_ids("r") == alone(llama, prompt, GREEDY)


@pytest.mark.parametrize("num_done", [1, 5, 11])
def test_an_answer_continues_on_another_engine(model: Path, num_done: int) -> None:
    whole = alone(model, prompt_of(30), SAMPLED)
    done = tuple(whole[:num_done])
    side = Side(model, **CHUNKED)
    handoff = Handoff(output_token_ids=done)
    side.engine.add_request(prompt_of(30), SAMPLED, request_id="r", handoff=handoff)
    side.run()
    assert side.token_ids("r") == whole[num_done:]
    metrics = side.outputs[-1].metrics
    assert metrics is not None
    assert metrics.num_output_tokens == len(whole) - num_done  # NOTE: its times are this engine's too


def test_an_answer_that_continues_where_it_is_cached_reads_no_more_than_its_prompt(llama: Path) -> None:
    side, prompt = Side(llama, **CHUNKED), prompt_of(30)
    side.engine.add_request(prompt, GREEDY, request_id="earlier")
    side.run()
    whole = side.token_ids("earlier")
    before = side.engine.counters.num_cached_prompt_tokens
    handoff = Handoff(output_token_ids=tuple(whole[:11]))
    side.engine.add_request(prompt, GREEDY, request_id="r", handoff=handoff)
    side.run()
    assert side.token_ids("r") == whole[11:]
    metrics = side.outputs[-1].metrics
    assert metrics is not None
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (30, 30)
    assert side.engine.counters.num_cached_prompt_tokens - before == 30


def test_an_answer_continues_over_two_engines(model: Path) -> None:
    prompt, whole = prompt_of(30), alone(model, prompt_of(30), SAMPLED)
    source, destination = Side(model, **CHUNKED), Side(model, **CHUNKED)
    done = tuple(whole[:4])
    handoff = Handoff(output_token_ids=done, num_expected_tokens=34)
    destination.engine.add_request(prompt, SAMPLED, request_id="r", handoff=handoff)
    destination.step()
    chunks = prefill(source, prompt, SAMPLED, outputs=done)
    assert source.token_ids("prefill") == whole[4:5]
    destination.outputs += destination.engine.accept_token("r", SampledToken(whole[4]))
    copy_blocks(source, chunks, destination, destination.reserved())
    destination.engine.note_kv_ended("r", 34)
    destination.run()
    assert destination.token_ids("r") == whole[4:]


def test_a_prefix_is_fetched_from_a_peer_and_the_rest_computed(model: Path) -> None:
    """Blocks that a peer holds serve another worker's prefill."""
    peer, source = Side(model, **CHUNKED), Side(model, **CHUNKED)
    prompt = prompt_of(90)
    peer.engine.add_request(prompt[:72], SamplingParams(temperature=0.0, max_tokens=1))
    peer.run()
    handoff = Handoff(num_new_tokens=1, num_expected_tokens=64, lease_id="lease")
    source.engine.add_request(prompt, GREEDY, request_id="prefill", handoff=handoff)
    source.step()
    request = source.engine._scheduler.get("prefill")
    assert request is not None
    num_blocks, groups = peer.engine.kv.hold_cached("lease", request.block_hashes[:8])
    assert num_blocks == 8
    copy_blocks(peer, [KVComputed("", "", 64, groups, False)], source, source.reserved())
    source.engine.note_kv_ended("prefill", 64)
    source.engine.kv.drop(source.reserved().fetch_id)
    peer.engine.kv.drop("lease")
    source.run()
    assert source.token_ids("prefill") == alone(model, prompt, GREEDY)[:1]
    chunks = [event for event in source.events if isinstance(event, KVComputed)]
    assert [chunk.num_tokens for chunk in chunks] == [64, 90]
    source.engine.kv.drop("lease")
    assert_idle(source)
    assert_idle(peer)


def test_two_leased_requests_that_cannot_both_stay_do_not_wait_for_each_other(llama: Path) -> None:
    side = Side(llama, **CHUNKED | {"kv_cache_bytes": 13 * 8 * 3 * 2 * 2 * 16 * 4, "max_model_len": 97})
    side.engine.add_request(prompt_of(8), GREEDY, request_id="grows", priority=-1)
    side.engine.add_request(
        prompt_of(96, seed=3), GREEDY, request_id="leased", handoff=Handoff(num_new_tokens=1, lease_id="lease")
    )
    side.run()
    ended = {output.request_id: output.finish_reason for output in side.outputs if output.finished}
    assert ended["leased"] is FinishReason.ERROR
    side.engine.kv.drop("lease")
    side.run()
    assert len(side.token_ids("grows")) == 12
    assert_idle(side)


def test_lent_blocks_leave_promises_alone(llama: Path) -> None:
    side = Side(llama, **CHUNKED | {"kv_cache_bytes": 13 * 8 * 3 * 2 * 2 * 16 * 4, "max_model_len": 100})
    side.engine.add_request(prompt_of(80), GREEDY, request_id="r")
    side.step()
    assert len(side.engine.kv.borrow("scratch", 100)) == 3
    side.run()
    assert side.engine.kv_usage.transferring == 3
    assert len(side.token_ids("r")) == 1
    side.engine.kv.drop("scratch")
    side.run()
    assert len(side.token_ids("r")) == 12
    assert_idle(side)


def test_only_blocks_in_use_can_be_held_for_free(llama: Path) -> None:
    side = Side(llama, **CHUNKED)
    with pytest.raises(AssertionError, match="in use"):
        side.engine.kv.hold("x", [3], HoldKind.TRANSFER)


@pytest.mark.parametrize(
    ("params", "handoff", "message"),
    [
        (SamplingParams(n=2), Handoff(num_expected_tokens=2), "n=2"),
        (SamplingParams(prompt_logprobs=1), Handoff(num_expected_tokens=2), "prompt_logprobs"),
        (SamplingParams(), Handoff(output_token_ids=(199,)), "199"),
        (SamplingParams(max_tokens=2), Handoff(output_token_ids=(5, 6)), "max_tokens=2"),
        (SamplingParams(), Handoff(num_expected_tokens=99), "num_expected_tokens=99"),
    ],
)
def test_handoffs_that_cannot_be_exact_are_refused(
    llama: Path, params: SamplingParams, handoff: Handoff, message: str
) -> None:
    side = Side(llama, **CHUNKED)
    with pytest.raises(InvalidRequestError, match=message):
        side.engine.add_request(prompt_of(5), params, handoff=handoff)
    assert_idle(side)
