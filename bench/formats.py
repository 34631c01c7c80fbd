"""Formats of weights: one random checkpoint in bfloat16 and as codes, each served by the engine, in turns, seeded.

A checkpoint of floats is rounded to the nearest codes while it is loaded: speed does not depend on what they say. The
output head has 16 bits beside bfloat16 weights and int8 codes with a scale for each output beside all others.

The floor of a single stream is the time in which the bytes of a token (weights, scales, the context's KV) come from
memory, at the bandwidth measured before and after the run. Formats whose name ends with "int8 activations" round rows.

Expected before the first run, of one stream and the shape of Qwen3-0.6B: time goes with bytes unless decoding codes
takes the processor longer than memory takes. With AVX2 eight codes of int8 or int4 take five instructions (shift, mask,
conversion, product, a part of the look-up) and eight of fp8 nine: some 15e9 and 8e9 codes a second and core. A token of
596e6 codes then takes two cores 20 ms in int8 and int4, whatever their bytes, and 37 in fp8.
"""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import EXPERT_SHAPES, SHAPES, random_checkpoint
from bench.engine import Timing, Workload, run_tandem
from bench.experts import Figure, figures, step_bytes, summary
from bench.floor import fastest_dtype, matmul_rate, read_bandwidth
from bench.load import ForeignLoad, prioritise
from bench.report import Report
from tandem.architecture.cost import ModelCost, read_cost
from tandem.compute.codes import CodeKind
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.core.config import EngineConfig
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tests.helpers.rounded_weights import RoundedReader, Rounding

WORKLOADS = (
    Workload("single 64/64", 1, 0, 64, 64, 1),
    Workload("prefill 1x512", 1, 0, 512, 1, 1),
    Workload("batch 16x64/16 c16", 16, 0, 64, 16, 16),
)
SCALE_BITS = 16
KV_BYTES = 512 << 20
INT8 = Rounding(CodeKind.INT8, None)
ROUNDING_INT8 = Rounding(CodeKind.INT8, None, rounds_rows=True)


@dataclass(frozen=True, slots=True)
class Format:
    """Weights as codes, or as the checkpoint has them. `head`: the output head likewise."""

    name: str
    rounding: Rounding | None = None
    head: Rounding | None = None

    @property
    def reader(self) -> FormatReader:
        return read_formats if self.rounding is None else RoundedReader(self.rounding, self.head)

    def cost(self, config: dict[str, object]) -> ModelCost:
        """With the mean bits of what a token is multiplied by, scales among them."""
        plain = read_cost(config, self.name)
        table, active = plain.num_table_parameters, plain.num_active_parameters
        bits = (_bits(self.rounding) * (active - table) + _bits(self.head) * table) / active
        return read_cost(config, self.name, weight_bits=bits)


FORMATS = (
    Format("bf16"),
    Format("int8, by channel", INT8, INT8),
    Format("fp8, groups of 128", Rounding(CodeKind.E4M3, 128), INT8),
    Format("int4, groups of 128", Rounding(CodeKind.TABLE4, 128), INT8),
    Format("int4, groups of 32", Rounding(CodeKind.TABLE4, 32), INT8),
    Format("int8, by channel, int8 activations", ROUNDING_INT8, ROUNDING_INT8),
    Format("int4, groups of 128, int8 activations", Rounding(CodeKind.TABLE4, 128, rounds_rows=True), ROUNDING_INT8),
    Format("int4, groups of 32, int8 activations", Rounding(CodeKind.TABLE4, 32, rounds_rows=True), ROUNDING_INT8),
)


def _bits(rounding: Rounding | None) -> float:
    """Of a weight. NOTE: a scale for a whole row is not counted: a row has a thousand codes."""
    if rounding is None:
        return 16.0
    code_bits = 4 if rounding.kind is CodeKind.TABLE4 else 8
    return code_bits + (0.0 if rounding.group_size is None else SCALE_BITS / rounding.group_size)


def measure(shape: str, rounds: int, formats: tuple[Format, ...] = FORMATS) -> Report:
    path = random_checkpoint(shape)
    config = json.loads((path / "config.json").read_text())
    costs = {each.name: each.cost(config) for each in formats}
    engines = {each.name: _engine(path, each.reader) for each in formats}
    found: dict[tuple[str, str], list[tuple[float, list[Figure]]]] = defaultdict(list)
    for engine in engines.values():
        run_tandem(engine, WORKLOADS[0], -1)
    for index in range(rounds):
        for workload in WORKLOADS:
            for name, engine in engines.items():
                foreign, timing, bandwidth, rate = _timed(engine, workload, index)
                row = list(figures(workload, timing, costs[name], bandwidth, rate))
                found[workload.name, name].append((foreign, row))
                print(f"round {index} · {workload.name} · {name}: {timing.wall_s:.2f} s", flush=True)
    circumstances = {
        "shape": shape,
        "rounds": rounds,
        "rows": "bfloat16",
        "token_bytes": {name: step_bytes(cost, WORKLOADS[0]) for name, cost in costs.items()},
    }
    rows = [row for (workload, system), runs in found.items() for row in summary(workload, system, runs)]
    return Report("formats", circumstances, rows, ["all formats in one process, one after the other in each round"])


def _engine(path: Path, reader: FormatReader) -> Engine:
    config = EngineConfig(
        model=str(path),
        dtype="bfloat16",
        max_model_len=1024,
        max_num_batched_tokens=512,
        kv_cache_bytes=KV_BYTES,
    )
    return build_engine(config, formats_of=reader)


def _timed(engine: Engine, workload: Workload, seed: int) -> tuple[float, Timing, float, float]:
    """Foreign cores meanwhile, times, and the bandwidth and the rate of products around them."""
    before = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
    load = ForeignLoad()
    timing = run_tandem(engine, workload, seed)
    foreign = load.cores()
    after = read_bandwidth(), matmul_rate(fastest_dtype(), 3)
    bandwidth, rate = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    return foreign, timing, bandwidth, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, *EXPERT_SHAPES], default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[each.name for each in FORMATS], help="these formats")
    parser.add_argument("--save", action="store_true", help="keep the JSON under bench/results")
    arguments = parser.parse_args()
    prioritise()
    formats = tuple(each for each in FORMATS if arguments.only is None or each.name in arguments.only)
    report = measure(arguments.shape, arguments.rounds, formats)
    report.print()
    if arguments.save:
        print(f"saved {report.save().relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()
