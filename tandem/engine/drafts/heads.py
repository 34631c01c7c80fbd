"""Loads a drafting head (MTP, EAGLE-3) beside the served model and makes its drafter; refuses one that does not fit."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.compute.arena import Arena
from tandem.compute.backends import choose_backends
from tandem.compute.native.sampling import NativeDraws
from tandem.core.config import EngineConfig
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.engine.drafts.head_drafter import HeadDrafter
from tandem.engine.sampler import Sampler
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.models.heads.base import LoadedHead


@dataclass(frozen=True, slots=True)
class DraftingHead:
    """A loaded head, and the layout of its KV."""

    loaded: LoadedHead
    layout: KVLayout

    def drafter(
        self,
        config: EngineConfig,
        device: torch.device,
        *,
        vocab_size: int,
        num_blocks: int,
        max_chunk_tokens: int,
        max_model_len: int,
        draws: NativeDraws | None,
    ) -> HeadDrafter:
        """Makes the drafter and allocates its KV pool of `num_blocks` blocks. `vocab_size`: of the served model;
        `max_chunk_tokens`: of prompts computed at once; `max_model_len`: longest request in tokens.

        Raises:
            ConfigurationError: no backend reads its state.
        """
        kv = KVCacheManager(
            self.layout, num_blocks, max_chunk_tokens=max_chunk_tokens, prefix_caching=config.prefix_caching
        )
        return HeadDrafter(
            self.loaded.head,
            Arena(self.layout, num_blocks + 1, device),
            kv,
            choose_backends(config.attention_backend, device, self.layout, 0.0),
            Sampler(draws),
            vocab_size=vocab_size,
            max_num_requests=config.max_num_running,
            max_model_len=min(max_model_len, self.loaded.max_positions),
            fingerprint=hashlib.sha256(f"{self.loaded.fingerprint}\0{self.layout}".encode()).hexdigest(),
        )


def load_head(config: EngineConfig, load: Callable[[], LoadedHead]) -> DraftingHead:
    """Loads the head that `config.speculate` names, by `load`.

    Raises:
        ConfigurationError: `load` refuses it; the message says why.
    """
    try:
        loaded = load()
    except (CheckpointError, ConfigurationError) as error:
        raise ConfigurationError(f"speculate={config.speculate!r}: the head cannot be used: {error}") from error
    return DraftingHead(loaded, build_layout([loaded.head.state], config.block_size))
