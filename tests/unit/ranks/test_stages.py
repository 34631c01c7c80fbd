"""Stages of layers as real processes: the bits of one rank, whatever the stages and the ranks of each."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ConfigurationError, EngineStoppedError, RanksLostError
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.resolve import assemble, build_engine
from tandem.ranks.group import RankGroup, share_of
from tests.helpers import checkpoints
from tests.helpers.engines import drain
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.ranked import PARAMS, PROMPTS, answers, bits, ends, led_engine, ranked_config
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

SAVED = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
MANY_LAYERS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 4},
    "qwen3_moe": {"num_hidden_layers": 4},
    "deepseek_v3": {"num_hidden_layers": 4},
    "granite_hybrid": {
        "num_hidden_layers": 6,
        "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full", "linear")],
    },
}
FAMILIES = checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS | RECURRENT_BUILDERS


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


def tokens_of(outputs: list[tuple[Any, ...]]) -> list[int]:
    return [token for token_ids, *_ in outputs for token in token_ids]


def saved(path: Path, family: str, **options: Any) -> Path:
    return write_byte_tokenizer(FAMILIES[family](path, dtype="bfloat16", **SAVED | options))


@pytest.mark.parametrize(
    ("family", "width", "num_stages"),
    [
        ("qwen2", 1, 2),
        ("granite_hybrid", 1, 2),
        *(
            pytest.param(family, width, num_stages, marks=pytest.mark.slow)
            for family in (
                "qwen2",
                "qwen3",
                "qwen3_moe",
                "gpt_oss",
                "gemma3",
                "deepseek_v3",
                "nemotron_h",
                "qwen3_next",
            )
            for width in (1, 2)
            for num_stages in (2, 3)
        ),
        *(
            pytest.param(family, 4, 2, marks=pytest.mark.slow)
            for family in ("qwen2", "qwen3_moe", "deepseek_v3", "granite_hybrid")
        ),
        pytest.param("granite_hybrid", 2, 2, marks=pytest.mark.slow),
        ("deepseek_v3", 2, 2),
    ],
)
def test_stages_have_the_bits_of_one_rank(tmp_path: Path, family: str, width: int, num_stages: int) -> None:
    path = saved(tmp_path, family)
    is_drafted = family == "qwen2"
    compared = answers if is_drafted else bits
    config = ranked_config(path, speculate="ngram" if is_drafted else "off")
    expected = compared(build_engine(ranked_config(path)))
    with led_engine(config, width * num_stages, num_stages=num_stages) as (engine, _):
        assert compared(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", MANY_LAYERS)
@pytest.mark.parametrize(("width", "num_stages"), [(1, 4), (2, 4), (4, 4)])
def test_four_stages_have_the_bits_of_one_rank(tmp_path: Path, family: str, width: int, num_stages: int) -> None:
    """Of four layers, of a hybrid six: some stages have states of one kind alone."""
    path = saved(tmp_path, family, **MANY_LAYERS[family])
    expected = bits(build_engine(ranked_config(path)))
    with led_engine(ranked_config(path), width * num_stages, num_stages=num_stages) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.parametrize("num_stages", [2, 3])
def test_each_stage_carries_its_states_on_behind_right_drafts(tmp_path: Path, num_stages: int) -> None:
    """In micro-batches, of which some have drafts."""
    path = saved(tmp_path, "granite_hybrid")
    expected = answers(build_engine(ranked_config(path)))
    tokens = {key: tokens_of(outputs) for key, outputs in expected.items()}
    known = {tuple(PROMPTS[name]): tokens[name, 0] for name in ("greedy", "sampled", "drafted")}
    half_right = Speculation(ReplayDrafter(known, 256, 0.6), adapts=False)
    with led_engine(ranked_config(path), num_stages, num_stages=num_stages, speculation=half_right) as (engine, _):
        found = answers(engine)
        assert {key: tokens_of(outputs) for key, outputs in found.items()} == tokens
        assert 10 < engine.counters.num_accepted < engine.counters.num_drafted


def test_a_stage_has_the_weights_and_the_state_of_its_layers_alone(tmp_path: Path) -> None:
    """Of twice the blocks in the same memory of all ranks, each keeps half the layers; the leader has the head."""
    path = saved(tmp_path, "qwen2", num_hidden_layers=4)
    config = ranked_config(path, kv_cache_bytes=1 << 20)
    alone = assemble(config)
    group = RankGroup(share_of(config, 2), 2, num_stages=2)
    try:
        assembly = assemble(share_of(config, 2), ranks=group)
        num_parts, num_blocks, page_bytes = assembly.pages.pages.shape
        assert (num_parts, 2 * page_bytes) == (2, alone.arena.layout.page_bytes)
        assert num_blocks == alone.arena.num_pages
        assert [len(assembly.pages.ranked.layout_of(rank).groups[0].layers) for rank in (0, 1)] == [2, 2]
        names = {tensor.name for tensor in assembly.model.tensors()}
        assert names < {tensor.name for tensor in alone.model.tensors()} | {"lm_head.weight"}
        assert not any(name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1.")) for name in names)
        assembly.engine.close()
    finally:
        group.close()


@pytest.mark.parametrize("lost", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_group_of_stages_is_formed_anew_with_the_kv_of_the_one_before(tmp_path: Path, lost: int) -> None:
    """Of two ranks of two stages: the leader's neighbour, and both of the first stage; killed within a step."""
    path = saved(tmp_path, "qwen2")
    config = ranked_config(path)
    with led_engine(config, 4 if lost > 1 else 2, num_stages=2) as (engine, group):
        engine.add_request(PROMPTS["choices"], PARAMS["greedy"], request_id="before")
        expected = drain(engine)["before", 0]
        engine.add_request(PROMPTS["sampled"], PARAMS["sampled"], request_id="lost")
        for _ in range(4):
            engine.step()
        os.kill(group.process_ids[lost], signal.SIGKILL)
        with pytest.raises(RanksLostError, match=f"rank {lost} of") as error:
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


def test_a_stage_that_hangs_ends_the_step_by_a_deadline_and_every_rank_logs_whom_it_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of three stages the first is stopped: the second waits for its stream, and the last for the second's. Between
    stages six times the deadline of exchanges within one passes, less than the silence by which a rank is given up.
    """
    path = saved(tmp_path, "qwen2", num_hidden_layers=3)
    with led_engine(ranked_config(path), 3, num_stages=3, deadline_s=0.2) as (engine, group):
        engine.add_request(PROMPTS["greedy"], PARAMS["greedy"])
        engine.step()
        os.kill(group.process_ids[2], signal.SIGSTOP)
        with pytest.raises(EngineStoppedError, match=r"rank 1 of 3 (did not take part within 1\.2 s: step|has ended)"):
            drain(engine)
        assert ends(group.process_ids[1])
    words = r"rank 1: ends: rank 2 of 3 did not take part within 1\.2 s: step \d+, exchange 1 of .*, as rank 1 saw it"
    assert re.search(words, capfd.readouterr().err)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"speculate": "mtp"}, r"speculate='mtp' is not served with pp above 1 yet; use ngram, .* or pp=1"),
        ({"native_kernels": False}, r"pp=2 needs the compiled kernels"),
        ({"attention_backend": "reference"}, r"pp=2 needs the native attention backend"),
    ],
)
def test_what_stages_cannot_serve_is_refused_by_name(tmp_path: Path, overrides: dict[str, Any], words: str) -> None:
    config = ranked_config(saved(tmp_path, "qwen2"), **overrides)
    with pytest.raises(ConfigurationError, match=words), led_engine(config, 2, num_stages=2):
        pass
