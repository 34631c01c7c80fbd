"""Nonsense in a message is refused, and the refusal names the field."""

import math
import struct
from array import array
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.types import FinishReason
from tandem.locality.base import PublishResult
from tandem.routing.snapshot import Role
from tandem.rpc import methods
from tandem.rpc.form import pack_token_ids, unpack_token_ids
from tandem.rpc.v1 import common_pb2, router_pb2, worker_pb2

ADDRESS = common_pb2.WorkerAddress(worker_id="w", address="h:1")
PARAMS = worker_pb2.SamplingParams()
TOKEN = pack_token_ids((1,))
SCOPE = common_pb2.CacheScope()


def generate(**changes: Any) -> worker_pb2.GenerateRequest:
    fields: dict[str, Any] = {"request_id": "r", "prompt_token_ids": TOKEN, "params": PARAMS, "scope": SCOPE}
    return worker_pb2.GenerateRequest(**(fields | changes))


def status(**changes: Any) -> common_pb2.WorkerStatus:
    state = {"worker_id": "w", "role": 1, "block_size": 1, "block_bytes": 1, "chunk_tokens": 1, "num_total_blocks": 1}
    fields: dict[str, Any] = {"worker": ADDRESS, "lifecycle": 2, "model": common_pb2.ModelInfo()}
    fields["state"] = common_pb2.WorkerState(**(state | changes.pop("state", {})))
    return common_pb2.WorkerStatus(**(fields | changes))


def answer(**output: Any) -> worker_pb2.GenerateResponse:
    return worker_pb2.GenerateResponse(output=worker_pb2.RequestOutput(**output))


def stage(**fields: Any) -> worker_pb2.GenerateResponse:
    output = worker_pb2.RequestOutput()
    return worker_pb2.GenerateResponse(output=output, timeline=[worker_pb2.Stage(**fields)])


GENERATE, UPDATE = methods.GENERATE.request, methods.GENERATE.answer
STATUS = methods.STATUS.answer
PAIR, PUBLISH = methods.PAIR.request, methods.PUBLISH.request
NONSENSE = [
    (GENERATE, generate(request_id=""), "request_id is empty"),
    (GENERATE, generate(prompt_token_ids=b"abc"), "prompt_token_ids has 3 bytes"),
    (GENERATE, generate(output_token_ids=struct.pack("<I", 2**31)), f"output_token_ids={2**31} is not a token id"),
    (GENERATE, generate(params=None), "params is missing"),
    (GENERATE, generate(params=worker_pb2.SamplingParams(temperature=math.nan)), "temperature=nan"),
    (GENERATE, generate(params=worker_pb2.SamplingParams(n=0)), "n=0"),
    (GENERATE, generate(params=worker_pb2.SamplingParams(stop=[""])), "stop holds ''"),
    (GENERATE, generate(params=worker_pb2.SamplingParams(top_k=2**31)), "top_k"),
    (GENERATE, generate(scope=None), "scope is missing"),
    (GENERATE, generate(scope=common_pb2.CacheScope(adapter=b"")), r"scope\.adapter=b'' must be"),
    (GENERATE, generate(scope=common_pb2.CacheScope(salt="s" * 257)), r"scope\.salt=.* at most 256"),
    (GENERATE, generate(spares=[common_pb2.WorkerAddress()]), "worker_id is empty"),
    (methods.WATCH.request, worker_pb2.WatchRequest(), "interval_s=0.0"),
    (methods.WATCH.request, worker_pb2.WatchRequest(interval_s=math.nan), "interval_s=nan"),
    (methods.CONFIRM.request, worker_pb2.ConfirmRequest(), "lease_id is empty"),
    (methods.LEASE.request, worker_pb2.LeaseRequest(reader=ADDRESS, lease_id="l", block_hashes=b"x"), "block_hashes"),
    (methods.LEASE.request, worker_pb2.LeaseRequest(lease_id="l"), "reader is missing"),
    (methods.GREET.request, worker_pb2.GreetRequest(), "greeting is missing"),
    (UPDATE, worker_pb2.GenerateResponse(), "output is missing"),
    (UPDATE, answer(token_ids=[2**31]), "token_ids"),
    (UPDATE, answer(metrics=worker_pb2.RequestMetrics(first_token_s=math.inf)), "first_token_s=inf"),
    (
        UPDATE,
        answer(logprobs=worker_pb2.TokenLogprobsList(positions=[worker_pb2.TokenLogprobs(logprob=math.nan)])),
        "logprob=nan",
    ),
    (
        UPDATE,
        answer(logprobs=worker_pb2.TokenLogprobsList(positions=[worker_pb2.TokenLogprobs(top_token_ids=[1])])),
        "top_logprobs has 0 entries for 1",
    ),
    (UPDATE, stage(start_s=math.nan), "start_s=nan"),
    (STATUS, worker_pb2.StatusResponse(), "status is missing"),
    (STATUS, worker_pb2.StatusResponse(status=status(lifecycle=0)), "lifecycle=0 is unknown"),
    (STATUS, worker_pb2.StatusResponse(status=status(state={"role": 7})), "role=7 is unknown"),
    (STATUS, worker_pb2.StatusResponse(status=status(state={"block_size": 0})), "block_size=0"),
    (STATUS, worker_pb2.StatusResponse(status=status(state={"reported_at_s": math.nan})), "reported_at_s=nan"),
    (STATUS, worker_pb2.StatusResponse(status=status(state={"figures_age_s": -1.0})), "figures_age_s=-1.0"),
    (
        STATUS,
        worker_pb2.StatusResponse(status=status(links=[common_pb2.LinkReport(source_id="a", latency_s=-1.0)])),
        "latency_s=-1.0",
    ),
    *(
        (
            STATUS,
            worker_pb2.StatusResponse(status=status(model=common_pb2.ModelInfo(sampling_defaults=text))),
            "sampling_defaults|number",
        )
        for text in (b"{", b"[]", b"\xff", b'{"a":NaN}', b'{"a":1e999}', b'{"a":' + b"[" * 100_000, b"9" * 5000)
    ),
    (PAIR, router_pb2.PairRequest(request_id="r", token_ids=TOKEN), "scope is missing"),
    (
        PAIR,
        router_pb2.PairRequest(request_id="r", token_ids=TOKEN, scope=SCOPE, max_ttft_ms=math.nan),
        "max_ttft_ms=nan",
    ),
    (PUBLISH, router_pb2.PublishRequest(), "worker_id is empty"),
    (
        PUBLISH,
        router_pb2.PublishRequest(worker_id="w", events=[router_pb2.BlockEvent(block_hash=b"x")]),
        "block_hash has 1 bytes",
    ),
    (
        PUBLISH,
        router_pb2.PublishRequest(worker_id="w", events=[router_pb2.BlockEvent(block_hash=bytes(32), parent_hash=b"")]),
        "parent_hash has 0 bytes",
    ),
    (methods.PUBLISH.answer, router_pb2.PublishResponse(), "result=0 is unknown"),
]


@pytest.mark.parametrize(("form", "message", "words"), NONSENSE)
def test_nonsense_is_named(form: Any, message: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        form.decode(message.SerializeToString())


def test_what_the_tests_start_from_is_no_nonsense() -> None:
    assert GENERATE.decode(generate().SerializeToString()).prompt_token_ids == array("I", (1,))
    assert STATUS.decode(worker_pb2.StatusResponse(status=status()).SerializeToString()).worker.worker_id == "w"


def test_what_is_not_said_has_its_default() -> None:
    """An empty SamplingParams means the defaults, and a zero that was said stays zero."""
    params = GENERATE.decode(generate().SerializeToString()).params
    assert (params.temperature, params.seed, params.logprobs) == (1.0, None, None)
    given = worker_pb2.SamplingParams(temperature=0.0, seed=0, logprobs=0)
    params = GENERATE.decode(generate(params=given).SerializeToString()).params
    assert (params.temperature, params.seed, params.logprobs) == (0.0, 0, 0)


def test_what_only_a_newer_release_knows_is_left_out_or_read_with_care() -> None:
    """Regression: one attribute of a new kind ended the request; one worker of a new role hid all others."""
    assert UPDATE.decode(answer(finish_reason=9).SerializeToString()).output.finish_reason is FinishReason.STOP
    (read,) = UPDATE.decode(stage(attributes={"a": worker_pb2.Attribute()}).SerializeToString()).timeline
    assert read.attributes == {}
    site = {
        "new": worker_pb2.SiteField(),
        "old": worker_pb2.SiteField(flag=True),
        "word": worker_pb2.SiteField(text=""),
    }
    greeting = worker_pb2.Greeting(worker=ADDRESS, site=site)
    told = worker_pb2.GreetRequest(greeting=greeting).SerializeToString()
    assert methods.GREET.request.decode(told).site == {"old": True, "word": ""}
    resting = worker_pb2.StatusResponse(status=status(lifecycle=9))
    assert STATUS.decode(resting.SerializeToString()).lifecycle == "draining"
    result = methods.PUBLISH.answer.decode(router_pb2.PublishResponse(result=9).SerializeToString())  # type: ignore[arg-type]
    assert result is PublishResult.RESYNC
    listed = [router_pb2.WorkerListing(status=status(state={"role": role})) for role in (7, 1)]
    told = router_pb2.WorkersResponse(workers=listed).SerializeToString()
    assert [one.status.state.role for one in methods.WORKERS.answer.decode(told)] == [Role.PREFILL]
    records = [router_pb2.WorkerRecord(worker=ADDRESS, role=role) for role in (7, 2)]  # type: ignore[arg-type]
    told = router_pb2.RegisterResponse(records=records).SerializeToString()
    assert [one.role for one in methods.REGISTER.answer.decode(told)] == [Role.DECODE]


def test_token_ids_are_packed_little_endian() -> None:
    assert pack_token_ids((1, 2**31 - 1)) == b"\x01\x00\x00\x00\xff\xff\xff\x7f"
    assert list(unpack_token_ids("ids", b"\x01\x00\x00\x00\xff\xff\xff\x7f")) == [1, 2**31 - 1]


def test_figures_whose_age_is_not_told_are_taken_for_a_little_old() -> None:
    for state, expected in (({}, 0.25), ({"figures_age_s": 0.0}, 0.0), ({"figures_age_s": 3.0}, 3.0)):
        told = worker_pb2.StatusResponse(status=status(state=state)).SerializeToString()
        assert STATUS.decode(told).state.figures_age_s == expected
