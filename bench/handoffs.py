"""Bytes and exposed time of hand-offs, after a prompt's last chunk, by kind of state: a worker of each role and one
request. Then the same for prompts that have all but 64 tokens in common with one before, and the bytes of eight such
prompts at once of which none was seen before.

    python -m bench.handoffs [--transport tcp] [--lengths 512,2048,8192] [--rounds 3] [--save]

Models are scaled: a few layers, whose heads, latents and states are as large as published ones. A chunk is 512 tokens.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.disaggregation import Client, System, running
from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from bench.states import HEADS, HYBRID, LATENT, SCALED
from tests.helpers import checkpoints, delta_checkpoints, hybrid_checkpoints, sparse_checkpoints
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

_CHUNK = 512
_NEW = 64  # tokens of a prompt whose beginning both workers know
_AT_ONCE = 8
_LONG = 4096  # tokens of a prompt that is computed once, however many rounds there are
_INDEXED = {"index_topk": 512, "index_head_dim": 128, "index_n_heads": 16}
_WINDOWED = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "intermediate_size": 512}
_MAMBA_2 = {"num_heads": 16, "head_dim": 64, "state_size": 128, "n_groups": 1}
_BESIDE = {"mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
_DELTA = {
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_SCAN = {"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 1, "mamba_dt_rank": 32}
MODELS: Mapping[str, tuple[checkpoints.Builder, Mapping[str, Any]]] = {
    "K and V of 4 heads": (checkpoints.save_tiny_qwen3, HEADS),
    "1 window, 1 attention": (checkpoints.save_tiny_gpt_oss, {**HEADS, **_WINDOWED}),
    "latents": (checkpoints.save_tiny_deepseek_v3, LATENT),
    "latents and index keys": (
        checkpoints.save_tiny_glm_moe_dsa,
        {**LATENT, **_INDEXED, "indexer_types": ["full"] * 4},
    ),
    "recurrences": (hybrid_checkpoints.save_tiny_mamba2, _MAMBA_2),
    "9 recurrences, 1 attention": (hybrid_checkpoints.save_tiny_granite_hybrid, HYBRID),
    "3 delta rules, 1 attention": (delta_checkpoints.save_tiny_qwen3_5, {**HEADS, **_DELTA}),
    "7 selective scans, 1 attention": (hybrid_checkpoints.save_tiny_jamba, {**HEADS, **_SCAN}),
    "recurrence beside attention": (hybrid_checkpoints.save_tiny_falcon_h1, {**HEADS, **_BESIDE}),
    "chosen blocks of K and V": (sparse_checkpoints.save_tiny_moba, {**HEADS, "moba_chunk_size": 64}),
}


@dataclass(frozen=True, slots=True)
class HandedOver:
    """One request's hand-off. `exposed_*`: from the end of the last chunk until all was in place and confirmed."""

    num_bytes: float
    prefill_s: float
    exposed_s: float
    exposed_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Hand-offs of one workload, and the cores that others kept busy. `is_burst`: they ran at once."""

    workload: str
    samples: Sequence[HandedOver]
    foreign_cores: float
    is_burst: bool = False


def handed_over(stages: Sequence[Mapping[str, Any]]) -> HandedOver:
    """Figures read from its timeline."""
    chunks = [stage for stage in stages if stage["name"] == "prefill chunk"]
    transfers = [stage for stage in stages if stage["name"] == "transfer"]
    computed_s = max(map(_end_s, chunks))
    late = [stage for stage in transfers if _end_s(stage) > computed_s]
    return HandedOver(
        num_bytes=sum(stage["attributes"]["num_bytes"] for stage in transfers),
        prefill_s=computed_s - min(stage["start_s"] for stage in chunks),
        exposed_s=max(map(_end_s, transfers)) - computed_s,
        exposed_bytes=sum(stage["attributes"]["num_bytes"] for stage in late),
    )


def _end_s(stage: Mapping[str, Any]) -> float:
    return float(stage["start_s"] + stage["duration_s"])


async def measured(url: str, lengths: Sequence[int], rounds: int) -> list[Measured]:
    client, found = Client(url, NUM_TOKENS - 1, seed=1), list[Measured]()

    async def handed(known: Sequence[int], length: int) -> HandedOver:
        prompt = [*known, *client.random_tokens(length - len(known))]
        return handed_over(await client.timeline(await client.complete_prompt(prompt, 2)))

    try:
        await client.complete(min(lengths), 2)
        for length in lengths:
            count, beginnings = rounds if length < _LONG else 1, [client.random_tokens(length - _NEW) for _ in range(2)]
            foreign = ForeignLoad()
            fresh = [await handed([], length) for _ in range(count)]
            found.append(Measured(f"{length} tokens", fresh, foreign.cores()))
            await handed(beginnings[0], length)
            foreign, known = ForeignLoad(), [await handed(beginnings[0], length) for _ in range(count)]
            found.append(Measured(f"{length} tokens, all but {_NEW} known", known, foreign.cores()))
            foreign, burst = ForeignLoad(), [handed(beginnings[1], length) for _ in range(_AT_ONCE)]
            name = f"{length} tokens, all but {_NEW} in common, {_AT_ONCE} at once"
            found.append(Measured(name, await asyncio.gather(*burst), foreign.cores(), is_burst=True))
    finally:
        await client.close()
    return found


def rows_of(kind: str, found: Sequence[Measured]) -> Iterator[Row]:
    for each in found:
        samples, workload, foreign = each.samples, each.workload, each.foreign_cores
        if each.is_burst:
            total = sum(sample.num_bytes for sample in samples) / 1e6
            yield Row(workload, kind, "moved by all", total, "MB", foreign_cores=foreign)
            continue
        figures = {
            ("moved", "MB"): [sample.num_bytes / 1e6 for sample in samples],
            ("of them after the last chunk", "MB"): [sample.exposed_bytes / 1e6 for sample in samples],
            ("exposed", "ms"): [1000 * sample.exposed_s for sample in samples],
            ("exposed, share of prefill", "%"): [100 * sample.exposed_s / sample.prefill_s for sample in samples],
        }
        for (metric, unit), values in figures.items():
            median = statistics.median(values)
            yield Row(workload, kind, metric, median, unit, samples=tuple(values), foreign_cores=foreign)


def measure(kind: str, directory: Path, transport: str, lengths: Sequence[int], rounds: int) -> list[Row]:
    build, options = MODELS[kind]
    path = directory / kind.replace(" ", "-").replace(",", "")
    build(path, dtype="bfloat16", **{**SCALED, "vocab_size": NUM_TOKENS, "eos_token_id": NUM_TOKENS - 1, **options})
    write_byte_tokenizer(path)
    flags = "--num-threads", "1", "--cpus", "any", "--transport", transport
    sizes = "--max-model-len", str(max(lengths) + 64), "--max-num-batched-tokens", str(_CHUNK)
    with running(System(kind, 1, flags), str(path), sizes, TANDEM_MAX_LOCAL_TOKENS="0") as url:
        return list(rows_of(kind, asyncio.run(measured(url, lengths, rounds))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="tcp")
    parser.add_argument("--lengths", default="512,2048,8192", help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", help="a part of a kind's name; may be given several times")
    parser.add_argument("--save", action="store_true", help="keep the report under bench/results")
    options = parser.parse_args()
    prioritise()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    lengths, rows = [int(length) for length in options.lengths.split(",")], list[Row]()
    with tempfile.TemporaryDirectory() as name:
        for kind in MODELS:
            if not options.only or any(part in kind for part in options.only):
                rows += measure(kind, Path(name), options.transport, lengths, options.rounds)
    report = Report("handoffs", {**vars(options), "chunk": _CHUNK, "dtype": "bfloat16"}, rows)
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
