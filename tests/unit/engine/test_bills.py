"""Bills of `tandem plan --context` beside what an engine with such a context holds and reads.

A family of each kind of state: K and V, latents, recurrent beside attention, and what queries choose from.
"""

from pathlib import Path
from typing import Any

import pytest

from tandem.cli.model_cost import named_model
from tandem.core.sampling_params import SamplingParams
from tests.golden.test_sparse import prompt_of
from tests.helpers.checkpoints import Builder, save_tiny_deepseek_v3, save_tiny_deepseek_v32, save_tiny_llama
from tests.helpers.engines import tiny_engine
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.sparse_checkpoints import save_tiny_moba
from tests.helpers.tokenizers import write_byte_tokenizer

FAMILIES: dict[str, tuple[Builder, dict[str, Any]]] = {
    "dense": (save_tiny_llama, {}),
    "latent": (save_tiny_deepseek_v3, {}),
    "hybrid": (save_tiny_granite_hybrid, {}),
    "sparse rows": (save_tiny_deepseek_v32, {"index_topk": 64}),
    "sparse blocks": (save_tiny_moba, {"moba_chunk_size": 64}),
}
NUM_TOKENS, NUM_DECODED = 1008, 8
WITHIN = 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_holds_and_reads_what_the_plan_says(family: str, tmp_path: Path) -> None:
    save, options = FAMILIES[family]
    path = write_byte_tokenizer(save(tmp_path, vocab_size=300, max_position_embeddings=2048, **options))
    cost = named_model(str(path), None, 32)
    engine = tiny_engine(path, max_model_len=2048, block_size=16, kv_cache_bytes=1 << 24, max_num_batched_tokens=256)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODED + 1, ignore_eos=True)
    engine.add_request(prompt_of(NUM_TOKENS - NUM_DECODED, 1), params)
    while engine.counters.num_decode_steps < NUM_DECODED - 1:
        engine.step()
    held = engine.load().held
    assert held.num_bytes == pytest.approx(cost.kv_bytes(NUM_TOKENS), rel=WITHIN)
    assert held.held_page_bytes >= held.num_bytes
    assert engine.counters.read_bytes == pytest.approx((NUM_DECODED - 1) * cost.read_bytes(NUM_TOKENS), rel=WITHIN)
    while engine.has_work:
        engine.step()
    assert engine.load().held.num_bytes == 0
