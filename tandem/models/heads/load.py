"""Loading of draft heads for a loaded model: its checkpoint's multi-token prediction module, or an EAGLE-3 head."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tandem.architecture.expert_stacks import layer_with_stored_blocks
from tandem.architecture.families import eagle3
from tandem.architecture.heads import mtp_of
from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.architecture.quantisation import read_config
from tandem.architecture.registry import find_family
from tandem.compute.ops import Kernels
from tandem.compute.weights.base import Weight, WeightFormat
from tandem.compute.weights.formats import FormatReader, read_formats
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.models.checkpoint import Checkpoint, open_checkpoint
from tandem.models.fingerprint import compute_head_fingerprint
from tandem.models.heads.base import LoadedHead
from tandem.models.heads.eagle3 import Eagle3Head
from tandem.models.heads.mtp import MtpHead
from tandem.models.load_plan import LoadingPlan
from tandem.models.loader import LoadedModel
from tandem.models.weights import load_parameters, match_plan, stored_names, stored_tensors

_log = logging.getLogger(__name__)

_SHARED = re.compile(r".*\.(embed_tokens|shared_head\.head)\.\w+")  # the model's own, of floats or codes


def carries_mtp(path: Path, model: LoadedModel, *, allow_pickle: bool = False) -> bool:
    """Whether a model's checkpoint has exactly one module for multi-token prediction, of a kind that is served."""
    spec = mtp_of(model.spec)
    if spec is None or len(model.spec.mtp_layers) > 1:
        return False
    fields = read_config(path)
    names = stored_names(open_checkpoint(path, allow_pickle=allow_pickle), find_family(fields).parameter_name)
    return any(name.startswith(f"{spec.projection.name}.") for name in names)  # NOTE: codes have names of their own


def load_mtp(
    path: Path,
    model: LoadedModel,
    *,
    kernels: Kernels,
    device: torch.device,
    formats_of: FormatReader = read_formats,
    allow_pickle: bool = False,
) -> LoadedHead:
    """Loads the multi-token prediction module in the checkpoint of `model`, at `path`.

    Raises:
        ConfigurationError: it has none, or several, which would have to be chained.
        CheckpointError: the module's tensors are not as they should be.
    """
    spec = mtp_of(model.spec)
    if spec is None or not carries_mtp(path, model, allow_pickle=allow_pickle):
        num_layers = len(model.spec.mtp_layers)
        none = "no module for multi-token prediction that is served"
        found = f"{num_layers} modules, and one is served" if num_layers > 1 else none
        raise ConfigurationError(f"the checkpoint has {found}; use another drafter, or off")
    fields = read_config(path)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    names = stored_names(checkpoint, find_family(fields).parameter_name)
    unserved = model.spec.unserved
    own = {name: source for name, source in names.items() if name.startswith(unserved) and not _SHARED.fullmatch(name)}
    spec = replace(spec, layer=layer_with_stored_blocks(spec.layer, own))
    formats = formats_of(fields, kernels, stored_tensors(checkpoint, names))
    plan = LoadingPlan.of_tensors(spec.tensors(), formats)
    sources = match_plan(checkpoint, plan, formats, own)
    parameters = load_parameters(checkpoint, plan, sources, model.spec.dtype, device)
    num_bytes, whole_head = plan.num_bytes(model.spec.dtype), None
    if model.spec.head_tokens is not None:
        whole_head, head_bytes = _load_whole_head(checkpoint, model.spec, formats, names, device)
        num_bytes += head_bytes
    head = MtpHead(spec, model.decoder, parameters, kernels, whole_head)
    fingerprint = compute_head_fingerprint(model.spec, spec, checkpoint, plan, sources)
    return LoadedHead(head, num_bytes, model.spec.max_position_embeddings, fingerprint)


def _load_whole_head(
    checkpoint: Checkpoint,
    part: ModelSpec,
    formats: Sequence[WeightFormat],
    names: Mapping[str, str],
    device: torch.device,
) -> tuple[Weight, int]:
    """Output head, and its bytes, of the whole model of which `part` is one rank's. `names`: as `stored_names`."""
    weight = replace(part, head_tokens=None).head
    assert weight is not None, "the leader is in the last stage"
    made_of = weight.name if weight.source is None else weight.source.tensor
    stored = {EMBEDDING: names[HEAD], **names} if HEAD in names else names  # NOTE: one may serve as both
    own = {name: source for name, source in stored.items() if name.startswith(made_of.removesuffix("weight"))}
    plan = LoadingPlan.of_tensors((weight,), formats)
    sources = match_plan(checkpoint, plan, formats, own)
    parameters = load_parameters(checkpoint, plan, sources, part.dtype, device)
    return parameters.weights[weight.name], plan.num_bytes(part.dtype)


def find_eagle3(path: Path, model: LoadedModel, *, allow_pickle: bool = False) -> Path | None:
    """Directory of an EAGLE-3 head for `model` inside its checkpoint at `path`, see `eagle3.DIRECTORIES`; None = there
    is none. A head whose configuration does not fit is skipped with a warning. Only names of its weights are read.
    """
    for directory in (path / name for name in eagle3.DIRECTORIES):
        if not (directory / "config.json").is_file():
            continue
        try:
            names = stored_names(open_checkpoint(directory, allow_pickle=allow_pickle), eagle3.parameter_name)
            eagle3.read_eagle3(read_config(directory), model.spec, names)
        except CheckpointError as error:
            _log.warning("speculate='auto' passes over the head in %s: %s", directory, error)
        else:
            return directory
    return None


def load_eagle3(
    path: Path,
    model: LoadedModel,
    *,
    kernels: Kernels,
    device: torch.device,
    formats_of: FormatReader = read_formats,
    allow_pickle: bool = False,
) -> LoadedHead:
    """Loads the EAGLE-3 head in the directory `path`, for `model`.

    Raises:
        CheckpointError: it is no such head, damaged, or that of another model.
    """
    fields = read_config(path)
    checkpoint = open_checkpoint(path, allow_pickle=allow_pickle)
    names = stored_names(checkpoint, eagle3.parameter_name)
    spec = eagle3.read_eagle3(fields, model.spec, names)
    formats = formats_of(fields, kernels, stored_tensors(checkpoint, names))
    plan = LoadingPlan.of_tensors(spec.tensors(), formats)
    sources = match_plan(checkpoint, plan, formats, names)
    parameters = load_parameters(checkpoint, plan, sources, model.spec.dtype, device)
    head = Eagle3Head(spec, model.decoder, parameters, kernels)
    fingerprint = compute_head_fingerprint(model.spec, spec, checkpoint, plan, sources)
    return LoadedHead(head, plan.num_bytes(model.spec.dtype), model.spec.max_position_embeddings, fingerprint)
