"""Tensor, pipeline and context parallelism of one engine: a group of processes (ranks) that computes one model.

`Ranks` is the interface by which rank 0, the leader, uses the others; `ShardRunner` is what each of those runs. Only
the leader schedules, samples and knows requests. The others get every step and keep their part of its KV.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.compute.arena import Arena
from tandem.compute.attention import Backends
from tandem.compute.backends import choose_backends
from tandem.compute.choose import choose_kernels
from tandem.compute.collectives import RankLinks, names_of
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.native.build import default_cache_dir
from tandem.compute.ops import Kernels
from tandem.compute.shared_pages import map_pages
from tandem.compute.step import HiddenStates
from tandem.compute.weights.formats import read_formats
from tandem.core.config import EngineConfig
from tandem.core.errors import ConfigurationError
from tandem.engine.activations import with_activations
from tandem.engine.executor import Executor
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.inputs import ModelInputs
from tandem.kvcache.ranked_layout import RankedLayout, num_parts
from tandem.kvcache.spec import build_layout
from tandem.models.loader import LoadedModel, load_model
from tandem.scheduler.output import SchedulerOutput

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ShardSizes:
    """Sizes that the leader has resolved for all ranks. `num_pages`: pages of KV memory on each, with the null block.
    `layers_read`: layers whose inputs (hidden states) the leader's drafter reads; () = it reads none.
    """

    num_pages: int
    max_model_len: int
    max_num_requests: int
    layers_read: tuple[int, ...] = ()


class Ranks(Protocol):
    """The other ranks of a group, as the engine of rank 0 (the leader) uses them."""

    @property
    def links(self) -> RankLinks: ...

    @property
    def num_ranks_here(self) -> int:
        """Number of ranks on the leader's host; they share one KV memory, which has parts for all ranks of the
        group.
        """
        ...

    def take_pages(self, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
        """Allocates the KV memory that the ranks of this host share: [num_parts, num_pages, page_bytes] uint8. Parts
        of ranks on other hosts are filled on those hosts only. Call once, before `prepare`.
        """
        ...

    def prepare(self, fingerprint: str, sizes: ShardSizes) -> None:
        """Waits until all other ranks have loaded the same model and allocated their memory.

        Raises:
            ConfigurationError: one of them cannot; the message says why.
        """
        ...

    def renew(self) -> None:
        """Forms the group anew after the loss of a rank, with new processes and the present KV. The lost step has to be
        computed again, or its requests to end.

        Raises:
            ConfigurationError: it cannot be formed.
            RanksLostError: groups end before they have computed a step.
        """
        ...

    def lead(self, own: Executor) -> Executor:
        """The executor of all ranks; `own` executes this rank's part."""
        ...

    def close(self) -> None:
        """Ends the other ranks. Harmless if they have ended."""
        ...


def check_exact(links: RankLinks, device: torch.device, kernels: Kernels) -> None:
    """Raises `ConfigurationError` if several ranks would not compute exactly what one computes."""
    named, one = names_of(links)
    if device.type != "cpu":
        raise ConfigurationError(f"{named} serves on the CPU alone yet, not on {device}; give device=cpu or {one}")
    if not isinstance(kernels, NativeKernels):
        raise ConfigurationError(
            f"{named} needs the compiled kernels, whose sums do not depend on the number of ranks; leave "
            "native_kernels out, and install a C++ compiler where there is none"
        )


def check_backends(links: RankLinks, backends: Backends) -> None:
    """Raises `ConfigurationError` for attention whose bits may depend on the number of heads."""
    named, one = names_of(links)
    for backend in backends.values():
        if backend.name != "native":
            raise ConfigurationError(
                f"{named} needs the native attention backend, and {backend.name!r} was chosen; leave "
                f"attention_backend at auto, or give {one}"
            )


def check_drafter(links: RankLinks, layers_read: Sequence[int], speculate: str) -> None:
    """Raises `ConfigurationError` for a drafter that reads hidden states of prompts, if prompts are split between
    ranks.
    """
    if layers_read and links.num_contexts > 1:
        raise ConfigurationError(
            f"speculate={speculate!r} is not served with cp above 1 yet; use ngram, suffix or draft=DIR, or cp=1"
        )


def await_kv(step: SchedulerOutput, links: RankLinks) -> None:
    """Ends a step on every rank: on return all ranks have written the step's KV, so that others may read it, or
    overwrite blocks that it has freed.

    NOTE: logits are exchanged after the KV of a step; without any, its last layer of a prompt ends without exchange.
    Stages and contexts have no logits but in the last.
    """
    is_divided = links.num_stages > 1 or links.num_contexts > 1
    if is_divided or not any(item.samples or item.scores_prompt for item in step.scheduled):
        links.group.add(torch.zeros(1, 1), None, torch.float32)


class ShardRunner:
    """Computes one rank's part of steps. Only the KV remains; results are dropped.

    `layers_read`: as in `ShardSizes`. NOTE: where states are read, more tokens may be computed to the end.
    """

    def __init__(self, forward: ForwardPass, links: RankLinks, layers_read: tuple[int, ...] = ()) -> None:
        self._forward = forward
        self._links = links
        self._layers_read = layers_read
        self._prompt_lengths: dict[str, int] = {}

    @torch.inference_mode()
    def run(self, step: SchedulerOutput) -> None:
        """Computes this rank's part of a step. Makes the same exchanges as `ModelRunner`, in the same order."""
        for request_id in step.released:
            self._prompt_lengths.pop(request_id, None)
        self._prompt_lengths |= {new.request_id: len(new.prompt_token_ids) for new in step.new}
        inputs, hidden = self._forward.run(step, HiddenStates(self._layers_read) if self._layers_read else None)
        if self._links.is_last:
            self._take_part_in_logits(step, inputs, hidden)
        self._forward.advance_past_accepted(step, inputs, None)
        await_kv(step, self._links)

    def _take_part_in_logits(self, step: SchedulerOutput, inputs: ModelInputs, hidden: torch.Tensor) -> None:
        if any(item.samples for item in step.scheduled):
            self._forward.logits(hidden, inputs.sample_rows)
        for index, item in enumerate(step.scheduled):
            if item.scores_prompt:
                length = self._prompt_lengths[item.request_id]
                for _ in self._forward.scored_logits(inputs, hidden, index, item, length):
                    pass


def ranked_layout(model: LoadedModel, block_size: int, links: RankLinks | None) -> RankedLayout:
    """Layout of a model's state on all ranks, for a rank that has loaded its part of the model."""
    whole = build_layout(model.states, block_size)
    if links is None:
        return RankedLayout(whole, 1)
    stages = model.states_of_stages if links.num_stages > 1 else ()
    return RankedLayout(whole, num_parts(whole, links.shard.num_ranks) * links.num_stages, stages)


def part_of(links: RankLinks | None, ranked: RankedLayout) -> int:
    """Index of a rank's part among the parts of the state."""
    return 0 if links is None else links.stage * ranked.width + links.shard.rank % ranked.width


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A rank's part of a model, loaded.

    Args:
        fingerprint: of the whole model.
        runner: makes the runner, given sizes, the file descriptor of the KV memory, and whether there is KV in it.
    """

    fingerprint: str
    runner: Callable[[ShardSizes, int, bool], ShardRunner]


def load_shard(config: EngineConfig, links: RankLinks) -> LoadedShard:
    """Loads the part of the model that this rank computes.

    Raises:
        ConfigurationError: a setting cannot be honoured.
        CheckpointError: the checkpoint cannot be served exactly.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    kernels = choose_kernels(_CPU, config.native_kernels)
    check_exact(links, _CPU, kernels)
    model = load_model(
        config.model,
        dtype=config.dtype,
        device=_CPU,
        kernels=kernels,
        max_model_len=config.max_model_len,
        packed_dir=default_cache_dir() / "weights" if config.pack_weights else None,
        allow_pickle=config.allow_pickle,
        formats_of=with_activations(config.activations, _CPU, read_formats),
        links=links,
    )
    ranked = ranked_layout(model, config.block_size, links)
    layout = ranked.layout_of(part_of(links, ranked))
    backends = choose_backends(
        config.attention_backend, _CPU, layout, model.spec.attention_softcap, sinks=model.spec.has_sinks
    )
    check_backends(links, backends)

    def runner(sizes: ShardSizes, memory: int, keeps_pages: bool) -> ShardRunner:
        pages = map_pages(memory, ranked.num_ranks, sizes.num_pages, layout.page_bytes)
        arena = Arena(layout, sizes.num_pages, _CPU, pages[part_of(links, ranked)], keeps_pages=keeps_pages)
        return ShardRunner(_forward(model, arena, backends, sizes, links), links, sizes.layers_read)

    return LoadedShard(model.spec.fingerprint, runner)


def _forward(model: LoadedModel, arena: Arena, backends: Backends, sizes: ShardSizes, links: RankLinks) -> ForwardPass:
    return ForwardPass(
        model.decoder,
        model.spec,
        arena,
        backends,
        max_num_requests=sizes.max_num_requests,
        max_model_len=sizes.max_model_len,
        links=links,
    )
