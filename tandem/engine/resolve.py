"""Builds an engine from its configuration: resolves every "auto" to a value, and refuses what cannot be honoured."""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from tandem.architecture.cost import ModelCost
from tandem.architecture.model import ModelSpec
from tandem.architecture.state import DTYPE_BYTES
from tandem.compute.arena import Arena
from tandem.compute.backends import choose_backends
from tandem.compute.choose import choose_kernels
from tandem.compute.native.bindings import NativeKernels
from tandem.compute.native.build import default_cache_dir
from tandem.compute.native.sampling import NativeDraws, load_draws
from tandem.compute.ranked_pages import RankedPages
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.compute.weights.row_rounding import check_rows_are_rounded
from tandem.core.clock import Clock
from tandem.core.config import FLOAT, EngineConfig, SchedulerConfig
from tandem.core.errors import ConfigurationError
from tandem.core.events import BlockEventSink
from tandem.core.memory import default_cpu_kv_bytes, total_bytes
from tandem.engine.activations import with_activations
from tandem.engine.drafts.choose import FROM_TEXT, name_of_drafter, resolve_drafter
from tandem.engine.drafts.hand_over import DraftHandOver
from tandem.engine.drafts.networks import DraftingNetwork, TargetModel, load_network
from tandem.engine.drafts.speculation import Speculation
from tandem.engine.engine import Engine
from tandem.engine.executor import Executor
from tandem.engine.forward_pass import ForwardPass
from tandem.engine.identity import ModelIdentity
from tandem.engine.masks import MaskMaker
from tandem.engine.ranks import (
    Ranks,
    ShardSizes,
    check_backends,
    check_drafter,
    check_exact,
    part_of,
    ranked_layout,
)
from tandem.engine.runner import ModelRunner
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.resumable import resumable_events
from tandem.kvcache.spec import KVLayout
from tandem.models.loader import LoadedModel, load_model, resolve_model_path
from tandem.scheduler.scheduler import Scheduler
from tandem.text.grammars import Grammars
from tandem.text.tokenizer import Tokenizer

DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}
_LOGGED_BYTES = 256 << 20  # allocations from this size on are logged
_CUDA_SPARE_SHARE = 0.1  # of a GPU's memory: contexts, activations, graphs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """Sizes that an engine is built with. `num_blocks` and `num_draft_blocks` do not count the null block."""

    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    num_draft_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine and those of its parts that others use: KV memory, description of the model, mask maker.

    Args:
        pages: KV pages of all ranks of this host; without ranks, those of `arena`.
    """

    engine: Engine
    arena: Arena
    model: ModelSpec
    masks: MaskMaker
    pages: RankedPages


def build_engine(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    emit: BlockEventSink | None = None,
    formats_of: FormatReader = read_formats,
    speculation: Speculation | None = None,
) -> Engine:
    """Builds an engine with `assemble` and returns it without its parts."""
    return assemble(config, clock=clock, emit=emit, formats_of=formats_of, speculation=speculation).engine


def assemble(
    config: EngineConfig,
    *,
    clock: Clock | None = None,
    emit: BlockEventSink | None = None,
    formats_of: FormatReader = read_formats,
    speculation: Speculation | None = None,
    ranks: Ranks | None = None,
) -> Assembly:
    """Load the checkpoint and build an engine around it.

    `num_threads`, when set, applies to PyTorch's CPU threads of the whole process.

    Args:
        emit: gets the events of the prefix cache; None = nobody.
        formats_of: the formats that weights may have.
        speculation: in place of what `config.speculate` names.
        ranks: others that compute parts of the model; this engine leads them, and ends them when it is closed.

    Raises:
        ConfigurationError: when a setting cannot be honoured.
        CheckpointError: when the checkpoint cannot be served exactly.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = resolve_device(config.device)
    path = resolve_model_path(config.model, allow_pickle=config.allow_pickle)
    kernels = choose_kernels(device, config.native_kernels)
    links = None if ranks is None else ranks.links
    if ranks is not None:
        check_exact(ranks.links, device, kernels)
    load = partial(
        load_model,
        dtype=config.dtype,
        device=device,
        kernels=kernels,
        packed_dir=default_cache_dir() / "weights" if config.pack_weights else None,
        allow_pickle=config.allow_pickle,
        formats_of=formats_of,
        links=links,
    )
    memory_bytes = _memory_bytes(device)
    model = load(
        str(path),
        max_model_len=config.max_model_len,
        memory_bytes=memory_bytes,
        # NOTE: not a draft model's, whose numbers shape no answer
        formats_of=with_activations(config.activations, device, formats_of),
    )
    if config.activations != FLOAT:
        check_rows_are_rounded(model.decoder.parameters.weights.values())
    tokenizer = Tokenizer.load(path)
    model = model.ended_by(tokenizer.eos_token_id)
    ranked = ranked_layout(model, config.block_size, links)
    own = part_of(links, ranked)
    layout = ranked.layout_of(own)
    others = partial(load, memory_bytes=memory_bytes - model.weight_bytes, links=None)
    served = TargetModel(model, path, tokenizer, kernels, device, formats_of, config.allow_pickle, others)
    config = resolve_drafter(config, served.offered_head)
    drafter = name_of_drafter(config)
    if config.kv_cache_bytes is not None:  # NOTE: a rank's share, and of state that ranks share there is one copy
        here, share = (1, 1) if ranks is None else (ranks.num_ranks_here, _num_hosts(ranks))
        config = replace(config, kv_cache_bytes=config.kv_cache_bytes * here // max(1, ranked.num_ranks // share))
    network = load_network(config, drafter, served)
    sizes = resolve_sizes(config, model.spec, layout, device, None if network is None else network.layout)
    backends = choose_backends(
        config.attention_backend, device, layout, model.spec.attention_softcap, sinks=model.spec.has_sinks
    )
    if ranks is not None:
        check_backends(ranks.links, backends)
    kv = KVCacheManager(
        layout,
        sizes.num_blocks,
        max_chunk_tokens=sizes.max_num_batched_tokens,
        prefix_caching=config.prefix_caching,
        watermark_pages=int(sizes.num_blocks * config.watermark),
        pin_share=config.pin_share,
        emit=resumable_events(layout, emit),
    )
    scheduler = Scheduler(_scheduler_config(config, sizes), kv)
    memory = None if ranks is None else ranks.take_pages(ranked.num_ranks, sizes.num_blocks + 1, layout.page_bytes)
    arena = _take_memory(layout, sizes.num_blocks + 1, device, None if memory is None else memory[own])
    grammars = Grammars(tokenizer, model.spec.vocab_size, model.spec.eos_token_ids)
    masks = MaskMaker(grammars, model.spec.vocab_size, device)
    forward = ForwardPass(
        model.decoder,
        model.spec,
        arena,
        backends,
        max_num_requests=config.max_num_running,
        max_model_len=sizes.max_model_len,
        links=links,
    )
    draws = load_draws() if isinstance(kernels, NativeKernels) else None
    if speculation is None and drafter is not None:
        speculation = _speculation(config, drafter, network, model.spec, sizes, device, draws)
    runner = ModelRunner(forward, masks=masks, draws=draws, speculation=speculation)
    layers_read = () if speculation is None else speculation.layers_read
    if ranks is not None:
        check_drafter(ranks.links, layers_read, config.speculate)
    shard_sizes = ShardSizes(arena.num_pages, sizes.max_model_len, config.max_num_running, layers_read)
    engine = Engine(
        runner if ranks is None else _led(ranks, runner, model.spec.fingerprint, shard_sizes),
        scheduler,
        kv,
        _identity(model, drafter),
        tokenizer=tokenizer,
        grammars=grammars,
        seed=config.seed,
        clock=clock,
        on_close=masks.close if ranks is None else partial(_close, masks, ranks),
        on_ranks_lost=None if ranks is None else ranks.renew,
    )
    pages = RankedPages.of(arena) if memory is None else RankedPages(ranked, memory)
    if speculation is not None and speculation.carrier is not None and (ranks is None or _num_hosts(ranks) == 1):
        engine.draft_states = DraftHandOver(speculation.carrier, kv, pages, partial(_note_drafting, engine))
    return Assembly(engine, arena, model.spec, masks, pages)


def _speculation(
    config: EngineConfig,
    name: str,
    network: DraftingNetwork | None,
    spec: ModelSpec,
    sizes: EngineSizes,
    device: torch.device,
    draws: NativeDraws | None,
) -> Speculation:
    """Speculation with the drafter `name`, made by `network` if it needs one."""
    made = partial(Speculation, max_drafts=config.num_speculative_tokens, adapts=not config.draft_always)
    if network is None:
        return made(FROM_TEXT[name]())
    drafter = network.drafter(
        config,
        device,
        vocab_size=spec.vocab_size,
        num_blocks=sizes.num_draft_blocks,
        max_chunk_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        draws=draws,
    )
    return made(drafter)


def _note_drafting(engine: Engine, seconds: float) -> None:
    """Add the drafter's time between two steps to the last step, so that the costs reported to routers include it."""
    engine.step_log.add(seconds)
    engine.counters.tally.saved_s -= seconds


def _led(ranks: Ranks, own: Executor, fingerprint: str, sizes: ShardSizes) -> Executor:
    ranks.prepare(fingerprint, sizes)
    return ranks.lead(own)


def _close(masks: MaskMaker, ranks: Ranks) -> None:
    masks.close()
    ranks.close()


def _take_memory(layout: KVLayout, num_pages: int, device: torch.device, pages: torch.Tensor | None) -> Arena:
    """Allocates the pool of KV blocks. All of it is written once, which can take seconds.

    `pages`: memory to be used; None = new.
    """
    began_s, num_bytes = time.monotonic(), layout.page_bytes * num_pages
    if num_bytes >= _LOGGED_BYTES:
        _log.info("taking %.2f GiB of memory for KV blocks", num_bytes / 2**30)
    arena = Arena(layout, num_pages, device, pages)
    if num_bytes >= _LOGGED_BYTES:
        _log.info("took the memory in %.1f s", time.monotonic() - began_s)
    return arena


def resolve_device(name: str) -> torch.device:
    """Device of this name; "auto" is the first CUDA device if there is one, else the CPU.

    Raises:
        ConfigurationError: for a device that PyTorch does not have here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name not in ("cpu", "cuda") and not re.fullmatch("cuda:(0|[1-9][0-9]*)", name):
        raise ConfigurationError(f"device={name!r} is not served; use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device={name!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return torch.device(name)


def resolve_sizes(
    config: EngineConfig, model: ModelSpec, layout: KVLayout, device: torch.device, draft: KVLayout | None = None
) -> EngineSizes:
    """Chooses the longest context and the sizes of the KV pools so that they fit each other and the machine.

    A context length that the user set must fit; else it shrinks to what the pools can hold.

    Args:
        draft: layout of a draft model's state. It shares the memory, so that both pools hold as many long requests.

    Raises:
        ConfigurationError: when a named context exceeds the model's or a pool.
    """
    batched = config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device.type], config.max_num_running)
    longest = config.max_model_len or model.max_position_embeddings
    if longest > model.max_position_embeddings:
        raise ConfigurationError(
            f"max_model_len={longest} exceeds the {model.max_position_embeddings} positions of the model"
        )
    budget_bytes = config.kv_cache_bytes or default_kv_cache_bytes(device, config.gpu_memory_utilization)
    if budget_bytes > _memory_bytes(device):
        raise ConfigurationError(
            f"kv_cache_bytes={budget_bytes} exceeds the {_memory_bytes(device)} bytes of memory of {device}; lower it"
        )
    layouts = [layout] if draft is None else [layout, draft]
    needs = [each.blocks_for(longest, batched) for each in layouts]
    all_bytes = sum(num * each.page_bytes for num, each in zip(needs, layouts, strict=True))
    pools = [min(budget_bytes * num // all_bytes, num * config.max_num_running) for num in needs]
    if config.max_model_len is None:
        longest = _longest_that_fits(layouts, pools, batched, longest)
    if longest < 2 or not _fits(layouts, pools, batched, longest):
        is_share = device.type == "cuda" and config.kv_cache_bytes is None
        held = _listed(pools, layouts)
        needed = _listed([each.blocks_for(max(longest, 2), batched) for each in layouts], layouts)
        raise ConfigurationError(
            f"a KV cache of {budget_bytes} bytes holds {held}; one request of {max(longest, 2)} tokens needs {needed}: "
            f"raise {'gpu_memory_utilization' if is_share else 'kv_cache_bytes'} or lower max_model_len"
        )
    return EngineSizes(pools[0], longest, batched, sum(pools[1:]))


def default_kv_cache_bytes(device: torch.device, gpu_memory_utilization: float = 0.9) -> int:
    """Default bytes of KV memory: a share of what is free, on the CPU at most 4 GiB.

    On a GPU, what this process' share leaves beside its weights, but no more than is free beside a tenth to spare.
    """
    if device.type == "cuda":
        free_bytes, all_bytes = torch.cuda.mem_get_info(device)
        spare_bytes = min(_CUDA_SPARE_SHARE, 1 - gpu_memory_utilization) * all_bytes
        own_bytes = gpu_memory_utilization * all_bytes - torch.cuda.memory_reserved(device)
        return max(0, int(min(free_bytes - spare_bytes, own_bytes)))
    return default_cpu_kv_bytes()


def _memory_bytes(device: torch.device) -> int:
    return int(torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else total_bytes())


def _longest_that_fits(layouts: Sequence[KVLayout], pools: Sequence[int], batched: int, longest: int) -> int:
    """The longest request, at most `longest`, whose blocks fit into the pools."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(layouts, pools, batched, middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(layouts: Sequence[KVLayout], pools: Sequence[int], batched: int, num_tokens: int) -> bool:
    return all(each.blocks_for(num_tokens, batched) <= num for each, num in zip(layouts, pools, strict=True))


def _listed(numbers: Sequence[int], layouts: Sequence[KVLayout]) -> str:
    """Numbers of blocks of the model, and of the draft model if there is one."""
    texts = [f"{num} blocks of {each.page_bytes} bytes" for num, each in zip(numbers, layouts, strict=True)]
    return texts[0] if len(texts) == 1 else f"{texts[0]}, and {texts[1]} of the draft model"


def _scheduler_config(config: EngineConfig, sizes: EngineSizes) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_num_running=config.max_num_running,
        max_num_waiting=config.max_num_waiting,
        max_model_len=sizes.max_model_len,
    )


def _identity(model: LoadedModel, drafter: str | None) -> ModelIdentity:
    config = model.spec
    cost = ModelCost(config.family, config, kv_bits=8 * DTYPE_BYTES[config.dtype])
    return ModelIdentity(
        config.fingerprint,
        config.vocab_size,
        config.eos_token_ids,
        model.generation_defaults,
        drafter,
        cost.read_bytes,
    )


def _num_hosts(ranks: Ranks) -> int:
    """Number of hosts among which the ranks are divided."""
    links = ranks.links
    return links.shard.num_ranks * links.num_stages * links.num_contexts // ranks.num_ranks_here
