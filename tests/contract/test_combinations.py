"""Features together: a combination of them answers to the bit as the plainest engine does, or is refused by name."""

import asyncio
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.engine.drafts.known import KnowingDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import build_engine
from tests.helpers.combinations import (
    AMPLE_BYTES,
    MAX_MODEL_LEN,
    Answer,
    Ask,
    Model,
    answer_of,
    draw_asks,
    draw_model,
    plain_answers,
    plain_config,
)
from tests.helpers.engines import drain, least_kv_cache_bytes
from tests.helpers.handoffs import call_of
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked import led_engine
from tests.helpers.workers import Pair, at_rest, pair_of

MAX_REFUSALS = 8  # in a row
TIMEOUT_S = 120.0

Serve = Callable[[random.Random, Model], None]


def seeds(num_quick: int, num_slow: int) -> list[Any]:
    slow = (pytest.param(seed, marks=pytest.mark.slow) for seed in range(num_quick, num_quick + num_slow))
    return [*range(num_quick), *slow]


@pytest.fixture(autouse=True)
def _compiled_and_all_guesses_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NOTE: on a busy machine no guess may be worth its check, or other ones in each run."""
    load_or_skip()
    monkeypatch.setattr("tandem.engine.resolve.Speculation", partial(Speculation, adapts=False))


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
    num_ranks, budget, block_size = rng.choice((1, 1, 2)), rng.choice((16, 32, 100, 256)), rng.choice((8, 16, 32, 64))
    drafter, is_small = rng.choice(("off", "ngram", "suffix", "known")), rng.random() < 0.5
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
    with ExitStack() as opened:
        if num_ranks == 1:
            engine = build_engine(config, speculation=speculation)
            opened.callback(engine.close)
        else:
            engine, _ = opened.enter_context(led_engine(config, num_ranks, speculation=speculation))
        for index, (prompt, params) in enumerate(asks):
            engine.add_request(prompt, params, request_id=str(index))
        found = drain(engine)
    for index, ask in enumerate(asks):
        assert answer_of(found[str(index), 0]) == expected[index], (model, config, ask)


def _half_right(asks: list[Ask], answers: list[Answer]) -> Speculation:
    known = {tuple(prompt): tokens for (prompt, _), (tokens, *_) in zip(asks, answers, strict=True)}
    return Speculation(KnowingDrafter(known, 256, 0.6), adapts=False)


@pytest.mark.parametrize("seed", seeds(3, 200))
def test_a_pair_of_workers_answers_as_the_plainest_engine(seed: int, tmp_path: Path) -> None:
    """Requests come at random moments, some with no prefill worker, and some of their callers leave."""
    check(seed, tmp_path, lambda rng, model: asyncio.run(_serve_by_a_pair(rng, model)))


async def _serve_by_a_pair(rng: random.Random, model: Model) -> None:
    asks = draw_asks(rng, 10)
    expected = plain_answers(model, asks)
    widths = rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    budgets = rng.choice((16, 32, 100)), rng.choice((16, 32, 100))
    settings: dict[str, Any] = {
        "native_kernels": True,
        "attention_backend": "auto",
        "dtype": "auto",
        "max_num_running": 8,
        "block_size": rng.choice((8, 16, 32)),
        "kv_cache_gib": rng.choice((2, 8)) / 1024,
        "transport": rng.choice(("inproc", "tcp", "cma", "nixl")),
        "host_kv_gib": rng.choice((0.0, 0.01)) if max(widths) == 1 else 0.0,
        "speculate": rng.choice(("off", "ngram", "suffix", f"draft={model.plain}")),
    }
    of_prefill = {"tp": widths[0], "max_num_batched_tokens": budgets[0]}
    plans = [(rng.random() * 0.3, rng.random() < 0.8, rng.random() < 0.15) for _ in asks]
    async with (
        asyncio.timeout(TIMEOUT_S),
        pair_of(model.path, prefill=of_prefill, tp=widths[1], max_num_batched_tokens=budgets[1], **settings) as pair,
    ):
        calls = (_answer(pair, str(index), ask, *plans[index]) for index, ask in enumerate(asks))
        answers = await asyncio.gather(*calls)
        await at_rest(pair.prefill, pair.decode)
    for ask, found, wanted in zip(asks, answers, expected, strict=True):
        assert found in (None, wanted), (model, widths, budgets, settings, ask)


async def _answer(
    pair: Pair, request_id: str, ask: Ask, delay_s: float, has_prefill: bool, leaves: bool
) -> Answer | None:
    """None = its caller has left."""
    await asyncio.sleep(delay_s)
    call = call_of(pair, request_id=request_id, prompt_token_ids=ask[0], params=ask[1])
    stream = pair.to_decode.generate(call if has_prefill else replace(call, prefill=None))
    outputs = []
    async for update in stream:
        outputs.append(update.output)
        if leaves and len(outputs) > 2:
            await stream.aclose()
            return None
    return answer_of(outputs)
