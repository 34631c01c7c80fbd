"""Loader: turns a Hugging Face directory into a decoder ready to run, or raises an error that says what is wrong and
what would work.

The configuration is read and refused before any weight is touched, and every tensor is checked before any is loaded.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch

from tandem.architecture.fields import Fields
from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec, choose_rope_factors, limit_length
from tandem.architecture.quantisation import read_config
from tandem.architecture.registry import find_family
from tandem.architecture.rope import LongRopeScaling
from tandem.architecture.shards import head_bounds, shard_model
from tandem.architecture.stages import stage_of, states_of_stages
from tandem.architecture.state import StateSpec
from tandem.compute.collectives import Collectives, RankLinks
from tandem.compute.layer_states import TORCH_DTYPES
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import WeightFormat
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.compute.weights.shards import GatheredWeight, JoinedWeight, SummedWeight
from tandem.core.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, UnsupportedCheckpointError
from tandem.core.heap import large_buffers_given_back
from tandem.models.checkpoint import Checkpoint, open_checkpoint
from tandem.models.decoder import Decoder
from tandem.models.fingerprint import compute_fingerprint
from tandem.models.generation import read_generation_config
from tandem.models.hub import resolve_model_path
from tandem.models.layers.rotary import check_ropes
from tandem.models.load_plan import LoadingPlan
from tandem.models.packed import PackedFile
from tandem.models.parameters import Parameters
from tandem.models.weights import (
    Sources,
    load_parameters,
    match_parameters,
    sources_of_shard,
    stored_names,
    stored_tensors,
)

__all__ = ["LoadedModel", "load_model", "resolve_model_path"]

AUTO = "auto"  # the checkpoint's own dtype
_Options = ParamSpec("_Options")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, the whole or one rank's part.

    Args:
        generation_defaults: values in its `generation_config.json`, by sampling parameter name.
        weight_bytes: memory of its weights.
        states: `kv_specs` of the whole model, even if this is one rank's part.
        states_of_stages: number of these states in each pipeline stage.
    """

    spec: ModelSpec
    decoder: Decoder
    generation_defaults: Mapping[str, object]
    weight_bytes: int
    states: tuple[StateSpec, ...]
    states_of_stages: tuple[int, ...]

    def ended_by(self, eos_token_id: int | None) -> "LoadedModel":
        """This model with the tokenizer's end token added to those that end an answer, as its chat template needs."""
        if eos_token_id is None or eos_token_id >= self.spec.vocab_size:
            return self
        return replace(self, spec=replace(self.spec, eos_token_ids=_join_eos(self.spec, (eos_token_id,))))


def _naming_the_model(
    load: Callable[Concatenate[str, _Options], LoadedModel],
) -> Callable[Concatenate[str, _Options], LoadedModel]:
    """Adds the model's name to errors: a process may load several, and most errors only know the tensor's name."""

    @wraps(load)
    def named(path_or_hub_id: str, /, *args: _Options.args, **kwargs: _Options.kwargs) -> LoadedModel:
        try:
            return load(path_or_hub_id, *args, **kwargs)
        except CheckpointError as error:
            if path_or_hub_id in str(error):
                raise
            raise type(error)(f"{path_or_hub_id}: {error}") from error

    return named


@_naming_the_model
@large_buffers_given_back()
def load_model(
    path_or_hub_id: str,
    *,
    dtype: str = AUTO,
    device: torch.device,
    kernels: Kernels,
    max_model_len: int | None = None,
    packed_dir: Path | None = None,
    memory_bytes: int | None = None,
    allow_pickle: bool = False,
    formats_of: FormatReader = read_formats,
    links: RankLinks | None = None,
) -> LoadedModel:
    """Loads a model, or one rank's part of it.

    Args:
        path_or_hub_id: a directory, a GGUF file, or the name of a Hugging Face repository.
        dtype: float32, bfloat16, float16, or auto = the checkpoint's own.
        device: where the parameters go; on the CPU they stay views of the mapped files where the dtype allows.
        kernels: the decoder's arithmetic.
        max_model_len: the longest sequence that will be computed, which decides the size of the rotary tables and the
            choice of their factors; None = max_position_embeddings.
        packed_dir: directory for a copy of the weights in the kernels' own layout (`packed`); None = no copy.
        memory_bytes: memory of `device`; a model whose weights need more is refused. None = no limit.
        allow_pickle: weights may be PyTorch files if there are no safetensors.
        formats_of: reader of the formats that weights may have.
        links: the rank whose part of the model is loaded, and its links to others; None = the whole model.

    Raises:
        CheckpointError: the directory cannot be served; see its subclasses.
        ConfigurationError: a dtype that does not exist, a length beyond what the model was made for, or a number of
            ranks that cannot share it.
    """
    directory = resolve_model_path(path_or_hub_id, allow_pickle=allow_pickle)
    fields = read_config(directory)
    _check_dtype_name(dtype)
    family = find_family(fields)
    spec = family.read_model(fields)
    _log_rope_factors(spec, max_model_len)
    spec = choose_rope_factors(spec, max_model_len)
    check_ropes(mixer.rope for mixer in spec.mixers)
    if links is not None:  # NOTE: refused before files are opened
        shard_model(spec, links.shard.rank, links.shard.num_ranks)
        stage_of(spec, links.stage, links.num_stages)
    generation = read_generation_config(directory)
    if generation.eos_token_ids and not _names_eos(fields):
        spec = replace(spec, eos_token_ids=())
    named = dtype if dtype != AUTO else _named_dtype(fields)
    if named is not None:
        plan = LoadingPlan.of(spec, formats_of(fields, kernels, None))
        _refuse_what_does_not_fit(plan, replace(spec, dtype=named), directory, device, memory_bytes)
    checkpoint = open_checkpoint(directory, allow_pickle=allow_pickle)
    names = stored_names(checkpoint, family.parameter_name)
    formats = formats_of(fields, kernels, stored_tensors(checkpoint, names))
    spec, plan, sources = match_parameters(checkpoint, spec, formats, names)
    spec = replace(spec, dtype=named or _stored_dtype(checkpoint))
    _refuse_what_does_not_fit(plan, spec, directory, device, memory_bytes)
    spec = replace(
        spec,
        fingerprint=compute_fingerprint(checkpoint, plan, sources, spec),
        eos_token_ids=_join_eos(spec, generation.eos_token_ids),
    )
    spec = limit_length(spec, max_model_len)
    checkpoint.release()
    states = spec.kv_specs
    in_stages = states_of_stages(spec, 1 if links is None else links.num_stages)
    with _with_a_remedy(links):
        if links is not None:
            spec, plan, sources = _plan_shard(plan, spec, formats, sources, links)
        parameters = _load(checkpoint, plan, sources, spec, device, packed_dir)
    if links is not None and links.shard.num_ranks > 1:
        parameters = _completed(parameters, spec, links.shard)
    decoder = Decoder(spec, parameters, kernels)
    return LoadedModel(spec, decoder, generation.defaults, plan.num_bytes(spec.dtype), states, in_stages)


def _log_rope_factors(spec: ModelSpec, max_model_len: int | None) -> None:
    """Logs which list of LongRoPE factors is used for all sequences, if the model has any."""
    length = spec.max_position_embeddings if max_model_len is None else max_model_len
    for scaling in {mixer.rope.scaling for mixer in spec.mixers if mixer.rope is not None}:
        if not isinstance(scaling, LongRopeScaling):
            continue
        if scaling.is_long(length):
            _log.warning(
                "longrope: long_factor is used for every position, because max_model_len=%d exceeds the original %d "
                "tokens; for short_factor, which the model was trained with for sequences of up to that, give "
                "max_model_len=%d",
                *(length, scaling.original_length, scaling.original_length),
            )
        else:
            _log.info("longrope: short_factor is used, because max_model_len=%d needs no more", length)


def _load(
    checkpoint: Checkpoint,
    plan: LoadingPlan,
    sources: Sources,
    spec: ModelSpec,
    device: torch.device,
    packed_dir: Path | None,
) -> Parameters:
    """Weights from the packed file if there is one; the other weights and all tensors from the checkpoint."""
    file = None
    if packed_dir is not None and device.type == "cpu":  # NOTE: what is mapped is the CPU's memory
        file = PackedFile.of(checkpoint, plan, sources, spec, packed_dir)
    packed = {} if file is None else file.load(checkpoint)
    if device.type == "cpu" and not packed:
        checkpoint.cache_in_huge_pages()
    parameters = load_parameters(checkpoint, plan, sources, spec.dtype, device, packed)
    weights = parameters.weights
    return (
        parameters
        if HEAD in weights or spec.head is None
        else Parameters(parameters.tensors, {**weights, HEAD: weights[EMBEDDING]})
    )


def _plan_shard(
    whole: LoadingPlan, spec: ModelSpec, formats: Sequence[WeightFormat], sources: Sources, links: RankLinks
) -> tuple[ModelSpec, LoadingPlan, Sources]:
    """One rank's part of a model: its spec, its plan, and the sources of its tensors."""
    coded = {weight.name for weight, each in whole.weights if each.checkpoint_tensors(weight) != (weight,)}
    shard = shard_model(spec, links.shard.rank, links.shard.num_ranks, coded=coded)
    shard = stage_of(shard, links.stage, links.num_stages)
    plan = LoadingPlan.of(shard, formats)
    return shard, plan, sources_of_shard(plan, whole, sources)


@contextmanager
def _with_a_remedy(links: RankLinks | None) -> Iterator[None]:
    """Adds to an error about one rank's part of a model that the whole model may be served."""
    try:
        yield
    except UnsupportedCheckpointError as error:
        if links is None or links.shard.num_ranks == 1:
            raise
        raise ConfigurationError(f"tp={links.shard.num_ranks} cannot split this: {error}; or use tp=1") from error


def _completed(parameters: Parameters, shard: ModelSpec, collectives: Collectives) -> Parameters:
    """Parameters of a shard whose products are completed with those of the other ranks."""
    weights = dict(parameters.weights)
    for tensor in shard.weights():
        if tensor.is_partial:
            weights[tensor.name] = SummedWeight(weights[tensor.name], collectives)
        elif tensor.is_gathered:
            weights[tensor.name] = GatheredWeight(weights[tensor.name], collectives)
    if shard.head_tokens is not None and shard.head is not None:
        bounds = head_bounds(shard.vocab_size, collectives.num_ranks)
        weights[HEAD] = JoinedWeight(weights[HEAD], collectives, bounds)
    return Parameters(parameters.tensors, weights, collectives)


def _refuse_what_does_not_fit(
    plan: LoadingPlan, spec: ModelSpec, directory: Path, device: torch.device, memory_bytes: int | None
) -> None:
    """NOTE: weights on the CPU are mapped files, so a model that is too large would load and then read its disk for
    every token. One file that is larger than memory cannot be mapped at all, so this is asked before any is opened, if
    the dtype is known by then.
    """
    total = plan.num_bytes(spec.dtype)
    if memory_bytes is None or total <= memory_bytes:
        return
    routed = [layer.routed for layer in spec.layers]
    num_expert_elements = sum(r.num_experts * r.expert_size for r in routed if r is not None)
    experts = total * num_expert_elements / sum(tensor.size for tensor in spec.tensors())
    part = f", {experts / 1e9:.3g} GB of them experts," if experts else ""
    raise CheckpointError(
        f"the weights of {directory} take {total / 1e9:.3g} GB in {spec.dtype}{part} and {device} has "
        f"{memory_bytes / 1e9:.3g} GB of memory; serve it on a machine with more, or in a smaller dtype"
    )


def _names_eos(fields: Fields) -> bool:
    """Whether the configuration says what ends an answer. NOTE: else transformers takes the ends of
    `generation_config.json` alone; the family's own default may be a word of this model's vocabulary.
    """
    return any(section.has("eos_token_id") for section in (fields, fields.section("text_config")) if section)


def _join_eos(spec: ModelSpec, others: tuple[int, ...]) -> tuple[int, ...]:
    joined = tuple(sorted({*spec.eos_token_ids, *others}))
    if joined and joined[-1] >= spec.vocab_size:
        raise CorruptCheckpointError(
            f"eos_token_id={joined[-1]} of config.json or generation_config.json is no token of the model, whose "
            f"vocabulary is 0 to {spec.vocab_size - 1}, so nothing would end an answer; correct it"
        )
    return joined


def _check_dtype_name(dtype: str) -> None:
    if dtype != AUTO and dtype not in TORCH_DTYPES:
        raise ConfigurationError(f"dtype={dtype!r} is not served; choose {AUTO} or one of {', '.join(TORCH_DTYPES)}")


def _named_dtype(fields: Fields) -> str | None:
    """The configuration's dtype, for which `auto` stands. None = it has none, and `_stored_dtype` is used."""
    text = fields.section("text_config")
    for section in (fields, text):
        for key in ("dtype", "torch_dtype"):
            name = section.text(key) if section is not None else None
            if name is not None:
                if name.removeprefix("torch.") not in TORCH_DTYPES:
                    raise fields.unsupported(key, ", ".join(TORCH_DTYPES))
                return name.removeprefix("torch.")
    return None


def _stored_dtype(checkpoint: Checkpoint) -> str:
    """Dtype of the first tensor that has one in which models are served; each model has norms with one. Tensors of
    other dtypes are codes, or belong to parts that are not served.
    """
    dtypes = (str(checkpoint.outline(name).dtype).removeprefix("torch.") for name in checkpoint.names)
    return next((dtype for dtype in dtypes if dtype in TORCH_DTYPES), "float32")
