"""Bills of `tandem plan --context` beside what an engine with such a context holds and reads.

A family of each kind of state. What is read is counted from the batches that layers are given: each token of a request
that a layer still sees, in the form in which it is stored. Families whose queries choose what they read are counted by
their choices, in `tests/golden/test_sparse.py` and `test_block_sparse.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.architecture.state import StateSpec
from tandem.cli.model_cost import named_model
from tandem.compute.step import AttentionBatch
from tandem.core.sampling_params import SamplingParams
from tandem.models.decoder import Decoder
from tests.golden.test_sparse import prompt_of
from tests.helpers.checkpoints import (
    Builder,
    save_tiny_deepseek_v3,
    save_tiny_deepseek_v4,
    save_tiny_deepseek_v32,
    save_tiny_gemma3,
    save_tiny_llama,
)
from tests.helpers.delta_checkpoints import save_tiny_kimi_linear
from tests.helpers.engines import tiny_engine
from tests.helpers.hybrid_checkpoints import save_tiny_falcon_h1, save_tiny_granite_hybrid, save_tiny_mamba2
from tests.helpers.sparse_checkpoints import save_tiny_minimax_m3, save_tiny_moba, save_tiny_nsa
from tests.helpers.tokenizers import write_byte_tokenizer

FAMILIES: dict[str, tuple[Builder, dict[str, Any]]] = {
    "dense": (save_tiny_llama, {}),
    "windows": (save_tiny_gemma3, {}),
    "latent": (save_tiny_deepseek_v3, {}),
    "hybrid": (save_tiny_granite_hybrid, {}),
    "recurrences": (save_tiny_mamba2, {}),
    "side by side": (save_tiny_falcon_h1, {}),
    "columns beside latents": (save_tiny_kimi_linear, {}),
}
CHOOSING: dict[str, tuple[Builder, dict[str, Any]]] = {
    "sparse rows": (save_tiny_deepseek_v32, {"index_topk": 64}),
    "sparse blocks": (save_tiny_moba, {"moba_chunk_size": 64}),
    "sparse blocks by index": (save_tiny_minimax_m3, {}),
    "compressed": (save_tiny_nsa, {}),
    "entries": (save_tiny_deepseek_v4, {}),
}
NUM_DECODED = 8
SIZES = {"entries": (4008, 8)}  # NOTE: what is held is counted in whole blocks, which of short windows is much
"""Tokens of the context, and of a block; where they are not 1,008 and 16."""
WITHIN = 0.02


@dataclass
class Asked:
    """Bytes of state that layers are asked to read for steps of one query, and to write back of those that are not of
    one token.
    """

    by_step: list[int] = field(default_factory=list)

    def note(self, specs: Sequence[StateSpec], batches: Sequence[AttentionBatch]) -> None:
        (num_seen,) = {int(batch.seq_lens.sum()) for batch in batches}
        assert all(batch.max_query_len == batch.num_requests == 1 for batch in batches)
        self.by_step.append(sum(_num_bytes(spec, num_seen) for spec in specs))


def _num_bytes(spec: StateSpec, num_tokens: int) -> int:
    """Of one layer's arrays: of each token that the last one sees, or all of an array that does not grow, read and
    written.
    """
    width: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
    seen = num_tokens - spec.needed(num_tokens - 1)
    arrays = ((torch.Size(plane.shape).numel() * width[plane.dtype], plane.token_axis) for plane in spec.planes)
    return sum(2 * size if axis is None else seen * size for size, axis in arrays)


def decoded(path: Path, num_tokens: int, block_size: int, patch: pytest.MonkeyPatch) -> Any:
    """An engine in the middle of an answer, and what its layers were asked to read in decode steps."""
    asked, forward = Asked(), Decoder.forward

    def noted(self: Decoder, token_ids: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        if len(token_ids) == 1:
            asked.note(self.spec.kv_specs, args[2])
        return forward(self, token_ids, *args, **more)

    sizes = {"max_model_len": 4096, "block_size": block_size, "kv_cache_bytes": 1 << 24}
    python: dict[str, Any] = {"dtype": "bfloat16", "native_kernels": False, "attention_backend": "reference"}
    engine = tiny_engine(path, max_num_batched_tokens=256, **sizes, **python)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODED + 1, ignore_eos=True)
    engine.add_request(prompt_of(num_tokens - NUM_DECODED, 1), params)
    with patch.context() as patched:
        patched.setattr(Decoder, "forward", noted)
        while engine.counters.num_decode_steps < NUM_DECODED - 1:
            engine.step()
    return engine, asked.by_step


@pytest.mark.parametrize("family", FAMILIES | CHOOSING)
def test_an_engine_holds_and_reads_what_the_plan_says(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, options = (FAMILIES | CHOOSING)[family]
    path = write_byte_tokenizer(save(tmp_path, vocab_size=300, max_position_embeddings=4096, **options))
    cost = named_model(str(path), None, 16)
    num_tokens, block_size = SIZES.get(family, (1008, 16))
    engine, asked = decoded(path, num_tokens, block_size, monkeypatch)
    held = engine.load().held
    assert held.num_bytes == pytest.approx(cost.kv_bytes(num_tokens), rel=WITHIN)
    assert held.held_page_bytes >= held.num_bytes
    assert engine.counters.read_bytes == pytest.approx((NUM_DECODED - 1) * cost.read_bytes(num_tokens), rel=WITHIN)
    if family in FAMILIES:
        assert len(asked) == NUM_DECODED - 1
        assert engine.counters.read_bytes == pytest.approx(sum(asked), rel=WITHIN)
    while engine.has_work:
        engine.step()
    assert engine.load().held.num_bytes == 0
