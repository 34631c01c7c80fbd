"""Loads the network (a draft model, or an MTP or EAGLE-3 head) that a drafter needs beside the served model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from tandem.compute.native.sampling import NativeDraws
from tandem.compute.ops import Kernels
from tandem.compute.weights.formats import FormatReader
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.core.speculate import DRAFT, EAGLE, MTP, drafter_of
from tandem.engine.drafts.draft_model import load_draft_model
from tandem.engine.drafts.drafter import Drafter
from tandem.engine.drafts.heads import DraftingHead, load_head
from tandem.kvcache.spec import KVLayout
from tandem.models.heads.base import LoadedHead
from tandem.models.heads.load import carries_mtp, find_eagle3, load_eagle3, load_mtp
from tandem.models.loader import LoadedModel, resolve_model_path
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The served model, whose tokens a network guesses. `load`: loads another model from a directory, all of it, with
    the same settings.
    """

    model: LoadedModel
    path: Path
    tokenizer: Tokenizer
    kernels: Kernels
    device: torch.device
    formats_of: FormatReader
    allow_pickle: bool
    load: Callable[[str], LoadedModel]

    def offered_head(self) -> str | None:
        """The value of `speculate` for a head that comes with the checkpoint: its own MTP module, else an EAGLE-3 head
        beside it. None = there is none, or this process does not have all layers, so that none can be served.
        """
        if self.model.spec.embedding is None:
            return None
        if carries_mtp(self.path, self.model, allow_pickle=self.allow_pickle):
            return MTP
        directory = find_eagle3(self.path, self.model, allow_pickle=self.allow_pickle)
        return None if directory is None else f"{EAGLE}={directory}"


class DraftingNetwork(Protocol):
    """A loaded network that drafts. `layout`: of its KV."""

    @property
    def layout(self) -> KVLayout: ...

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
    ) -> Drafter:
        """Makes the drafter and allocates its KV pool of `num_blocks` blocks.

        Args:
            vocab_size: of the served model.
            max_chunk_tokens: of prompts computed at once.
            max_model_len: longest request in tokens.

        Raises:
            ConfigurationError: no backend reads its state.
        """
        ...


def load_network(config: EngineConfig, name: str | None, served: TargetModel) -> DraftingNetwork | None:
    """Loads the network of the drafter `name`; None = that drafter needs none, or there is no drafter. Of a group of
    ranks, only the leader loads it, all of it.

    Raises:
        ConfigurationError: it is unreadable, or made for another model, or reads what other stages of layers have.
    """
    load = None if name is None else _LOADERS.get(name)
    return None if load is None else load(config, served)


def _load_draft_model(config: EngineConfig, served: TargetModel) -> DraftingNetwork:
    return load_draft_model(config, served.tokenizer, served.load)


def _load_eagle(config: EngineConfig, served: TargetModel) -> DraftingHead:
    _, directory = drafter_of(config.speculate) or ("", None)
    assert directory, "EngineConfig refuses other settings"

    def load() -> LoadedHead:
        path = resolve_model_path(directory, allow_pickle=config.allow_pickle)
        return _with(served, partial(load_eagle3, path))

    _refuse_stages(config, served)
    return load_head(config, load)


def _load_mtp(config: EngineConfig, served: TargetModel) -> DraftingHead:
    _refuse_stages(config, served)
    return load_head(config, lambda: _with(served, partial(load_mtp, served.path)))


def _with(served: TargetModel, load: Callable[..., LoadedHead]) -> LoadedHead:
    return load(
        served.model,
        kernels=served.kernels,
        device=served.device,
        formats_of=served.formats_of,
        allow_pickle=served.allow_pickle,
    )


def _refuse_stages(config: EngineConfig, served: TargetModel) -> None:
    """NOTE: a head reads hidden states of several layers, and the embedding, which only the first stage has."""
    if served.model.spec.embedding is None:
        raise ConfigurationError(
            f"speculate={config.speculate!r} is not served with pp above 1 yet; use ngram, suffix or draft=DIR, or pp=1"
        )


_LOADERS: dict[str, Callable[[EngineConfig, TargetModel], DraftingNetwork]] = {
    DRAFT: _load_draft_model,
    EAGLE: _load_eagle,
    MTP: _load_mtp,
}
