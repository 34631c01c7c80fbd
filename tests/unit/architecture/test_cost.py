from dataclasses import replace

import pytest

from tandem.architecture.catalogue import catalogue_names, find_cost
from tandem.architecture.cost import ModelCost
from tandem.architecture.entry_mixers import EntryAttentionSpec
from tandem.architecture.mixers import BlockMixer
from tandem.architecture.recurrent_mixers import RecurrentMixer
from tandem.architecture.sparse_mixers import SparseLatentAttentionSpec
from tandem.routing.speed import PrefillWork
from tests.helpers.specs import attention_of

PAIR_FLOPS, KV_LAYER_BYTES = 4 * 16 * 128, 2 * 8 * 128 * 2  # of qwen3-0.6b


def windowed(*windows: int | None) -> ModelCost:
    """qwen3-0.6b with one layer for each window."""
    cost = find_cost("qwen3-0.6b")
    layer, mixer = cost.model.layers[0], attention_of(cost.model)[0]
    layers = tuple(replace(layer, mixer=replace(mixer, window=window)) for window in windows)
    return replace(cost, model=replace(cost.model, layers=layers))


def test_kv_of_qwen3_8b_is_the_published_one() -> None:
    """36 layers of 8 heads of 128, K and V, 2 bytes: 147 KB; 6 GB at 40k tokens, 147 GB at a million (1 %)."""
    shape = find_cost("qwen3-8b")
    assert shape.kv_bytes_per_token == pytest.approx(147e3, rel=0.01)
    assert shape.kv_bytes(40_000) == pytest.approx(6e9, rel=0.02)
    assert shape.kv_bytes(1_000_000) == pytest.approx(147e9, rel=0.01)


def test_kv_of_llama_3_70b_is_the_published_one() -> None:
    """0.32 MB per token; 40 GB at 128k are 40 GiB at 131,072 tokens, exactly."""
    shape = find_cost("llama-3-70b")
    assert shape.kv_bytes_per_token == pytest.approx(0.32e6, rel=0.03)
    assert shape.kv_bytes(131_072) == 40 * 2**30


def test_a_windowed_layer_keeps_its_window() -> None:
    shape = windowed(100, None)
    assert shape.kv_bytes(60) == KV_LAYER_BYTES * 120
    assert shape.kv_bytes(300) == KV_LAYER_BYTES * 400
    assert shape.full_bytes_per_token == KV_LAYER_BYTES
    assert shape.window_bytes == KV_LAYER_BYTES * 100


def test_bits_scale_weights_and_kv_apart() -> None:
    plain, small = find_cost("qwen3-8b"), find_cost("qwen3-8b", weight_bits=4, kv_bits=8)
    assert small.weight_bytes == plain.weight_bytes / 4
    assert small.kv_bytes_per_token == plain.kv_bytes_per_token / 2


def test_attention_counts_the_pairs_that_the_router_counts() -> None:
    shape = find_cost("qwen3-8b")
    flops_of_pair = 4 * 32 * 128 * 36
    for num_tokens, cached in ((40_000, 0), (3000, 2900), (7, 0)):
        assert shape.attention_flops(num_tokens, cached) == pytest.approx(
            flops_of_pair * PrefillWork.of(num_tokens, cached).num_pairs
        )


def test_attention_of_windows_counts_what_each_query_sees() -> None:
    shape = windowed(10)
    seen = sum(min(10, position) for position in range(1, 31))
    assert shape.attention_flops(30) == pytest.approx(PAIR_FLOPS * seen, rel=0.03)
    assert shape.attention_flops(30, 20) == pytest.approx(PAIR_FLOPS * 100)


def test_tables_are_held_once_when_tied_and_multiplied_only_by_new_tokens() -> None:
    tied = find_cost("qwen3-0.6b")
    untied = replace(tied, model=replace(tied.model, tie_word_embeddings=False))
    assert untied.num_parameters - tied.num_parameters == tied.num_table_parameters
    assert untied.num_active_parameters == tied.num_active_parameters
    assert tied.num_active_parameters - tied.num_multiplied_parameters == tied.num_table_parameters


def test_a_step_sweeps_the_experts_that_someone_chose() -> None:
    shape = find_cost("qwen3-30b-a3b")
    one, many = shape.expected_step_weight_bytes(1), shape.expected_step_weight_bytes(512)
    experts = 48 * 3 * 2048 * 768 * 2
    assert shape.weight_bytes - one == pytest.approx(experts * (128 - 8))
    assert many == pytest.approx(shape.weight_bytes)
    assert one < shape.expected_step_weight_bytes(2) < many
    dense = find_cost("qwen3-8b")
    assert dense.expected_step_weight_bytes(1) == dense.weight_bytes


def test_state_is_as_large_as_its_bits_whatever_the_dtype_of_the_checkpoint() -> None:
    plain = windowed(100, None)
    wide = replace(plain, model=replace(plain.model, dtype="float32"))
    assert wide.kv_bytes_per_token == plain.kv_bytes_per_token == 2 * KV_LAYER_BYTES
    assert wide.kv_bytes(300) == plain.kv_bytes(299.5) == KV_LAYER_BYTES * 400


def test_layers_that_share_state_keep_none_and_cost_no_prompt() -> None:
    """Gemma 4 E2B: of 35 layers 15 keep state, 12 of 256 elements with a window and 3 of 512; 28 and 7 read it."""
    shape = find_cost("gemma-4-e2b")
    assert shape.kv_bytes_per_token == 2 * 2 * (12 * 256 + 3 * 512)
    assert shape.kv_bytes(512 + 100) == 2 * 2 * (12 * 256 * 512 + 3 * 512 * 612)
    assert shape.read_bytes(1) == 2 * 2 * (28 * 256 + 7 * 512)
    assert shape.full_bytes_per_token == 2 * 2 * 7 * 512
    assert shape.window_bytes == 2 * 2 * 28 * 256 * 512
    prompt = replace(shape, model=replace(shape.model, layers=shape.model.layers[:15]))
    assert shape.num_prompt_parameters == prompt.num_multiplied_parameters < shape.num_multiplied_parameters / 3
    assert shape.attention_flops(3000, 100) == prompt.attention_flops(3000, 100)
    assert shape.step_attention_flops(3000) > 2 * prompt.step_attention_flops(3000)
    assert (shape.full_pair_flops, shape.window_flops) == (prompt.full_pair_flops, prompt.window_flops)


def test_a_step_reads_no_table_of_per_layer_embeddings() -> None:
    """2.3 billion "effective" parameters."""
    shape = find_cost("gemma-4-e2b")
    assert shape.weight_bytes - shape.expected_step_weight_bytes(1) == 2 * 262_144 * 35 * 256
    assert shape.num_active_parameters == shape.expected_step_weight_bytes(1) / 2 == pytest.approx(2.3e9, rel=0.02)


def reads_all_it_keeps(cost: ModelCost) -> bool:
    """NOTE: index keys are kept from the first token on, and read where there are more tokens than are chosen; an entry
    is kept whole once its span has ended, and read by its tokens' shares; a recurrent state is read and written.
    """
    others = SparseLatentAttentionSpec | BlockMixer | EntryAttentionSpec | RecurrentMixer
    return not any(isinstance(mixer, others) for mixer in cost.model.mixers)


READ_WHOLE = [*filter(reads_all_it_keeps, map(find_cost, catalogue_names())), windowed(100, None, 4096)]


@pytest.mark.parametrize("cost", READ_WHOLE, ids=lambda c: c.name)
def test_layers_with_state_of_their_own_are_read_as_they_are_kept(cost: ModelCost) -> None:
    layers = tuple(layer for layer in cost.model.layers if layer.mixer.reads_state_of is None)
    own = replace(cost, model=replace(cost.model, layers=layers))
    for num_tokens in (0, 1, 99, 100, 101, 5000, 1_000_000):
        assert own.read_bytes(num_tokens) == own.kv_bytes(num_tokens) == cost.kv_bytes(num_tokens)


def test_models_without_shared_state_compute_all_layers_of_a_prompt() -> None:
    for name in ("qwen3-8b", "gemma-3-27b", "gemma-4-31b"):
        shape = find_cost(name)
        assert shape.num_prompt_parameters == shape.num_multiplied_parameters
        assert shape.max_step_weight_bytes == shape.weight_bytes
