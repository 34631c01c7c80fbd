"""Choice of the attention backend that serves a model: the first in preference order that does not refuse.

A backend is imported only when it is tried.
"""

from collections.abc import Callable
from importlib import import_module

import torch

from tandem.architecture.state import KVSpec
from tandem.attention.base import AttentionBackend
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import KVLayout

_Factory = Callable[[torch.device], AttentionBackend]

_BACKENDS: dict[str, tuple[str, str]] = {
    "native": ("tandem.attention.native_backend", "NativeBackend"),
    "flashinfer": ("tandem.attention.flashinfer_backend", "FlashInferBackend"),
    "varlen": ("tandem.attention.varlen_backend", "VarlenBackend"),
    "triton": ("tandem.attention.triton_backend", "TritonBackend"),
    "reference": ("tandem.attention.reference", "ReferenceBackend"),
}
PREFERENCE = {
    "cpu": ("native", "reference"),
    "cuda": ("varlen", "flashinfer", "triton", "reference"),
}


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """Import and construct one backend.

    Raises:
        ConfigurationError: for a name that is none of ours.
    """
    if name not in _BACKENDS:
        raise ConfigurationError(f"attention_backend={name!r} is unknown; choose auto or one of {sorted(_BACKENDS)}")
    module, attribute = _BACKENDS[name]
    factory: _Factory = getattr(import_module(module), attribute)
    return factory(device)


def choose_backend(
    name: str, device: torch.device, layout: KVLayout, softcap: float, *, sinks: bool = False
) -> AttentionBackend:
    """The named backend, or for "auto" the preferred one that serves every KV group.

    Raises:
        ConfigurationError: when it, or every candidate, refuses; with the reasons.
    """
    candidates = PREFERENCE[device.type] if name == "auto" else (name,)
    reasons = []
    for candidate in candidates:
        backend = create_backend(candidate, device)
        reason = _refusal(backend, layout, softcap, sinks)
        if reason is None:
            return backend
        reasons.append(f"{candidate}: {reason}")
    raise ConfigurationError(f"attention_backend={name!r} cannot serve this model on {device}: {'; '.join(reasons)}")


def _refusal(backend: AttentionBackend, layout: KVLayout, softcap: float, sinks: bool) -> str | None:
    for group in layout.groups:
        if not isinstance(group.spec, KVSpec):
            return f"it keeps K and V, not {group.spec}"
        reason = backend.refuses(group.spec, layout.block_size, softcap, sinks=sinks)
        if reason is not None:
            return reason
    return None
