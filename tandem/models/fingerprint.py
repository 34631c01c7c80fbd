"""Fingerprint of a model, compared by two workers before one uses the other's KV: a digest of configuration, dtype and
weights.

It covers every number of the configuration that affects results, the format of quantised weights, and of every tensor
its name, shape, stored dtype and three samples of its bytes (first, middle, last 4 KiB): milliseconds for any size.
Equal fingerprints mean the same KV unless weights were edited between the samples. It guards against mistakes, not
forgery.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from tandem.architecture.model import EMBEDDING, HEAD, ModelSpec
from tandem.models.checkpoint import Checkpoint
from tandem.models.load_plan import LoadingPlan
from tandem.models.weights import Sources

_SAMPLE_BYTES = 4096
_PAGES_BYTES = 3 << 21  # NOTE: the kernel maps up to a huge page around each sample


def compute_fingerprint(checkpoint: Checkpoint, plan: LoadingPlan, sources: Sources, model: ModelSpec) -> str:
    """Fingerprint of a model, 64 hexadecimal digits, with the tensors of `plan`, which are taken from `sources`. It
    does not depend on how tensors are distributed over files, nor on token ids and limits that do not change KV.
    """
    shaping = replace(model, fingerprint="", eos_token_ids=(), bos_token_id=None, max_position_embeddings=0)
    digest = hashlib.sha256(repr(shaping).encode())
    for layer in shaping.layers:
        for further in filter(None, (layer.parallel_mixers, layer.connections)):
            digest.update(f"\0{further}".encode())
    if shaping.streams is not None:
        digest.update(f"\0{shaping.streams}".encode())
    return _with_tensors(digest, checkpoint, plan, sources)


def compute_head_fingerprint(
    model: ModelSpec, spec: object, checkpoint: Checkpoint, plan: LoadingPlan, sources: Sources
) -> str:
    """Fingerprint of a network described by `spec` that reads hidden states of `model`, whole or one rank's part."""
    return _with_tensors(hashlib.sha256(f"{model.fingerprint}\0{spec!r}".encode()), checkpoint, plan, sources)


def _with_tensors(digest: "hashlib._Hash", checkpoint: Checkpoint, plan: LoadingPlan, sources: Sources) -> str:
    for weight, weight_format in plan.weights:
        if weight_format.checkpoint_tensors(weight) != (weight,):  # NOTE: one that is its own tensor is covered by that
            digest.update(f"\0{weight.name}\0{weight_format.name}".encode())
    parameters: dict[str, str] = {}  # of each stored tensor, the first that is made of it
    for name in sorted(sources):
        if name == HEAD and sources[name] == sources.get(EMBEDDING):
            continue  # NOTE: tied, it is the embedding
        parameters.setdefault(sources[name].tensor, name)
    for stored, name in parameters.items():
        outline = checkpoint.outline(stored)
        digest.update(f"\0{name}\0{tuple(outline.shape)}\0{outline.dtype}\0".encode())
        for sample in _samples(checkpoint, stored, outline):
            digest.update(sample)
        checkpoint.touched(min(outline.nbytes, _PAGES_BYTES))
    return digest.hexdigest()


def _samples(checkpoint: Checkpoint, name: str, outline: torch.Tensor) -> Iterator[bytes]:
    count = _SAMPLE_BYTES // outline.element_size()
    middle = max(0, outline.numel() // 2 - count // 2)
    for start in (0, middle, max(0, outline.numel() - count)):
        sample = slice(start, start + count)
        if outline.is_contiguous():
            elements = checkpoint.read(name, outline.view(-1)[sample])
        else:  # NOTE: some in PyTorch's files
            elements = checkpoint.tensor(name).reshape(-1)[sample]
        yield elements.view(torch.uint8).numpy().tobytes()
