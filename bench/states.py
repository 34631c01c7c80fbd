"""Decode, prefill, hand-off and memory by kind of state: latents, recurrent layers, chosen tokens and blocks.

Contexts are not computed: a decoder is given pages of zeros for them, whose tokens cost what others do. Bytes are
counted and exact. Times are of the decoders alone, the least of some; on a machine with other load only their ratios to
each other, measured in turns, mean something.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.floor import read_bandwidth
from bench.report import Report, Row
from tandem.architecture.catalogue import find_cost
from tandem.architecture.cost import ModelCost, read_cost
from tandem.compute.arena import Arena
from tandem.compute.backends import choose_backends
from tandem.compute.native.bindings import load
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.models.loader import load_model
from tests.helpers import checkpoints
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.unit.architecture.published import CHECKPOINTS

CPU = torch.device("cpu")
_BLOCK_SIZE = 128
SCALED = {"vocab_size": 512, "hidden_size": 512, "num_hidden_layers": 4, "max_position_embeddings": 1 << 20}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 1024}
LATENT: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 4,
    "intermediate_size": 1024,
    "rope_parameters": None,
}
HYBRID: dict[str, Any] = {
    "num_hidden_layers": 10,
    "layer_types": [*["linear_attention"] * 9, "full_attention"],
    "num_local_experts": 0,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "shared_intermediate_size": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 256,
}
_GLM_5 = next(checkpoint.config for checkpoint in CHECKPOINTS if checkpoint.name == "zai-org/GLM-5")
_PUBLISHED = {
    "K and V": "llama-3-8b",
    "latents": "deepseek-v3",
    "side by side": "falcon-h1-7b",
    "index keys": "deepseek-v3.2",
}


class Contexts:
    """A decoder of a tiny checkpoint and pages of zeros for a request of up to `longest` tokens."""

    def __init__(self, path: Path, longest: int) -> None:
        self.decoder = load_model(str(path), device=CPU, kernels=load()).decoder
        self.spec = self.decoder.spec
        self.layout = build_layout(self.spec.kv_specs, _BLOCK_SIZE)
        self._tables = [*_tables(self.layout, longest)]
        self.num_blocks = 1 + max(int(pages.max()) for _, by_id in self._tables for pages in by_id.values())
        self.arena = Arena(self.layout, self.num_blocks, CPU)
        self._backends = choose_backends("auto", CPU, self.layout, 0.0)

    def forward(self, context: int, num_tokens: int = 1) -> None:
        """Computes the last `num_tokens` of so many tokens."""
        positions = torch.arange(context - num_tokens, context)
        batches = [
            AttentionBatch(
                query_start=torch.tensor([0, num_tokens], dtype=torch.int32),
                seq_lens=torch.tensor([context], dtype=torch.int32),
                block_tables=table[None, :],
                slot_mapping=table[positions // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions % _BLOCK_SIZE,
                max_query_len=num_tokens,
                max_seq_len=context,
                block_pages=pages,
            )
            for table, pages in self._tables
        ]
        by_layer = [batches[self.layout.group_of_layer(index)[0]] for index in range(self.layout.num_layers)]
        ids = torch.full((num_tokens,), 7)
        self.decoder.forward(ids, positions, self.arena.layers, by_layer, self._backends)


def _tables(layout: KVLayout, longest: int) -> Iterator[tuple[torch.Tensor, dict[int, NDArray[np.int32]]]]:
    """Blocks of each group, and the pages of each; a constant state has the same two for all of its entries, taking
    turns.
    """
    first, count = 1, -(-longest // layout.block_size)
    for group in layout.groups:
        size, num_blocks = group.pages_per_block, 2 if group.spec.is_bounded else count
        ids = first + size * (torch.arange(count, dtype=torch.int32) % num_blocks)
        yield ids, {number: np.arange(number, number + size, dtype=np.int32) for number in set(ids.tolist())}
        first += size * num_blocks


def least_ms(calls: list[Any], rounds: int) -> list[float]:
    """The least time of each, measured in turns."""
    least = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            begin = time.perf_counter()
            call()
            least[index] = min(least[index], 1000 * (time.perf_counter() - begin))
    return least


@torch.inference_mode()
def latent_rows(directory: Path, bandwidth: float) -> Iterator[Row]:
    """Decode over latents beside K and V of four heads, at several contexts."""
    latent = checkpoints.save_tiny_deepseek_v3(directory / "latent", dtype="bfloat16", **SCALED | LATENT)
    grouped = checkpoints.save_tiny_qwen3(directory / "grouped", dtype="bfloat16", **SCALED | HEADS)
    systems = {"latents 576": Contexts(latent, 32_768), "K and V, 4 heads": Contexts(grouped, 32_768)}
    contexts = (2048, 8192, 32_768)
    calls = [lambda s=s, n=n: s.forward(n) for s in systems.values() for n in contexts]
    times = iter(least_ms(calls, 7))
    for name, system in systems.items():
        cost = ModelCost(name, system.spec)
        for context in contexts:
            ms, num_bytes = next(times), cost.expected_step_weight_bytes(1) + cost.read_bytes(context)
            floor = 1000 * num_bytes / bandwidth
            yield Row(f"decode at {context}", name, "bytes read", num_bytes, "B")
            yield Row(f"decode at {context}", name, "time of a token", ms, "ms", floor, floor / ms)


@torch.inference_mode()
def hybrid_rows(directory: Path) -> Iterator[Row]:
    """A hybrid's decode from 1,024 to 131,072 tokens, and its prefill beside a dense model's of as many operations."""
    path = save_tiny_granite_hybrid(directory / "hybrid", dtype="bfloat16", **SCALED | HYBRID)
    hybrid = Contexts(path, 131_072)
    cost, contexts = ModelCost("hybrid", hybrid.spec), (1024, 8192, 32_768, 131_072)
    times = least_ms([lambda n=n: hybrid.forward(n) for n in contexts], 7)
    for context, ms in zip(contexts, times, strict=True):
        yield Row(f"decode at {context}", "hybrid 9:1", "bytes read", cost.read_bytes(context), "B")
        yield Row(f"decode at {context}", "hybrid 9:1", "time beside that at 1024", ms / times[0], "x")
    sizes = {**SCALED, **HEADS, "num_hidden_layers": 10}
    dense = Contexts(checkpoints.save_tiny_qwen3(directory / "dense", dtype="bfloat16", **sizes), 1024)
    systems = {"hybrid 9:1": hybrid, "dense": dense}
    for (name, system), ms in zip(
        systems.items(), least_ms([lambda s=s: s.forward(512, 512) for s in systems.values()], 5), strict=True
    ):
        own = ModelCost(name, system.spec)
        flops = 2 * own.num_prompt_parameters * 512 + own.attention_flops(512)
        yield Row("prefill of 512", name, "operations", flops, "FLOP")
        yield Row("prefill of 512", name, "rate", flops / ms / 1e6, "GFLOP/s")


def handoff_rows() -> Iterator[Row]:
    """Bytes of published models' hand-offs in 16 bits, and those of them that are sent after the last chunk of 512."""
    for kind, name in _PUBLISHED.items():
        layout = build_layout(replace(find_cost(name).model, dtype="bfloat16").kv_specs, 16)
        for num_tokens in (512, 2048, 8192):
            moved = num_tokens // 16 * layout.bytes_per_block + layout.bytes_per_request
            last = 512 // 16 * layout.bytes_per_block + layout.bytes_per_request
            yield Row(f"hand-off of {num_tokens}", f"{name}, {kind}", "pages moved", moved, "B")
            yield Row(f"hand-off of {num_tokens}", f"{name}, {kind}", "of them after the last chunk", last, "B")


def sparse_rows() -> Iterator[Row]:
    """Bytes that a token of DeepSeek-V3.2, GLM-5 and MiniMax-M3 reads, beside what it would read of everything."""
    sparse, latent = find_cost("deepseek-v3.2"), find_cost("deepseek-v3")
    for context in (32_768, 131_072):
        found = sparse.read_bytes(context)
        keys_and_values = 61 * context * 128 * (192 + 128) * 2
        for name, num_bytes in (("all latents", latent.read_bytes(context)), ("K and V of 128 heads", keys_and_values)):
            yield Row(f"decode at {context}", f"DeepSeek-V3.2 beside {name}", "bytes read", found, "B", num_bytes)
            yield Row(f"decode at {context}", f"DeepSeek-V3.2 beside {name}", "share", found / num_bytes, "x")
        for name, period in (("GLM-5", 1), ("GLM-5 if every fourth layer chose", 4)):
            glm = read_cost({**_GLM_5, "index_topk_freq": period}, name)
            found, latents = glm.read_bytes(context), glm.num_layers * context * 576 * 2
            yield Row(f"decode at {context}", f"{name}, beside all latents", "bytes read", found, "B", latents)
            yield Row(f"decode at {context}", f"{name}, beside all latents", "share", found / latents, "x")
        blocks = find_cost("minimax-m3")
        dense = 60 * context * blocks.model.mixers[0].cost.read_size * 2
        found = blocks.read_bytes(context)
        yield Row(f"decode at {context}", "MiniMax-M3 beside all K and V", "bytes read", found, "B", dense)
        yield Row(f"decode at {context}", "MiniMax-M3 beside all K and V", "share", found / dense, "x")


def flat_rows() -> Iterator[Row]:
    """Bytes that a token of published hybrids reads of weights and states at 131,072 tokens, beside those at 1,024."""
    for name in ("nemotron-3-super", "jamba-v0.1", "falcon-h1-7b"):
        cost = find_cost(name)
        short, long = (cost.expected_step_weight_bytes(1) + cost.read_bytes(context) for context in (1024, 131_072))
        yield Row("decode at 131072", name, "bytes read beside those at 1024", long, "B", short, long / short)


@torch.inference_mode()
def million_rows(directory: Path) -> Iterator[Row]:
    """Memory of a tiny hybrid with a million tokens of context, beside its bill; some tokens are decoded there."""
    path = save_tiny_granite_hybrid(directory / "million", dtype="bfloat16", max_position_embeddings=1 << 20)
    gc.collect()
    few = Contexts(path, 1024)
    few.forward(1024)
    before = resident_bytes()
    many = Contexts(path, 1_000_000)
    for context in range(999_990, 1_000_000):
        many.forward(context)
    grown = resident_bytes() - before
    bill = ModelCost("hybrid", many.spec).kv_bytes(1_000_000)
    pages = (many.num_blocks - 1) * many.layout.page_bytes
    yield Row("context of 1,000,000", "hybrid 2:1", "bill", bill, "B")
    yield Row("context of 1,000,000", "hybrid 2:1", "pages", pages, "B", bill)
    yield Row("context of 1,000,000", "hybrid 2:1", "resident memory", grown, "B", bill)


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the report under bench/results")
    arguments = parser.parse_args()
    bandwidth = read_bandwidth()
    rows = [Row("floor", "this machine", "read bandwidth", bandwidth / 1e9, "GB/s")]
    with tempfile.TemporaryDirectory() as name:
        for part in (
            sparse_rows(),
            flat_rows(),
            handoff_rows(),
            latent_rows(Path(name), bandwidth),
            hybrid_rows(Path(name)),
        ):
            rows += part
        rows += million_rows(Path(name))
    notes = ("Other programs had the machine's cores too: times are ratios, bytes are exact.",)
    report = Report("states", {"block_size": _BLOCK_SIZE, "dtype": "bfloat16"}, rows, notes)
    report.print()
    if arguments.save:
        report.save()


if __name__ == "__main__":
    main()
