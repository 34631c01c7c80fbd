"""Files of single families: what they leave out or contradict, and how their text is split."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import CheckpointError
from tandem.models.gguf.byte_level import SPLITS
from tandem.models.gguf.convert import converted
from tests.helpers.checkpoints import Builder, save_tiny_deepseek_v2, save_tiny_deepseek_v3
from tests.helpers.delta_checkpoints import save_tiny_qwen3_5
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1, save_tiny_nemotron_h

PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
V3 = partial(save_tiny_deepseek_v3, **PLAIN)
V2 = partial(save_tiny_deepseek_v2, n_group=1, topk_group=1, **PLAIN)
NEMOTRON = partial(save_tiny_nemotron_h, layers_block_type=["linear_attention", "moe", "full_attention"])
NO_GROUPS = {"deepseek2__expert_group_count": None, "deepseek2__expert_group_used_count": None}


@pytest.mark.parametrize(
    ("save", "values", "message"),
    [
        (V3, NO_GROUPS, "a number, which 8 experts do not tell"),
        (V3, {"deepseek2__expert_gating_func": 1}, r"expert_gating_func=1 with tensors blk.*.exp_probs_b.bias"),
        (V2, {"deepseek2__expert_gating_func": 2}, r"expert_gating_func=2 without tensors"),
        (V2, {"deepseek2__attention__key_length": 47}, "attention.kv_lora_rank + rope.dimension_count=48"),
        (V2, {"deepseek2__attention__head_count_kv": 2}, "1 (a latent), or attention.head_count=4"),
        (partial(save_tiny_falcon_h1, tie_word_embeddings=True), {}, "a head that is the embedding is not in GGUF"),
        (save_tiny_qwen3_5, {"qwen35__ssm__group_count": 3}, "a multiple of ssm.group_count=3"),
        (save_tiny_qwen3_5, {"qwen35__ssm__state_size": 8}, "4 value heads have"),
        (NEMOTRON, {"nemotron_h_moe__expert_gating_func": 1}, "expert_gating_func=1 is not served"),
    ],
)
def test_what_is_ambiguous_is_refused_by_name(tmp_path: Path, save: Builder, values: Any, message: str) -> None:
    options = (
        {"layers_block_type": ["linear_attention", "moe", "full_attention"]} if save is save_tiny_nemotron_h else {}
    )
    file = write_gguf(save(tmp_path / "tiny", **options), tmp_path / "a.gguf", **values)
    with pytest.raises(CheckpointError) as caught:
        converted(file, tmp_path / "cache")
    assert message in str(caught.value)


TEXT = "12345 don't 東京タワー naïve +foo(x)\n\n  end"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("glm4", ["123", "45", " don", "'t", " 東京タワー", " naïve", " +", "foo", "(x", ")\n\n", " ", " end"]),
        (
            "deepseek-v3",
            ["123", "45", " don", "'t", " ", "東京タワー", " naïve", " +", "foo", "(x", ")\n\n", " ", " end"],
        ),
        ("kimi-k2", ["123", "45", " don't", " ", "東京", "タワー", " naïve", " +", "foo", "(x", ")\n\n", " ", " end"]),
    ],
)
def test_splits_that_transformers_does_not_know(name: str, pieces: list[str]) -> None:
    """By the patterns of the published tokenizers."""
    split = SPLITS[name].before()
    assert [TEXT[start:end] for _, (start, end) in split.pre_tokenize_str(TEXT)] == pieces
