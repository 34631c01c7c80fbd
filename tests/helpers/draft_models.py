"""Drafters that are tiny models, without an engine around them."""

from dataclasses import replace
from pathlib import Path

import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.engine.drafts.draft_model import DraftModel
from tandem.engine.drafts.model_drafter import ModelDrafter
from tandem.kvcache.spec import build_layout
from tandem.models.loader import load_model
from tests.helpers.engines import TINY


def tiny_drafter(
    path: Path,
    vocab_size: int,
    *,
    num_blocks: int = 64,
    max_chunk_tokens: int = 32,
    max_model_len: int = 128,
    max_num_running: int = 32,
) -> ModelDrafter:
    """The checkpoint at `path` as a drafter, with blocks of eight tokens."""
    device = torch.device("cpu")
    config = replace(TINY, model=str(path), block_size=8, max_num_running=max_num_running)
    model = load_model(str(path), dtype=config.dtype, device=device, kernels=TorchKernels())
    return DraftModel(model, build_layout(model.spec.kv_specs, config.block_size)).drafter(
        config,
        device,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        max_chunk_tokens=max_chunk_tokens,
        max_model_len=max_model_len,
        draws=None,
    )
