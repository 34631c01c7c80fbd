"""Attention to chosen tokens in configurations: what is read, what is refused, and what it costs."""

from typing import Any

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.architecture.cost import ModelCost
from tandem.architecture.fields import Fields
from tandem.architecture.mixer_cost import MixerCost
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.architecture.state import IndexedLatentSpec
from tandem.core.errors import CheckpointError
from tests.unit.architecture.published.deepseek import LATENT

BY_NAME = {checkpoint.name.split("/")[1]: checkpoint.config for checkpoint in LATENT}


def read(name: str, **changes: Any) -> ModelSpec:
    fields = Fields({**BY_NAME[name], **changes}, "config.json")
    return find_family(fields).read_model(fields)


def test_deepseek_v32_keeps_an_index_key_beside_each_row() -> None:
    model = read("DeepSeek-V3.2")
    states = {layer.mixer.state("bfloat16") for layer in model.layers}
    assert states == {IndexedLatentSpec(512, 64, "bfloat16", 128)}
    state = states.pop()
    assert state is not None
    assert str(state) == "latent 512 + rotated key 64 bfloat16, index key 128"
    assert [(plane.name, plane.shape) for plane in state.planes] == [("latent", (576,)), ("index", (128,))]
    assert state.bytes_per_token == 2 * 704
    mixer = model.layers[7].mixer
    assert isinstance(mixer, SparseLatentAttentionSpec)
    assert mixer.indexer is not None
    assert (mixer.top_k, mixer.indexer.num_heads, mixer.indexer.head_dim) == (2048, 64, 128)
    assert (mixer.is_interleaved, mixer.indexer.is_interleaved) == (True, False)
    prefix = "model.layers.7.self_attn.indexer."
    assert [(tensor.name.removeprefix(prefix), tensor.shape) for tensor in mixer.indexer.tensors()] == [
        ("wq_b.weight", (8192, 1536)),
        ("wk.weight", (128, 7168)),
        ("k_norm.weight", (128,)),
        ("k_norm.bias", (128,)),
        ("weights_proj.weight", (64, 7168)),
    ]


@pytest.mark.parametrize("kind", ["indexed_attention", "deepseek_sparse_attention"])
def test_kinds_of_layers_under_both_names_change_nothing(kind: str) -> None:
    """Files saved by transformers before it renamed the kind were refused."""
    assert read("DeepSeek-V3.2", layer_types=[kind] * 61) == read("DeepSeek-V3.2")


def kinds(**changes: Any) -> str:
    """F for each layer of GLM-5 that chooses, S for each that follows."""
    mixers = [layer.mixer for layer in read("GLM-5", **changes).layers]
    return "".join("S" if isinstance(m, SparseLatentAttentionSpec) and m.indexer is None else "F" for m in mixers)


def test_layers_of_glm_5_that_follow_keep_no_index_keys() -> None:
    assert kinds() == "F" * 78
    assert kinds(index_topk_freq=4) == ("FF" + "SSSF" * 19)
    assert kinds(index_topk_freq=4, index_skip_topk_offset=3) == ("FFF" + "SSSF" * 19)[:78]
    assert kinds(index_topk_pattern="FS" * 39, index_topk_freq=4) == "FS" * 39
    model = read("GLM-5", indexer_types=["full", "shared", "shared"] * 26)
    following = model.layers[5].mixer
    assert isinstance(following, SparseLatentAttentionSpec)
    assert following.chosen_by == "model.layers.3.self_attn.indexer"
    assert "indexer" not in "".join(tensor.name for tensor in following.tensors())
    state = following.state("bfloat16")
    assert state == IndexedLatentSpec(512, 64, "bfloat16", 0)
    assert str(state) == "latent 512 + rotated key 64 bfloat16, chosen by another layer's index keys"
    assert ModelCost("glm-5", model).kv_bytes_per_token == 2 * (78 * 576 + 26 * 128)
    assert ModelCost("glm-5", model).read_bytes(32_768) == 2 * (78 * 576 * 2048 + 26 * 128 * 32_768)
    assert model.layers[4].mixer.cost.scan_flops == 0


def test_a_long_context_is_read_in_a_small_part() -> None:
    """At 32,768 tokens a sixteenth of the rows, and every index key, which is two ninths of a row."""
    sparse, dense = find_cost("deepseek-v3.2"), find_cost("deepseek-v3")
    row, key = 2 * 576, 2 * 128
    assert sparse.read_bytes(32_768) == 61 * (2048 * row + 32_768 * key)
    assert dense.read_bytes(32_768) == 61 * 32_768 * row
    assert sparse.read_bytes(2048) == dense.read_bytes(2048)
    assert sparse.kv_bytes(32_768) == 61 * 32_768 * (row + key)


def test_operations_count_what_is_scanned_and_what_is_chosen() -> None:
    cost = MixerCost(10, 100, window=4, scanned_size=3, scan_flops=7)
    assert [cost.num_read(length) for length in (3, 4, 5, 100)] == [30, 40, 40 + 15, 40 + 300]
    assert [cost.query_flops(length) for length in (4, 5)] == [400, 400 + 35]
    assert cost.prompt_flops(4) == 100 * 8
    assert cost.prompt_flops(10) == 100 * (8 + 6 * 4) + 7 * (100 - 16) / 2
    assert cost.prompt_flops(10, 6) == cost.prompt_flops(10) - cost.prompt_flops(6)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("DeepSeek-V3.2", {"index_topk": 0}, "index_topk must be an integer in [1, "),
        ("DeepSeek-V3.2", {"index_topk": "all"}, "index_topk must be an integer in [1, "),
        ("DeepSeek-V3.2", {"index_n_heads": 0}, "index_n_heads must be an integer in [1, "),
        ("DeepSeek-V3.2", {"index_head_dim": 60}, "index_head_dim must be a multiple of 8, at least the qk_rope_head_"),
        ("DeepSeek-V3.2", {"index_head_dim": 56}, "at least the qk_rope_head_dim=64 that are rotated"),
        ("DeepSeek-V3.2", {"q_lora_rank": None}, "q_lora_rank must be given: index queries are made of"),
        ("DeepSeek-V3.2", {"layer_types": ["full_attention"] * 61}, "layer_types="),
        ("DeepSeek-V3.2", {"layer_types": ["indexed_attention"] * 60}, "a list of num_hidden_layers=61 entries"),
        ("DeepSeek-V3.2", {"rope_interleave": False}, "rope_interleave=false is not served"),
        ("DeepSeek-V3.2", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of num_hidden_layers=61"),
        ("GLM-5", {"index_topk": 0}, "index_topk must be an integer in [1, "),
        ("GLM-5", {"indexer_types": ["shared"] * 78}, "indexer_types must be full in the first layer"),
        ("GLM-5", {"indexer_types": ["full"] * 77}, "indexer_types must be a list of num_hidden_layers=78 entries"),
        ("GLM-5", {"index_topk_pattern": "FX" * 39}, "index_topk_pattern must be num_hidden_layers=78 letters"),
        ("GLM-5", {"indexer_rope_interleave": False}, "indexer_rope_interleave=false is not served"),
    ],
)
def test_bad_values_are_refused_by_name(name: str, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read(name, **changes)
    assert told in str(error.value)
