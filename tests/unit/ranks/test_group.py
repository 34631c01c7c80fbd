"""A group of ranks as real processes: the bits of one rank, and an end of the group with each of its processes."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core.errors import ConfigurationError, EngineStoppedError, RanksLostError, WorkerLostError
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.drafts.artificial import ReplayDrafter
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.ranks import ShardSizes
from tandem.engine.resolve import assemble, build_engine
from tandem.models.gguf.convert import converted
from tandem.ranks import epoch
from tandem.ranks.group import RankGroup, share_of
from tandem.ranks.heartbeat import SILENCE_S
from tandem.ranks.messages import Message, Step, pack
from tandem.scheduler.output import SchedulerOutput
from tandem.worker.ranks import recover_from, report_of
from tests.helpers import checkpoints
from tests.helpers.engines import drain, least_kv_cache_bytes
from tests.helpers.forked_ranks import forked_ranks
from tests.helpers.gguf_files import write_gguf
from tests.helpers.heads import HEAD_BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, save_published
from tests.helpers.ranked import PARAMS, PROMPTS, answers, bits, ends, led_engine, ranked_config
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

SAVED = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
FAMILIES = (
    checkpoints.BUILDERS | checkpoints.EXPERT_BUILDERS | checkpoints.MORE_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
)
WEIGHTS = "model.safetensors"
NO_RECURRENCE: dict[str, Any] = {  # experts of squared ReLUs behind maps to fewer elements, and such a block alone
    "layers_block_type": ["full_attention", "moe", "full_attention", "mlp"],
    "moe_shared_expert_intermediate_size": 64,
}


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_or_skip()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, in bfloat16, where another order of a sum shows at once."""
    path = tmp_path_factory.mktemp("qwen2")
    return write_byte_tokenizer(checkpoints.save_tiny_qwen2(path, dtype="bfloat16", **SAVED))


def test_two_ranks_have_the_bits_of_one(checkpoint: Path) -> None:
    """With drafts, and a pool so small that requests are preempted and described again."""
    room = least_kv_cache_bytes(checkpoint, 256, 32, "bfloat16")
    config = ranked_config(checkpoint, speculate="ngram", kv_cache_bytes=room)
    alone = build_engine(config)
    expected = answers(alone)
    with led_engine(config, 2) as (engine, group):
        assert answers(engine) == expected
        assert engine.counters.num_preemptions == alone.counters.num_preemptions > 0
        assert engine.counters.drafts.drafted_at == alone.counters.drafts.drafted_at != ()
        processes = list(group.process_ids.values())
    assert all(ends(process) for process in processes)


@pytest.mark.parametrize(
    "family", ["granite_hybrid", *(pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3_next", "falcon_h1"))]
)
def test_each_rank_carries_its_states_on_behind_right_drafts(family: str, tmp_path: Path) -> None:
    """The leader alone knew which drafts were right, and the states of the others stayed those before them."""
    path = write_byte_tokenizer(RECURRENT_BUILDERS[family](tmp_path, dtype="bfloat16"))
    config = ranked_config(path)
    expected = answers(build_engine(config))
    known = {tuple(PROMPTS[name]): _tokens(expected[name, 0]) for name in ("greedy", "sampled", "drafted")}
    half_right = Speculation(ReplayDrafter(known, 256, 0.6), adapts=False)
    with led_engine(config, 2, speculation=half_right) as (engine, _):
        found = answers(engine)
        assert {key: _tokens(each) for key, each in found.items()} == {k: _tokens(v) for k, v in expected.items()}
        assert {key: _logprobs(each) for key, each in found.items()} == {k: _logprobs(v) for k, v in expected.items()}
        assert 10 < engine.counters.num_accepted < engine.counters.num_drafted


def _tokens(outputs: list[tuple[Any, ...]]) -> list[int]:
    return [token for token_ids, *_ in outputs for token in token_ids]


def _logprobs(outputs: list[tuple[Any, ...]]) -> list[object]:
    """NOTE: a step with drafts tells several tokens at once."""
    return [entry for _, logprobs, *_ in outputs for entry in logprobs or ()]


def test_a_draft_model_belongs_to_the_leader(checkpoint: Path) -> None:
    """It was split: its products waited until the deadline for ranks that had none of it."""
    config = ranked_config(checkpoint, speculate=f"draft={checkpoint}")
    expected = answers(build_engine(ranked_config(checkpoint)))
    with led_engine(config, 2, deadline_s=20.0) as (engine, _):
        assert answers(engine) == expected
        assert engine.counters.num_drafted > 0


@pytest.mark.parametrize(
    ("family", "num_ranks"),
    [
        ("deepseek_v3_mtp", 2),
        pytest.param("llama_eagle", 2, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("qwen3_next_mtp", 2), ("qwen3_next_mtp", 4))),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("deepseek_v3_mtp", 4), ("llama_eagle", 4))),
    ],
)
def test_a_head_belongs_to_the_leader(tmp_path: Path, family: str, num_ranks: int) -> None:
    """The guesses of one rank: its hidden states and its output head are whole. The other ranks compute as many tokens
    to the end as a leader whose head reads all of them.
    """
    path = write_byte_tokenizer(HEAD_BUILDERS[family](tmp_path, dtype="bfloat16", vocab_size=NUM_TOKENS))
    speculate = f"eagle={path / 'eagle'}" if family == "llama_eagle" else "mtp"
    config = ranked_config(path, speculate=speculate, kv_cache_bytes=64 << 20)  # preempts nothing
    alone = build_engine(config)
    expected = answers(alone)
    with led_engine(config, num_ranks, deadline_s=20.0) as (engine, _):
        assert answers(engine) == expected
        assert engine.counters.drafts.drafted_at == alone.counters.drafts.drafted_at != ()
        assert engine.counters.drafts.accepted_at == alone.counters.drafts.accepted_at


def drained(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The last output of a request, with all tokens and logprobs."""
    request_id = engine.add_request(prompt, params)
    outputs = drain(engine)[request_id, 0]
    tokens = tuple(token for each in outputs for token in each.token_ids)
    logprobs = tuple(entry for each in outputs for entry in each.logprobs or ())
    return replace(outputs[-1], token_ids=tokens, logprobs=logprobs)


def coded(path: Path, name: str, save: checkpoints.Builder, **sizes: Any) -> Path:
    """A checkpoint whose layers have weights in that format."""
    plain = write_byte_tokenizer(save(path / "plain", dtype="bfloat16", **SAVED | sizes))
    save_published(plain, FORMATS[name], path / "coded", path / "decoded")
    return path / "coded"


@pytest.mark.parametrize("name", [None, "compressed int4 groups"])
def test_two_ranks_have_the_bits_of_one_with_experts(tmp_path: Path, name: str | None) -> None:
    """Three experts each, and a layer without any."""
    if name is None:
        path = write_byte_tokenizer(checkpoints.save_tiny_qwen3_moe(tmp_path, dtype="bfloat16", **SAVED))
    else:
        path = coded(tmp_path, name, checkpoints.save_tiny_qwen3_moe)
    expected = bits(build_engine(ranked_config(path)))
    with led_engine(ranked_config(path), 2) as (engine, group):
        assert bits(engine) == expected
        rows = group.expert_rows
        assert rows.busiest <= sum(rows.by_rank) < 2 * rows.busiest, "both ranks have some, and not the same"


@pytest.mark.parametrize("family", ["gpt_oss", "minimax_m2", "deepseek_v3", "granite_hybrid", "kimi_linear", "nsa"])
def test_two_ranks_have_the_bits_of_one_with_what_heads_share(tmp_path: Path, family: str) -> None:
    """Sinks and biases; norms over all heads together; latents, of which there is one copy; a convolution's state;
    decays of columns, with a copy of latents for each rank beside them; choices by the heads that share K and V.
    """
    path = write_byte_tokenizer(FAMILIES[family](tmp_path, dtype="bfloat16", **SAVED))
    expected = bits(build_engine(ranked_config(path)))
    with led_engine(ranked_config(path), 2) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("fp8 tensors", "float"),
        ("fp8 channels", "float"),
        ("compressed int8 channels", "float"),
        ("compressed W8A8", "float"),
        ("compressed int8 words", "int8"),
        ("compressed int4 groups", "int8"),
        ("compressed mxfp4", "float"),
        ("gptq of several kinds", "float"),
        ("gptq 2 in an order", "float"),
        ("awq", "float"),
        ("bitsandbytes nf4 nested", "float"),
    ],
)
def test_every_width_has_the_bits_of_one_with_codes(
    tmp_path: Path, name: str, activations: str, num_ranks: int
) -> None:
    """Odd numbers of blocks of inputs among them, and an order of inputs of each map's own."""
    sizes: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 640, "head_dim": 64}
    config = ranked_config(coded(tmp_path, name, checkpoints.save_tiny_llama, **sizes), activations=activations)
    expected = bits(build_engine(config))
    with led_engine(config, num_ranks) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("compressed int4 groups", "granite_hybrid"),
        ("compressed int4 groups", "qwen3_next"),
        ("compressed int4 groups", "lfm2"),
        ("compressed int4 groups", "kimi_linear"),
        ("fp8 channels", "qwen3_next"),
    ],
)
def test_two_ranks_have_the_bits_of_one_with_codes_beside_states(tmp_path: Path, name: str, family: str) -> None:
    """Maps in whose rows are parted by queries, keys and values, or lie group by group."""
    path = coded(tmp_path, name, FAMILIES[family])
    expected = bits(build_engine(ranked_config(path)))
    with led_engine(ranked_config(path), 2) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_width_has_the_bits_of_one_with_a_table_of_codes(tmp_path: Path, num_ranks: int) -> None:
    """Its head is its embedding, of which each rank has some rows twice."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    plain = checkpoints.save_tiny_llama(tmp_path / "plain", tie_word_embeddings=True, **sizes)
    path = converted(write_gguf(plain, tmp_path / "a.gguf", type_name="Q4_K"), tmp_path / "cache")
    config = ranked_config(path, dtype="bfloat16")
    expected = bits(build_engine(config))
    with led_engine(config, num_ranks) as (engine, _):
        assert bits(engine) == expected


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("mixtral", "bfloat16", {}),
        ("qwen3_moe", "float16", {}),
        ("qwen2_moe", "bfloat16", {"shared_expert_intermediate_size": 64}),
        ("glm4_moe", "bfloat16", {"moe_intermediate_size": 32}),
        ("gemma4_moe", "bfloat16", {}),
        ("nemotron_latent", "bfloat16", NO_RECURRENCE),
        ("gpt_oss", "float16", {"num_key_value_heads": 1}),
        ("olmo2", "bfloat16", {"num_key_value_heads": 2}),
        ("olmo3", "float16", {"num_key_value_heads": 4}),
        ("minimax_m2", "bfloat16", {"num_attention_heads": 8, "num_key_value_heads": 2}),
        ("deepseek_v2", "bfloat16", {}),
        ("deepseek_v3", "float16", {}),
        ("deepseek_v32", "bfloat16", {}),
        ("glm_moe_dsa", "bfloat16", {}),
        ("glm4_moe_lite", "bfloat16", {}),
        ("mistral4", "bfloat16", {}),
        ("granite_hybrid", "float16", {"mamba_n_groups": 1}),
        ("jamba", "bfloat16", {}),
        ("mamba2", "bfloat16", {}),
        ("nemotron_h", "bfloat16", {}),
        ("falcon_h1", "bfloat16", {"mamba_n_heads": 8, "mamba_d_ssm": 128}),
        ("qwen3_next", "bfloat16", {}),
        ("qwen3_5", "bfloat16", {"linear_num_key_heads": 4}),
        ("lfm2", "bfloat16", {"conv_bias": True}),
        ("lfm2_moe", "float16", {}),
        ("kimi_linear", "bfloat16", {}),
        ("minimax_m3", "bfloat16", {}),
        ("moba", "float16", {"num_key_value_heads": 2}),
        ("nsa", "bfloat16", {"num_key_value_heads": 4}),
        ("llama", "float32", {"num_key_value_heads": 4}),
        ("qwen3", "bfloat16", {}),
        ("gemma3", "float16", {}),
        ("gemma4", "bfloat16", {}),
        ("mistral", "bfloat16", {"num_attention_heads": 8, "num_key_value_heads": 1, "intermediate_size": 80}),
    ],
)
def test_every_width_has_the_bits_of_one(
    tmp_path: Path, family: str, dtype: str, options: dict[str, Any], num_ranks: int
) -> None:
    path = write_byte_tokenizer(FAMILIES[family](tmp_path, dtype=dtype, **SAVED | options))
    expected = bits(build_engine(ranked_config(path)))
    with led_engine(ranked_config(path), num_ranks) as (engine, _):
        assert bits(engine) == expected


def test_a_rank_that_is_killed_ends_the_engine_and_the_other_ranks(checkpoint: Path) -> None:
    """At once where there is no work; a step that is begun afterwards says who is lost."""
    with led_engine(ranked_config(checkpoint), 2) as (engine, group):
        lost = threading.Event()
        group.on_lost = lost.set
        first, *others = group.process_ids.values()
        os.kill(first, signal.SIGKILL)
        assert lost.wait(10)
        engine.add_request(PROMPTS["greedy"], PARAMS["greedy"])
        with pytest.raises(EngineStoppedError, match="rank 1 of 2 has ended, by signal 9"):
            drain(engine)
        group.close()
        assert all(ends(process) for process in others)


def test_a_rank_that_hangs_ends_the_step_by_its_deadline(checkpoint: Path) -> None:
    with led_engine(ranked_config(checkpoint), 2, deadline_s=1.0) as (engine, group):
        engine.add_request(PROMPTS["greedy"], PARAMS["greedy"])
        engine.step()
        (stopped,) = group.process_ids.values()
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(EngineStoppedError, match=r"rank 1 of 2 did not .* within 1 s: step \d+, exchange 1 of the"):
            drain(engine)
        with pytest.raises(RanksLostError, match=r"rank 1 of 2 (takes no messages|has stood still)"):
            group.begin_step(Step(9, SchedulerOutput((), (), ("longer than a socket holds" * 100_000,))))
    assert ends(stopped), "it is killed where it does not end"


def test_a_rank_that_stands_still_is_found_within_two_seconds_and_killed(checkpoint: Path) -> None:
    """While nothing is computed. One that computes nothing for long is no such rank."""
    with led_engine(ranked_config(checkpoint), 2) as (_, group):
        lost = threading.Event()
        group.on_lost = lost.set
        assert not lost.wait(2 * SILENCE_S)
        (stopped,) = group.process_ids.values()
        began_s = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        assert lost.wait(10)
        assert time.monotonic() - began_s < 2.5, "two seconds, and what a busy machine takes"
        with pytest.raises(RanksLostError, match=r"rank 1 of 2 has stood still for 1\.5 s"):
            group.check()
        assert ends(stopped)


def test_a_rank_that_stands_still_before_it_is_ready_is_killed(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its leader waited for it for ever."""
    monkeypatch.setattr(epoch, "START_SILENCE_S", 1.0)
    with forked_ranks():
        group = RankGroup(share_of(ranked_config(checkpoint), 2), 2)
        try:
            (stopped,) = group.process_ids.values()
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(ConfigurationError, match=r"^rank 1 has ended before it could serve, by signal 9"):
                group.prepare("", ShardSizes(2, 64, 1))
            assert ends(stopped)
        finally:
            group.close()


@pytest.mark.parametrize("family", ["qwen2", pytest.param("granite_hybrid", marks=pytest.mark.slow)])
def test_a_group_that_is_formed_anew_has_the_kv_of_the_one_before(tmp_path: Path, family: str) -> None:
    """A rank is killed within a step: what was cached is found again, with the bits of one rank."""
    path = write_byte_tokenizer(FAMILIES[family](tmp_path, dtype="bfloat16", **SAVED))
    config, prompt, params = ranked_config(path), PROMPTS["choices"], PARAMS["greedy"]
    with led_engine(config, 2) as (engine, group):
        expected = drained(engine, prompt, params)
        engine.add_request(PROMPTS["sampled"], PARAMS["sampled"], request_id="lost")
        for _ in range(4):
            engine.step()
        (first,) = group.process_ids.values()
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RanksLostError, match="rank 1 of 2") as lost:
            drain(engine)
        engine.abort("lost")
        engine.recover(lost.value)
        assert [*group.process_ids.values()] != [first]
        again = drained(engine, prompt, params)
        assert (again.token_ids, again.logprobs) == (expected.token_ids, expected.logprobs)
        assert again.metrics is not None
        assert again.metrics.num_cached_tokens >= 64
        assert answers(engine) == answers(build_engine(config))
        engine.check()


@pytest.mark.slow
def test_groups_that_end_before_their_first_step_are_given_up(checkpoint: Path) -> None:
    with led_engine(ranked_config(checkpoint), 2) as (_, group):
        group.renew()
        group.renew()
        with pytest.raises(RanksLostError, match="3 groups of ranks in a row have ended before their first step"):
            group.renew()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_rank_ends_streams_and_the_engine_serves_on(checkpoint: Path, number: signal.Signals) -> None:
    """Nobody is told of a lost stream before the worker says that it recovers."""
    config = ranked_config(checkpoint)
    expected = drained(build_engine(config), PROMPTS["greedy"], PARAMS["greedy"])
    told: list[object] = []

    async def run(engine: Engine, group: RankGroup) -> list[int]:
        serving = AsyncEngine(engine)
        serving.on_recovering = told.append
        recover_from(group, serving)
        async with asyncio.timeout(60), serving:
            stream = serving.generate(PROMPTS["sampled"], PARAMS["sampled"])
            try:
                async for output in stream:
                    if output.token_ids and not told:
                        told.append("token")
                        os.kill(next(iter(group.process_ids.values())), number)
            except WorkerLostError as error:
                told.append(str(error))
            return [t async for o in serving.generate(PROMPTS["greedy"], PARAMS["greedy"]) for t in o.token_ids]

    group = RankGroup(share_of(config, 2), 2)
    try:
        engine = assemble(share_of(config, 2), ranks=group).engine
        assert asyncio.run(run(engine, group)) == [*expected.token_ids]
    finally:
        group.close()
    assert told[:2] == ["token", True]
    assert sorted(map(str, told[2:]))[0] == "False"
    assert any("the ranks of this worker are formed anew: rank 1 of 2" in str(each) for each in told[2:])


def test_a_step_without_logits_ends_when_every_rank_has_written_its_kv(tmp_path: Path) -> None:
    """Regression: the last layer of a prompt has no exchange behind its KV, so the leader told of blocks that another
    rank had yet to write, and other workers read what had been there before.
    """
    path = write_byte_tokenizer(checkpoints.save_tiny_qwen2(tmp_path, vocab_size=NUM_TOKENS, num_hidden_layers=1))
    with led_engine(ranked_config(path), 2, deadline_s=1.0) as (engine, group):
        (stopped,) = group.process_ids.values()
        os.kill(stopped, signal.SIGSTOP)
        engine.add_request(PROMPTS["sampled"], PARAMS["sampled"])
        with pytest.raises(EngineStoppedError, match=r"rank 1 of 2 did not .* within 1 s: step 1, exchange 1 of the"):
            engine.step()


def test_ranks_end_with_their_leader(checkpoint: Path) -> None:
    """Killed, it tells nobody; one of them is in an exchange then that would last much longer."""
    lines = (
        "import sys, threading",
        "from pathlib import Path",
        "from tandem.scheduler.output import ScheduledRequest, SchedulerOutput, NewBlocks",
        "from tandem.ranks.messages import Step",
        "from tests.helpers.ranked import led_engine, ranked_config",
        "with led_engine(ranked_config(Path(sys.argv[1])), 2, are_forked=False) as (engine, group):",
        "    work = ScheduledRequest('a', 0, [5, 6], samples=True, blocks=NewBlocks(((1,),), (0,)))",
        "    group.begin_step(Step(1, SchedulerOutput((), (work,), ())))",
        "    print(*group.process_ids.values(), flush=True)",
        "    threading.Event().wait()",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(checkpoint)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout is not None
        rank = int(leader.stdout.readline())
        leader.kill()
    assert ends(rank)


def damage_weights(path: Path) -> None:
    """A file of its own: others have mapped the whole one."""
    whole = (path / WEIGHTS).read_bytes()
    (path / WEIGHTS).unlink()
    (path / WEIGHTS).write_bytes(whole[:10_000])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(
            lambda path: None, "attention_backend='other' is unknown", marks=pytest.mark.slow, id="unknown setting"
        ),
        pytest.param(
            damage_weights,
            rf"/{WEIGHTS} is damaged or incomplete \(.*\); download it again",
            id="damaged weights",
        ),
        pytest.param(
            lambda path: (path / WEIGHTS).unlink(), "has no weights: .* is needed, found config", id="missing weights"
        ),
    ],
)
def test_what_a_rank_refuses_is_said_by_the_leader(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    """Before it serves; its own files are whole."""
    path = shutil.copytree(checkpoint, tmp_path / "model")
    damage(path)
    config = ranked_config(path, attention_backend="other" if words.startswith("attention") else "auto")
    with forked_ranks():
        group = RankGroup(share_of(config, 2), 2)
        try:
            with pytest.raises(ConfigurationError, match=f"^rank 1: .*{words}"):
                group.prepare("", ShardSizes(2, 64, 1))
        finally:
            group.close()


def test_a_group_is_not_formed_anew_with_weights_that_are_damaged_meanwhile(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    with led_engine(ranked_config(path), 2) as (_, group):
        damage_weights(path)
        with pytest.raises(ConfigurationError, match=rf"^rank 1: .*/{WEIGHTS} is damaged or incomplete"):
            group.renew()


def test_ranks_share_one_copy_of_latents_and_its_memory(tmp_path: Path) -> None:
    """Two ranks have twice the blocks of half the memory: as many as one."""
    path = write_byte_tokenizer(FAMILIES["deepseek_v3"](tmp_path, **SAVED))
    config = ranked_config(path, kv_cache_bytes=1 << 20)
    alone = assemble(config)
    group = RankGroup(share_of(config, 2), 2)
    try:
        assembly = assemble(share_of(config, 2), ranks=group)
        assert assembly.pages.pages.shape == alone.pages.pages.shape
        assembly.engine.close()
    finally:
        group.close()


def test_each_rank_is_told_with_when_it_was_last_heard(checkpoint: Path) -> None:
    with led_engine(ranked_config(checkpoint), 2) as (_, group):
        report = report_of(group)
        assert report is not None
        assert report.pids == (os.getpid(), group.process_ids[1])
        assert (report.hosts, report.silent_s[0]) == ((), 0.0)
        assert 0.0 <= report.silent_s[1] < SILENCE_S


def test_a_step_is_packed_once_for_all_ranks(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Message] = []

    def noted(message: Message) -> bytes:
        packed.append(message)
        return pack(message)

    with led_engine(ranked_config(checkpoint), 4) as (engine, _):
        monkeypatch.setattr(epoch, "pack", noted)
        engine.add_request(PROMPTS["greedy"], PARAMS["greedy"], request_id="a")
        num_steps = 0
        while engine.has_work:
            num_steps += bool(engine.step())
    numbers = [message.number for message in packed if isinstance(message, Step)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= num_steps > 0


def test_threads_and_memory_of_a_worker_are_shared_by_its_ranks(checkpoint: Path) -> None:
    config = ranked_config(checkpoint, num_threads=6, kv_cache_bytes=1 << 20)
    share = share_of(config, 4)
    assert (share.num_threads, share.kv_cache_bytes) == (1, 1 << 18)
    assert share_of(ranked_config(checkpoint, num_threads=None), 1).num_threads == torch.get_num_threads()
