"""A million tokens computed chunk by chunk by the engine, in a tiny hybrid, and its memory beside `tandem plan`'s bill.

    python -m bench.million [--tokens 1000000] [--threads 2] [--save]

Two recurrent layers around one of attention with one head of 16 elements, so that all 5e11 pairs take minutes.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.load import ForeignLoad, prioritise
from bench.report import Report, Row
from bench.states import resident_bytes
from tandem.core.config import EngineConfig
from tandem.core.sampling_params import SamplingParams
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tests.helpers.hybrid_checkpoints import save_tiny_granite_hybrid
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer

NUM_DECODED = 8
_SHORT = 4096
_SIZES: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "eos_token_id": NUM_TOKENS - 1,
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "shared_intermediate_size": 32,
}


def bill_of(path: Path, num_tokens: int) -> dict[str, Any]:
    """Returns the report of `tandem plan` for a context of `num_tokens`."""
    command = ["plan", "--model", str(path), "--context", str(num_tokens), "--json"]
    done = subprocess.run([sys.executable, "-m", "tandem.cli.main", *command], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def prompt_of(num_tokens: int, seed: int) -> list[int]:
    """Random, and so long that `num_tokens` are there when `NUM_DECODED` were generated."""
    draw = random.Random(seed)
    return [draw.randrange(1, NUM_TOKENS - 1) for _ in range(num_tokens - NUM_DECODED)]


def serve(engine: Engine, prompt: list[int]) -> float:
    """Computes a prompt and generates `NUM_DECODED` tokens; the request stays. Returns the seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_DECODED + 1, ignore_eos=True)
    begun_s, before = time.perf_counter(), engine.counters.num_decode_steps
    engine.add_request(prompt, params)
    while engine.counters.num_decode_steps < before + NUM_DECODED - 1:
        engine.step()
    return time.perf_counter() - begun_s


def rows_of(path: Path, num_tokens: int, threads: int, chunk: int) -> list[Row]:
    bill, foreign = bill_of(path, num_tokens), ForeignLoad()
    config = EngineConfig(
        model=str(path),
        device="cpu",
        max_model_len=num_tokens + NUM_DECODED,
        max_num_batched_tokens=chunk,
        max_num_running=1,
        kv_cache_bytes=int(1.1 * bill["held_bytes"]),
        block_size=128,
        num_threads=threads,
    )
    engine = build_engine(config)
    serve(engine, prompt_of(_SHORT, 1))
    prompt = prompt_of(num_tokens, 2)
    while engine.has_work:
        engine.step()
    before, read_before, cpu_s = resident_bytes(), engine.counters.read_bytes, time.process_time()
    took_s = serve(engine, prompt)
    held, grown = engine.load().held, resident_bytes() - before
    read = (engine.counters.read_bytes - read_before) / (NUM_DECODED - 1)
    where, system = f"context of {num_tokens:,}", "hybrid 2:1"
    figures = {
        "held by the engine": (held.num_bytes, bill["held_bytes"]),
        "pages": (held.held_page_bytes, bill["held_bytes"]),
        "read by a token": (read, bill["read_bytes"]),
    }
    rows = [Row(where, system, metric, value, "B", of, value / of) for metric, (value, of) in figures.items()]
    rows.append(Row(where, system, "resident memory beyond the pool", grown, "B"))
    rows.append(Row(where, system, "time", took_s, "s", foreign_cores=foreign.cores()))
    rows.append(Row(where, system, "processor time", time.process_time() - cpu_s, "s"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--save", action="store_true", help="keep the report under bench/results")
    options = parser.parse_args()
    prioritise()
    with tempfile.TemporaryDirectory() as name:
        path = save_tiny_granite_hybrid(Path(name), dtype="bfloat16", max_position_embeddings=1 << 20, **_SIZES)
        write_byte_tokenizer(path)
        rows = rows_of(path, options.tokens, options.threads, options.chunk)
    report = Report("million", vars(options), rows)
    report.print()
    if options.save:
        print(report.save())


if __name__ == "__main__":
    main()
