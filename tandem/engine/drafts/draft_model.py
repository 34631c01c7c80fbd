"""Loads a small draft model beside the served model; refuses one whose vocabulary differs, with the reason."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.compute.arena import Arena
from tandem.compute.backends import choose_backends
from tandem.compute.native.sampling import NativeDraws
from tandem.core.config import EngineConfig
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.core.speculate import drafter_of
from tandem.engine.drafts.model_drafter import ModelDrafter
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.sampler import Sampler
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.models.loader import LoadedModel, resolve_model_path
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A loaded draft model, and the layout of its KV."""

    model: LoadedModel
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
    ) -> ModelDrafter:
        """Makes the drafter and allocates its KV pool of `num_blocks` blocks.

        Args:
            vocab_size: of the served model.
            max_chunk_tokens: of prompts computed at once.
            max_model_len: longest request in tokens.

        Raises:
            ConfigurationError: no backend reads its state.
        """
        spec = self.model.spec
        backends = choose_backends(
            config.attention_backend, device, self.layout, spec.attention_softcap, sinks=spec.has_sinks
        )
        longest = min(max_model_len, spec.max_position_embeddings)
        forward = ForwardPass(
            self.model.decoder,
            spec,
            Arena(self.layout, num_blocks + 1, device),
            backends,
            max_num_requests=config.max_num_running,
            max_model_len=longest,
        )
        kv = KVCacheManager(
            self.layout, num_blocks, max_chunk_tokens=max_chunk_tokens, prefix_caching=config.prefix_caching
        )
        return ModelDrafter(forward, kv, Sampler(draws), vocab_size=vocab_size, max_model_len=longest)


def load_draft_model(config: EngineConfig, tokenizer: Tokenizer, load: Callable[[str], LoadedModel]) -> DraftModel:
    """Loads the draft model that `config.speculate` names.

    Args:
        tokenizer: of the served model.
        load: loads a model's directory, with the settings of the served model.

    Raises:
        ConfigurationError: it is unreadable, of an unsupported family, of another vocabulary, too large, or keeps a
            state that cannot be rewound.
    """
    found = drafter_of(config.speculate)
    assert found is not None, "EngineConfig refuses other settings"
    assert found[1], "EngineConfig refuses drafters that lack their directory"
    try:
        path = resolve_model_path(found[1], allow_pickle=config.allow_pickle)
        _require_same_vocabulary(tokenizer, Tokenizer.load(path))
        model = load(str(path))
        layout = build_layout(model.spec.kv_specs, config.block_size)
        if not layout.can_rewind:
            raise ConfigurationError(
                "it keeps a recurrent state, from which a wrong draft cannot be taken back; use a model without one"
            )
    except (CheckpointError, ConfigurationError) as error:
        raise ConfigurationError(f"speculate={config.speculate!r}: the draft model cannot be used: {error}") from error
    return DraftModel(model, layout)


def _require_same_vocabulary(served: Tokenizer, draft: Tokenizer) -> None:
    ours, theirs = served.vocabulary, draft.vocabulary
    for token in sorted({**ours, **theirs}, key=lambda token: ours.get(token, theirs.get(token, 0))):
        if ours.get(token) != theirs.get(token):
            raise ConfigurationError(
                f"its vocabulary is another: token {token!r} is {_numbered(theirs.get(token))} there and "
                f"{_numbered(ours.get(token))} in the served model; use a model with the same tokenizer"
            )


def _numbered(token_id: int | None) -> str:
    return "missing" if token_id is None else f"number {token_id}"
