"""Engines over tiny checkpoints, and loops that serve whole workloads on them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.core.config import EngineConfig
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.resolve import build_engine
from tandem.kvcache.spec import build_layout
from tandem.models.loader import load_model

TINY = EngineConfig(
    model="",
    dtype="float32",
    device="cpu",
    kv_cache_bytes=1 << 20,
    max_model_len=256,
    max_num_batched_tokens=128,
    max_num_running=32,
    native_kernels=False,
    attention_backend="reference",
)


def tiny_engine(path: Path, **overrides: object) -> Engine:
    """An engine on a test checkpoint; `overrides` are fields of EngineConfig."""
    return drafting_engine(path, None, **overrides)


def drafting_engine(path: Path, speculation: Speculation | None, **overrides: object) -> Engine:
    """`tiny_engine` with drafts of the tests' own."""
    return build_engine(replace(TINY, model=str(path), **overrides), speculation=speculation)  # type: ignore[arg-type]


def drain(engine: Engine) -> dict[tuple[str, int], list[RequestOutput]]:
    """Step until nothing is left, proving the accounting after every step; outputs by (request id, choice)."""
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
    return outputs


def token_ids(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def serve_alone(
    path: Path, prompts: Mapping[str, list[int]], params: Mapping[str, SamplingParams], **overrides: object
) -> dict[str, list[int]]:
    """Each request on a fresh engine of its own: what every other way of serving it must equal."""
    tokens = {}
    for request_id, prompt in prompts.items():
        engine = tiny_engine(path, **overrides)
        engine.add_request(prompt, params[request_id], request_id=request_id)
        tokens[request_id] = token_ids(drain(engine)[request_id, 0])
    return tokens


def least_kv_cache_bytes(
    path: Path, max_model_len: int, max_num_batched_tokens: int, dtype: str, block_size: int = TINY.block_size
) -> int:
    """The smallest cache that holds one request of `max_model_len` tokens."""
    model = load_model(
        str(path), dtype=dtype, device=torch.device("cpu"), kernels=TorchKernels(), max_model_len=max_model_len
    )
    layout = build_layout(model.spec.kv_specs, block_size)
    return layout.blocks_for(max_model_len, max_num_batched_tokens) * layout.page_bytes
