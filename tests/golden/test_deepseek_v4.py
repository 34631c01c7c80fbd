"""DeepSeek-V4 as it is published: names of tensors, experts of 4 bits in an fp8 checkpoint, further modules; and the
entries that its queries choose.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.core.errors import CorruptCheckpointError
from tests.golden.test_parity import load, random_prompt, stepper
from tests.golden.test_sparse import GREEDY, KERNELS, prompt_of
from tests.helpers import checkpoints
from tests.helpers.choices import recorded_entries
from tests.helpers.engines import serve_alone
from tests.helpers.handoff import Side, hand_off
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.published_formats import FORMATS, Published, fp4_bytes, fp8, save_published
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

_PUBLISHED_NAMES = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.hc_head\.", "hc_head_"),
    (r"^model\.", ""),
    (r"^hc_head_hc_", "hc_head_"),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
)
"""From the names that `transformers` saves to DeepSeek's, where they differ."""
FORMAT = Published(
    {key: value for key, value in FORMATS["fp8 with experts of 4 bits"].config.items() if key != "expert_dtype"},
    fp8(16, 16, "scale", torch.float8_e8m0fnu),
    {"w1": fp4_bytes, "w2": fp4_bytes, "w3": fp4_bytes},
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_tiny_deepseek_v4(tmp_path_factory.mktemp("plain"), moe_intermediate_size=32)


def logits(path: Path) -> torch.Tensor:
    return stepper(load(path)).step(random_prompt(60))


def as_published(path: Path) -> Path:
    """The checkpoint with DeepSeek's names."""

    def renamed(name: str) -> str:
        for theirs, ours in _PUBLISHED_NAMES:
            name = re.sub(theirs, ours, name)
        return name

    found = {renamed(name): tensor for name, tensor in checkpoints.read_tensors(path).items()}
    assert {"embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.1.attn.kv_norm.weight"} <= found.keys()
    return checkpoints.write_tensors(path, found)


def copied(path: Path, target: Path) -> Path:
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_published_names_are_read(plain: Path, tmp_path: Path) -> None:
    assert torch.equal(logits(as_published(copied(plain, tmp_path / "published"))), logits(plain))


def test_names_of_transformers_are_read(plain: Path, tmp_path: Path) -> None:
    """In them experts are stacks."""
    copied(plain, tmp_path / "saved")
    checkpoints.load_reference(plain).save_pretrained(tmp_path / "saved", save_original_format=False)
    assert "model.layers.3.mlp.experts.gate_up_proj" in checkpoints.read_tensors(tmp_path / "saved")
    assert torch.equal(logits(tmp_path / "saved"), logits(plain))


def test_modules_that_predict_further_tokens_are_passed_over(plain: Path, tmp_path: Path) -> None:
    path = as_published(copied(plain, tmp_path / "published"))
    further = {"mtp.0.ffn.gate.weight": torch.zeros(8, 64), "mtp.0.hc_head_fn": torch.zeros(3, 192)}
    checkpoints.write_tensors(path, checkpoints.read_tensors(path) | further)
    assert torch.equal(logits(path), logits(plain))


@pytest.mark.parametrize("place", ["beside", "inside"])
def test_experts_of_4_bits_beside_fp8_have_their_numbers(plain: Path, tmp_path: Path, place: str) -> None:
    """`expert_dtype` is beside `quantization_config` in the files of V4, and inside it in later ones."""
    coded, decoded = tmp_path / "coded", tmp_path / "decoded"
    config = FORMAT.config | {"weight_block_size": [16, 16]}
    config |= {"expert_dtype": "fp4"} if place == "inside" else {}
    save_published(plain, Published(config, FORMAT.encode, FORMAT.others), coded, decoded)
    if place == "beside":
        checkpoints.edit_config(coded, expert_dtype="fp4")
    as_published(coded)
    tensors = checkpoints.read_tensors(coded)
    assert tensors["layers.2.ffn.experts.3.w2.weight"].dtype == torch.int8
    assert tensors["layers.2.attn.wkv.weight"].dtype == torch.float8_e4m3fn
    found, expected = logits(coded), logits(decoded)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("gate.tid2eid", lambda tensor: tensor.fill_(8), r"tid2eid has experts from 8 to 8, and there are 8"),
        ("hc_attn_fn", lambda tensor: tensor[:, :64].contiguous(), "hc_attn_fn has shape"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    plain: Path, tmp_path: Path, name: str, damage: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    path = copied(plain, tmp_path / "damaged")
    tensors = checkpoints.read_tensors(path)
    full = next(each for each in sorted(tensors) if each.endswith(name))
    checkpoints.write_tensors(path, tensors | {full: damage(tensors[full].clone())})
    with pytest.raises(CorruptCheckpointError, match=message):
        load(path)


@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), "native"])
def test_entries_chosen_are_the_same_in_prefill_decode_and_after_a_failover(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in `test_sparse`: token by token; handed over and gone on with; and all of it as a prompt, in chunks."""
    load_or_skip()
    path = checkpoints.save_tiny_deepseek_v4(tmp_path, vocab_size=NUM_TOKENS, eos_token_id=NUM_TOKENS - 1)
    write_byte_tokenizer(path)
    steps = {"max_num_batched_tokens": 16, "max_num_running": 16, "block_size": 8, **KERNELS[kind]}
    prompt = prompt_of(61, 1)
    with recorded_entries(monkeypatch) as record:
        answer = serve_alone(path, {"r": prompt}, {"r": GREEDY}, **KERNELS[kind])["r"]
        assert hand_off(Side(path, **steps), Side(path, **steps), prompt, GREEDY) == answer
        scored = replace(GREEDY, max_tokens=1, prompt_logprobs=0)
        assert serve_alone(path, {"r": prompt + answer[:-1]}, {"r": scored}, **steps)["r"] == answer[-1:]
    layers = {layer for layer, _ in record.by_query}
    assert len(layers) == 2, "the layers with many entries"
    everywhere = {(layer, position) for layer in layers for position in range(len(prompt + answer) - 1)}
    assert record.by_query.keys() == everywhere
    chosen = {position: found for (_, position), found in record.by_query.items()}
    assert all(len(found) == min(4, (position + 1) // 4) for position, found in chosen.items())
    assert chosen[80] != frozenset(range(4)), "it is a choice"
    assert record.num_computed > 2.2 * len(everywhere)
