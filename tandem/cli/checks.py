"""Checks of `tandem up` before any process is started: model, settings, cores and port."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from tandem.accounts.open import open_store
from tandem.architecture.quantisation import find_quantisation, read_config
from tandem.architecture.registry import find_family
from tandem.architecture.shards import shard_model
from tandem.architecture.stages import check_group, states_of_stages
from tandem.core.clock import SystemClock
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.gateway.model import answer_format
from tandem.gateway.moderation.choose import choose_moderator
from tandem.kvcache.ranked_layout import RankedLayout, num_parts
from tandem.kvcache.spec import build_layout
from tandem.models.pickles import pickle_refused
from tandem.process.ports import bound
from tandem.text.chat_template import ChatTemplate
from tandem.text.tokenizer import Tokenizer
from tandem.transport.choose import AUTO

_ANY_DTYPE = "bfloat16"  # NOTE: of the same width for all layers, so none changes how they are grouped
_SAFETENSORS, _PICKLES = "model*.safetensors", "pytorch_model*.bin"


def check_model(path: Path, *, allow_pickle: bool = False) -> Tokenizer:
    """Checks a model directory without reading its weights; returns its tokenizer.

    Raises:
        CheckpointError: architecture, an option, the format of the weights or the tokenizer is not supported, or a file
            is missing or damaged.
    """
    fields = read_config(path)
    find_quantisation(fields)
    find_family(fields).read_model(fields)
    _check_weights(path, allow_pickle)
    return Tokenizer.load(path)


def check_widths(
    path: Path,
    widths: Mapping[str, int],
    block_size: int,
    transport: str = AUTO,
    stages: Mapping[str, int] | None = None,
    contexts: Mapping[str, int] | None = None,
) -> None:
    """Checks that workers of these sizes can divide the model, and hand its KV over to each other.

    Args:
        path: a model that `check_model` accepts.
        widths: by role, the number of ranks among which a worker divides each layer.
        transport: the transport by which KV is handed over.
        stages, contexts: by role, the number of stages of layers, and of parts of prompts; None = one each.

    Raises:
        ConfigurationError: the message says why not, and what can be had.
    """
    ones = dict.fromkeys(widths, 1)
    stages, contexts = stages or ones, contexts or ones
    for role, width in widths.items():
        check_group(width, stages[role], contexts[role])
    if max(*widths.values(), *stages.values()) == 1:
        return
    fields = read_config(path)
    model = find_family(fields).read_model(fields)
    for width in widths.values():
        shard_model(model, 0, width)
    whole = build_layout(replace(model, dtype=_ANY_DTYPE).kv_specs, block_size)
    in_stages = {role: states_of_stages(model, number) for role, number in stages.items()}
    if len({(num_parts(whole, width), in_stages[role]) for role, width in widths.items()}) == 1:
        return
    named = " and ".join(_flags(role, width, stages[role]) for role, width in widths.items())
    if transport == "nixl":
        raise ConfigurationError(
            f"{named} with --transport nixl, which reads whole pages only; leave --transport at auto, or give both the "
            "same number"
        )
    if not all(RankedLayout(whole, width).is_shared for width in widths.values()):
        raise ConfigurationError(
            f"{named} group the layers of this {model.family} model in different ways, so that blocks cannot be handed "
            "over; give both the same number, or --prefill 0"
        )


def _flags(role: str, width: int, num_stages: int) -> str:
    return f"--{role}-tp={width}" + (f" --{role}-pp={num_stages}" if num_stages > 1 else "")


def _check_weights(path: Path, allow_pickle: bool) -> None:
    if next(path.glob(_SAFETENSORS), None) is not None:
        return
    pickled = next(path.glob(_PICKLES), None)
    if pickled is None:
        raise CheckpointError(f"{path} has no weights: {_SAFETENSORS} or {_PICKLES} is needed; download it again")
    if not allow_pickle:
        raise pickle_refused(pickled)


def check_port(host: str, port: int) -> None:
    """Raises `ConfigurationError` if the gateway could not listen there."""
    try:
        bound(host, port).close()
    except OSError as error:
        raise ConfigurationError(
            f"port={port}: nothing can listen at {host}:{port} ({error.strerror}); choose an address of this "
            "machine by --host; where the port is taken, stop what took it or choose another by --port (PORT= of "
            "`make run`), 0 = any free one"
        ) from error


def check_parsers(path: Path, tokenizer: Tokenizer, tool_parser: str, reasoning_parser: str) -> None:
    """Raises `ConfigurationError` if the gateway has no parsers of these names, or none for this model's answers."""
    answer_format(str(path), tokenizer, ChatTemplate.find(path), tool_parser, reasoning_parser)


def check_backend(path: Path, name: str, block_size: int, *, on_cpus: bool) -> None:
    """Raises `ConfigurationError` if `attention_backend` is unknown, or cannot serve this model on CPUs."""
    if name == AUTO:
        return
    # NOTE: PyTorch takes 160 MB, and a cluster's supervisor has no other use for it.
    import torch

    from tandem.compute.backends import check_name, choose_backends

    check_name(name)
    if on_cpus:
        fields = read_config(path)
        model = find_family(fields).read_model(fields)
        layout = build_layout(replace(model, dtype=_ANY_DTYPE).kv_specs, block_size)
        choose_backends(name, torch.device("cpu"), layout, model.attention_softcap, sinks=model.has_sinks)


def check_gateway(moderation: str | None, accounts: str | None) -> None:
    """Raises `ConfigurationError` if the gateway could not create this moderator, or not use this file of accounts.

    A Redis or a moderation endpoint is not contacted. A file that does not exist is made.
    """

    async def tried() -> None:
        if (moderator := choose_moderator(moderation)) is not None:
            await moderator.close()
        if accounts is not None:
            await open_store(accounts, SystemClock()).close()

    asyncio.run(tried())


def check_cores(num_ranks: Mapping[str, int], num_cores: int) -> None:
    """Raises `ConfigurationError` if a worker of some role has more ranks than there are cores for workers."""
    for role, number in num_ranks.items():
        if number > max(1, num_cores):
            raise ConfigurationError(
                f"a {role} worker of {number} ranks, and {num_cores} cores: ranks wait for each other in every layer, "
                f"so each needs a core; give it at most {num_cores} ranks by tp, pp and cp, or --cpus any, with which "
                "they take turns"
            )


def check_cpus(cpus: Collection[int], allowed: Collection[int]) -> None:
    """Raises `ConfigurationError` if the cores for workers are not among those that this process may use."""
    if missing := sorted(set(cpus) - set(allowed)):
        raise ConfigurationError(
            f"cpus names core {missing[0]}, which is not one of the {len(allowed)} that may be used here: "
            f"{', '.join(map(str, sorted(allowed)))}"
        )
