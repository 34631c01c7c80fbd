"""Drafters by heads of tiny checkpoints, without an engine around them."""

from dataclasses import replace
from pathlib import Path

import torch

from tandem.compute.torch.kernels import TorchKernels
from tandem.engine.drafts.head_drafter import HeadDrafter
from tandem.engine.drafts.heads import DraftingHead
from tandem.kvcache.spec import build_layout
from tandem.models.heads.load import load_eagle3, load_mtp
from tandem.models.loader import load_model
from tests.helpers.engines import TINY


def head_drafter(
    model: Path,
    setting: str,
    *,
    num_blocks: int = 64,
    max_chunk_tokens: int = 16,
    max_model_len: int = 128,
    max_num_running: int = 32,
) -> HeadDrafter:
    """The head that `--speculate` = `setting` names, for the checkpoint `model`, with blocks of eight rows."""
    device, kernels = torch.device("cpu"), TorchKernels()
    config = replace(TINY, model=str(model), block_size=8, max_num_running=max_num_running)
    served = load_model(str(model), dtype=config.dtype, device=device, kernels=kernels)
    _, _, directory = setting.partition("=")
    load = load_eagle3 if directory else load_mtp
    loaded = load(Path(directory or model), served, kernels=kernels, device=device)
    return DraftingHead(loaded, build_layout([loaded.head.state], config.block_size)).drafter(
        config,
        device,
        vocab_size=served.spec.vocab_size,
        num_blocks=num_blocks,
        max_chunk_tokens=max_chunk_tokens,
        max_model_len=max_model_len,
        draws=None,
    )
