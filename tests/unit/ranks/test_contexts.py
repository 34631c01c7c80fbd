"""Contexts as real processes: each computes a part of the tokens of prompts, with the bits of one rank."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.compute.native.exchange import SharedPipe
from tandem.core.errors import ConfigurationError, RanksLostError
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import assemble, build_engine
from tandem.ranks.group import RankGroup, share_of
from tests.helpers import checkpoints
from tests.helpers.engines import drain
from tests.helpers.heads import HEAD_BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked import PARAMS, PROMPTS, answers, bits, led_engine, ranked_config
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

SAVED = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
FAMILIES = (
    checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
)
SIZES = (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)  # contexts, and the ranks of each
OF_EACH_KIND = "qwen2", "qwen3_moe", "deepseek_v3", "granite_hybrid"


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


def saved(path: Path, family: str, **options: Any) -> Path:
    return write_byte_tokenizer(FAMILIES[family](path, dtype="bfloat16", **SAVED | options))


def check(path: Path, num_contexts: int, width: int, num_stages: int = 1, **overrides: Any) -> None:
    """Of prompts of 30 to 154 tokens in chunks of up to 100; several in a step, some of them too short to divide."""
    config = ranked_config(path, **{"max_num_batched_tokens": 100} | overrides)
    expected = bits(build_engine(config))
    num_ranks = num_contexts * num_stages * width
    with led_engine(config, num_ranks, num_contexts=num_contexts, num_stages=num_stages) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.parametrize(
    ("family", "num_contexts", "width"),
    [
        ("qwen2", 2, 1),
        ("granite_hybrid", 2, 1),
        *(
            pytest.param(family, *size, marks=pytest.mark.slow)
            for family in OF_EACH_KIND
            for size in SIZES
            if (family, *size) not in {("qwen2", 2, 1), ("granite_hybrid", 2, 1)}
        ),
        *(pytest.param(family, 2, 1, marks=pytest.mark.slow) for family in sorted(FAMILIES.keys() - set(OF_EACH_KIND))),
    ],
)
def test_contexts_have_the_bits_of_one_rank(tmp_path: Path, family: str, num_contexts: int, width: int) -> None:
    check(saved(tmp_path, family), num_contexts, width)


@pytest.mark.parametrize(
    ("family", "num_contexts", "width"),
    [
        ("granite_hybrid", 2, 1),
        *(
            pytest.param(family, *size, marks=pytest.mark.slow)
            for family in OF_EACH_KIND
            for size in ((2, 1), (2, 2), (4, 1))
            if (family, *size) != ("granite_hybrid", 2, 1)
        ),
        *(
            pytest.param(family, 2, 1, marks=pytest.mark.slow)
            for family in ("gpt_oss", "gemma3", "nemotron_h", "qwen3_next")
        ),
    ],
)
def test_contexts_within_stages_have_the_bits_of_one_rank(
    tmp_path: Path, family: str, num_contexts: int, width: int
) -> None:
    """Of two stages, so that a chunk is also in two micro-batches."""
    check(saved(tmp_path, family), num_contexts, width, num_stages=2)


def test_each_context_has_its_part_of_every_layer_and_all_share_one_state(tmp_path: Path) -> None:
    """Turns in three chunks of 60 tokens, in one of 15, which is shorter than two blocks, and in a decode step."""
    path = saved(tmp_path, "qwen2", num_hidden_layers=4)
    config = ranked_config(path, max_num_batched_tokens=60, prefix_caching=False)
    alone = assemble(config)
    share = share_of(config, 2)
    group = RankGroup(share, 2, num_contexts=2)
    try:
        assembly = assemble(share, ranks=group)
        assert (group.stages, group.contexts) == ((0, 0), (1, 0))
        assert assembly.pages.pages.shape == (1, *alone.arena.pages.shape)
        engine, earlier = assembly.engine, group.links.earlier
        assert isinstance(earlier, SharedPipe)
        engine.add_request([7 + i % 90 for i in range(195)], PARAMS["greedy"], request_id="long")
        turns = []
        for _ in range(5):
            taken = earlier.num_exchanges
            engine.step()
            turns.append(earlier.num_exchanges - taken)
        assert turns == [4, 4, 4, 0, 0]
        engine.close()
    finally:
        group.close()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_drafts_are_computed_where_their_request_is_decoded(tmp_path: Path, num_stages: int) -> None:
    """Beside prompts that are divided; the others carried states on behind drafts that they had never computed."""
    path = saved(tmp_path, "granite_hybrid")
    expected = answers(build_engine(ranked_config(path)))
    known = {tuple(PROMPTS[name]): tokens_of(expected[name, 0]) for name in ("greedy", "sampled", "drafted")}
    half_right = Speculation(ReplayDrafter(known, 256, 0.6), adapts=False)
    config = ranked_config(path, max_num_batched_tokens=100)
    with led_engine(config, 4, num_stages=num_stages, num_contexts=2, speculation=half_right) as (engine, _):
        found = answers(engine)
        assert {key: tokens_of(outputs) for key, outputs in found.items()} == {
            key: tokens_of(outputs) for key, outputs in expected.items()
        }
        assert 10 < engine.counters.num_accepted < engine.counters.num_drafted


def tokens_of(outputs: Sequence[tuple[Any, ...]]) -> list[int]:
    return [token for token_ids, *_ in outputs for token in token_ids]


@pytest.mark.parametrize(
    ("lost", "num_stages"),
    [(1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 1), (3, 1), (1, 2), (2, 2), (3, 2)))],
)
def test_a_group_of_contexts_is_formed_anew_with_the_kv_of_the_one_before(
    tmp_path: Path, lost: int, num_stages: int
) -> None:
    """A rank is killed between two chunks of a prompt: the other of two ranks, or any but the leader of four."""
    path = saved(tmp_path, "qwen2")
    config = ranked_config(path, max_num_batched_tokens=48)
    num_ranks = 4 if lost > 1 or num_stages > 1 else 2
    with led_engine(config, num_ranks, num_stages=num_stages, num_contexts=2) as (engine, group):
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="before")
        expected = drain(engine)["before", 0]
        engine.add_request(PROMPTS["drafted"], PARAMS["sampled"], request_id="lost")
        engine.step()
        os.kill(group.process_ids[lost], signal.SIGKILL)
        with pytest.raises(RanksLostError, match=r"rank [123] of") as error:  # NOTE: the one that is waited for
            drain(engine)
        engine.abort("lost")
        engine.recover(error.value)
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="again")
        outputs = drain(engine)["again", 0]
        assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
        assert [each.logprobs for each in outputs] == [each.logprobs for each in expected]
        metrics = outputs[-1].metrics
        assert metrics is not None
        assert metrics.num_cached_tokens >= 64
        engine.check()


@pytest.mark.parametrize(
    ("overrides", "width", "words"),
    [
        ({"native_kernels": False}, 1, r"cp=2 needs the compiled kernels"),
        ({"attention_backend": "reference"}, 1, r"cp=2 needs the native attention backend"),
        ({"attention_backend": "reference"}, 2, r"cp=2 with tp=2 needs .* or give cp=1 and tp=1"),
    ],
)
def test_what_contexts_cannot_serve_is_refused_by_name(
    tmp_path: Path, overrides: dict[str, Any], width: int, words: str
) -> None:
    config = ranked_config(saved(tmp_path, "qwen2"), **overrides)
    with pytest.raises(ConfigurationError, match=words), led_engine(config, 2 * width, num_contexts=2):
        pass


def test_a_drafter_that_reads_the_states_of_prompts_is_refused(tmp_path: Path) -> None:
    path = write_byte_tokenizer(HEAD_BUILDERS["deepseek_v3_mtp"](tmp_path, dtype="bfloat16", vocab_size=NUM_TOKENS))
    words = r"speculate='mtp' is not served with cp above 1 yet; use ngram, suffix or draft=DIR, or cp=1"
    config = ranked_config(path, speculate="mtp")
    with pytest.raises(ConfigurationError, match=words), led_engine(config, 2, num_contexts=2):
        pass
