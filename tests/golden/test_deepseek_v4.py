"""DeepSeek-V4 as it is published: names of tensors, experts of 4 bits in an fp8 checkpoint, further modules."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.core.errors import CorruptCheckpointError
from tests.golden.test_parity import load, random_prompt, stepper
from tests.helpers import checkpoints
from tests.helpers.published_formats import FORMATS, Published, fp4_bytes, fp8, save_published

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
