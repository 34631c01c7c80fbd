"""Features together: a combination of them answers to the bit as the plainest engine does, or is refused by name."""

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.core.output import RequestOutput
from tandem.core.pins import Pin
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import build_engine
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import PrefixMatch
from tandem.rpc.messages import GenerateCall
from tandem.scheduler import scheduler
from tandem.scheduler.request import Request
from tests.helpers.combinations import (
    AMPLE_BYTES,
    MAX_MODEL_LEN,
    Answer,
    Ask,
    Model,
    answer_of,
    draw_asks,
    draw_model,
    draw_plan,
    is_beginning,
    plain_answers,
    plain_config,
    serve,
)
from tests.helpers.engines import least_kv_cache_bytes
from tests.helpers.handoffs import call_of
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked import led_engine
from tests.helpers.workers import Pair, at_rest, pair_of

MAX_REFUSALS = 8  # in a row
TIMEOUT_S = 120.0
LATE_S = 0.3
PIN_TTL_S = 0.5  # the workers are at rest when pins have ended
ENGINES: tuple[tuple[int, dict[str, Any]], ...] = (  # ranks, and the stages and contexts that they are divided into
    *((1, {}),) * 3,
    *((2, {}), (2, {"num_stages": 2}), (4, {"num_stages": 2})),
    *((2, {"num_contexts": 2}), (4, {"num_contexts": 2}), (3, {"num_contexts": 3})),
    (4, {"num_stages": 2, "num_contexts": 2}),
)
WORKERS = (1, 1), (1, 1), (2, 1), (1, 2)  # ranks a stage, and stages
CONTEXTS = 1, 1, 2, 3  # of prefill workers

Serve = Callable[[random.Random, Model], None]


def seeds(num_quick: int, num_slow: int) -> list[Any]:
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_quick, num_quick + num_slow))
    return [*range(num_quick), *slow]


@pytest.fixture(autouse=True)
def _compiled() -> None:
    load_or_skip()


def check(seed: int, directory: Path, serve: Serve) -> None:
    """Draws combinations until one is served."""
    refusals = []
    for attempt in range(MAX_REFUSALS):
        rng = random.Random(f"{seed} {attempt}")
        model = draw_model(rng, directory / str(attempt))
        try:
            serve(rng, model)
        except* (ConfigurationError, CheckpointError) as group:
            refusals.append(f"{model}: {group.exceptions}")
        else:
            return
    pytest.fail("\n".join(refusals))


@pytest.mark.parametrize("seed", seeds(5, 400))
def test_an_engine_answers_as_the_plainest_one(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path, _serve_by_an_engine)


def _serve_by_an_engine(rng: random.Random, model: Model) -> None:
    asks = draw_asks(rng, 8)
    expected = plain_answers(model, asks)
    (num_ranks, sections), budget = rng.choice(ENGINES), rng.choice((16, 32, 100, 256))
    block_size, is_small = rng.choice((8, 16, 32, 64, 128)), rng.random() < 0.5
    heads = () if model.head is None else (model.head,) * 4
    drafter = rng.choice(("off", "ngram", "suffix", "known", f"draft={model.plain}", *heads))
    least = least_kv_cache_bytes(model.path, MAX_MODEL_LEN, budget, model.dtype, block_size)
    config = plain_config(
        model,
        max_num_batched_tokens=budget,
        max_num_running=8,
        block_size=block_size,
        prefix_caching=rng.random() < 0.7,
        kv_cache_bytes=least * num_ranks if is_small else AMPLE_BYTES,
        speculate="off" if drafter == "known" else drafter,
    )
    speculation = _half_right(asks, expected) if drafter == "known" else None
    plans = [draw_plan(rng, ask) for ask in asks]
    with ExitStack() as opened:
        if num_ranks == 1:
            engine = build_engine(config, speculation=speculation)
            opened.callback(engine.close)
        else:
            engine, _ = opened.enter_context(led_engine(config, num_ranks, speculation=speculation, **sections))
        answers = serve(engine, asks, plans)
    for ask, plan, found, wanted in zip(asks, plans, answers, expected, strict=True):
        is_cut = plan.leaves is not None and not plan.resumes and found[-1] is None
        assert is_beginning(found, wanted) if is_cut else found == wanted, (
            *(model, num_ranks, sections),
            *(config, ask, plan),
        )


def test_a_planted_fault_of_cached_prefixes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: few requests for a prompt's logprobs began like one that was cached, so no draw found it."""

    def find_prefix(request: Request, kv: KVCacheManager) -> PrefixMatch:
        return kv.match(request.block_hashes, request.num_tokens)

    def check_quick_seeds() -> None:
        for seed in range(5):
            check(seed, tmp_path / str(seed), _serve_by_an_engine)

    monkeypatch.setattr(scheduler, "find_prefix", find_prefix)
    with pytest.raises(AssertionError, match="is_late=True"):
        check_quick_seeds()


def _half_right(asks: list[Ask], answers: list[Answer]) -> Speculation:
    known = {tuple(ask.prompt): tokens for ask, (tokens, *_) in zip(asks, answers, strict=True)}
    return Speculation(ReplayDrafter(known, 256, 0.6), adapts=False)


@pytest.mark.parametrize("seed", seeds(3, 200))
def test_a_pair_of_workers_answers_as_the_plainest_engine(seed: int, tmp_path: Path) -> None:
    """Requests come at random moments, some with no prefill worker; some callers leave, and some of those go on."""
    check(seed, tmp_path, lambda rng, model: asyncio.run(_serve_by_a_pair(rng, model)))


async def _serve_by_a_pair(rng: random.Random, model: Model) -> None:
    asks = draw_asks(rng, 10)
    expected = plain_answers(model, asks)
    sizes = rng.choice(WORKERS), rng.choice(WORKERS)
    num_contexts = rng.choice(CONTEXTS)
    budgets = rng.choice((16, 32, 100)), rng.choice((16, 32, 100))
    heads = () if model.head is None else (model.head,) * 4
    settings: dict[str, Any] = {
        "native_kernels": True,
        "attention_backend": "auto",
        "dtype": "auto",
        "activations": model.activations,
        "max_num_running": 8,
        "block_size": rng.choice((8, 16, 32, 64)),
        "kv_cache_gib": rng.choice((2, 8)) / 1024,
        "pin_share": rng.choice((0.1, 0.5)),
        "transport": rng.choice(("inproc", "tcp", "cma", "nixl")),
        "host_kv_gib": rng.choice((0.0, 0.01)),
        "speculate": rng.choice(("off", "ngram", "suffix", f"draft={model.plain}", *heads)),
        "draft_always": True,
    }
    of_prefill, of_decode = (
        {"tp": tp, "pp": pp, "max_num_batched_tokens": budget} for (tp, pp), budget in zip(sizes, budgets, strict=True)
    )
    visits = [_draw_visit(rng, ask) for ask in asks]
    async with (
        asyncio.timeout(TIMEOUT_S),
        pair_of(model.path, prefill=of_prefill | {"cp": num_contexts}, **of_decode, **settings) as pair,
    ):
        calls = (_answer(pair, str(index), ask, visits[index]) for index, ask in enumerate(asks))
        answers = await asyncio.gather(*calls)
        await at_rest(pair.prefill, pair.decode)
    for ask, visit, found, wanted in zip(asks, visits, answers, expected, strict=True):
        is_cut = found[-1] is None and visit.num_updates is not None
        told = model, sizes, num_contexts, budgets, settings, ask, visit
        assert is_beginning(found, wanted) if is_cut else found == wanted, told


@dataclass(frozen=True, slots=True)
class Visit:
    """Course of a request to a pair: its delay, whether a prefill worker helps, and the number of updates after which
    its caller leaves (None = at the end). `resumes`: another call continues it; `pins`: prefixes to keep.
    """

    delay_s: float
    has_prefill: bool
    num_updates: int | None
    resumes: bool
    pins: tuple[Pin, ...]


def _draw_visit(rng: random.Random, ask: Ask) -> Visit:
    num_updates = rng.randrange(6) if rng.random() < 0.35 else None
    pins = (Pin(min(len(ask.prompt), 96), PIN_TTL_S),) if rng.random() < 0.4 else ()
    can_resume = ask.params.prompt_logprobs is None
    delay_s = rng.random() * 0.3 + (LATE_S if ask.is_late else 0.0)
    return Visit(delay_s, rng.random() < 0.8, num_updates, can_resume and rng.random() < 0.6, pins)


async def _answer(pair: Pair, request_id: str, ask: Ask, visit: Visit) -> Answer:
    await asyncio.sleep(visit.delay_s)
    call = call_of(
        pair,
        request_id=request_id,
        prompt_token_ids=ask.prompt,
        params=ask.params,
        salt=ask.salt,
        pins=visit.pins,
    )
    call = call if visit.has_prefill else replace(call, prefill=None)
    outputs = await _updates(pair, call, visit.num_updates)
    if visit.num_updates is None or not visit.resumes or answer_of(outputs)[-1] is not None:
        return answer_of(outputs)
    tokens, *_ = answer_of(outputs)
    again = replace(call, request_id=f"{request_id}+", output_token_ids=tuple(tokens))
    return answer_of([*outputs, *await _updates(pair, again, None)])


async def _updates(pair: Pair, call: GenerateCall, at_most: int | None) -> list[RequestOutput]:
    """Those of a call, whose caller leaves after so many."""
    stream, outputs = pair.to_decode.generate(call), []
    if at_most == 0:
        return []
    async for update in stream:
        outputs.append(update.output)
        if len(outputs) == at_most:
            await stream.aclose()
            break
    return outputs
