"""Clusters whose prefill and decode workers have different numbers of ranks, by real processes and their transports."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem.architecture.quantisation import read_config
from tandem.architecture.registry import find_family
from tandem.core.sampling_params import SamplingParams
from tandem.kvcache.spec import build_layout
from tests.helpers.checkpoints import Builder, save_tiny_qwen2, save_tiny_qwen3_moe
from tests.helpers.cluster import running_cluster
from tests.helpers.engines import serve_alone
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.serving_clients import Ask, complete, is_idle, timeline
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

BLOCK_SIZE = 16
FLAGS = (
    *("--kv-cache-gib", "0.01", "--max-model-len", "256", "--max-num-batched-tokens", "64"),
    *("--max-num-running", "32", "--checksum-share", "1", "--num-threads", "1"),
)
PROMPT = tuple(7 + (11 * i) % 150 for i in range(100))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=1)


Size = int | dict[str, int]  # ranks of each layer, or by flag


def flags_of(size: Size) -> dict[str, int]:
    return {"tp": size} if isinstance(size, int) else size


def check(path: Path, prefill: Size, decode: Size, transport: str, save: Builder) -> None:
    load_or_skip()
    of_prefill, of_decode = flags_of(prefill), flags_of(decode)
    sizes = {"vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1}
    model = write_byte_tokenizer(save(path / "model", dtype="bfloat16", num_key_value_heads=2, **sizes))
    expected = serve_alone(
        model, {"r": list(PROMPT)}, {"r": GREEDY}, dtype="auto", native_kernels=True, attention_backend="auto"
    )["r"]
    extra = {
        "worker": FLAGS,
        "router": ("--max-local-tokens", "0"),
        "prefill": tuple(word for flag, count in of_prefill.items() for word in (f"--{flag}", str(count))),
        "decode": tuple(word for flag, count in of_decode.items() for word in (f"--{flag}", str(count))),
    }
    with running_cluster(model, prefill=1, decode=1, transport=transport, block_size=BLOCK_SIZE, extra=extra) as found:
        request_id, (reply,) = complete(found, Ask(PROMPT, GREEDY))
        assert list(reply.token_ids) == expected
        transfers = [stage for stage in timeline(found, request_id) if stage.name == "transfer"]
        fields = read_config(model)
        whole = replace(find_family(fields).read_model(fields), dtype="bfloat16")
        layout = build_layout(whole.kv_specs, BLOCK_SIZE)
        num_copies = max(1, of_decode.get("tp", 1) // 2)  # of each of two heads
        assert sum(int(each.attributes["num_bytes"]) for each in transfers) == 7 * layout.page_bytes * num_copies
        assert {each.attributes["source_ranks"] for each in transfers} == {
            of_prefill.get("tp", 1) * of_prefill.get("pp", 1)
        }
        assert {each.attributes["transport"] for each in transfers} == {"cma" if transport == "auto" else transport}
        assert list(complete(found, Ask(PROMPT, GREEDY))[1][0].token_ids) == expected, "found in the cache"
        found.wait(lambda: is_idle(found))


@pytest.mark.parametrize(
    ("prefill", "decode", "transport", "save"), [(1, 2, "auto", save_tiny_qwen2), (2, 1, "tcp", save_tiny_qwen3_moe)]
)
def test_widths_of_their_own_give_the_tokens_of_one_rank(
    tmp_path: Path, prefill: int, decode: int, transport: str, save: Builder
) -> None:
    check(tmp_path, prefill, decode, transport, save)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_every_pair_of_widths_gives_the_tokens_of_one_rank(
    tmp_path: Path, prefill: int, decode: int, transport: str
) -> None:
    check(tmp_path, prefill, decode, transport, save_tiny_qwen2)


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4)])
def test_every_pair_of_widths_serves_experts(tmp_path: Path, prefill: int, decode: int) -> None:
    check(tmp_path, prefill, decode, "auto", save_tiny_qwen3_moe)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"pp": 2}, 1),
        (1, {"pp": 2}),
        ({"pp": 2}, {"tp": 2}),
        ({"cp": 2}, 1),
        ({"cp": 2}, {"pp": 2}),
        ({"tp": 2, "cp": 2}, {"tp": 2}),
        ({"tp": 2, "pp": 2}, {"tp": 4}),
        ({"pp": 2, "cp": 2}, {"tp": 2, "pp": 2}),
    ],
)
def test_stages_and_contexts_give_the_tokens_of_one_rank(
    tmp_path: Path, prefill: Size, decode: Size, transport: str
) -> None:
    check(tmp_path, prefill, decode, transport, save_tiny_qwen2)
