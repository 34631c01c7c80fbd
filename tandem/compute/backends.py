"""Choice of attention backends: for each kind of state that a model keeps, the first in order of preference that can
serve it.

Backends are registered in a table, by the kind of state that they read and the device they run on. A backend is
imported only when it is tried.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec, RowsSpec
from tandem.architecture.state import ChosenKVSpec, IndexedLatentSpec, KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.compute.attention import Backends, StateBackend
from tandem.compute.block_sparse import BlocksAsKV
from tandem.compute.entries import EntryInputsBackend, RowsAsKV
from tandem.compute.latents import LatentsAsKV
from tandem.compute.torch.entries import EntriesAsKV
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import KVLayout


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A backend in the table.

    Args:
        module, attribute: its class, which is constructed with the device.
        wrapper: adapts a backend for K and V to another kind of state; None = the backend reads this kind itself.
    """

    name: str
    module: str
    attribute: str
    wrapper: Callable[[Any], Any] | None = None

    def create(self, device: torch.device) -> Any:
        """Imports and constructs the backend."""
        backend = getattr(import_module(self.module), self.attribute)(device)
        return backend if self.wrapper is None else self.wrapper(backend)


BackendTable = Mapping[type[StateSpec], Mapping[str, Sequence[BackendEntry]]]
"""Kind of state -> type of device -> backends, the preferred one first."""

_NATIVE = BackendEntry("native", "tandem.compute.native.attention", "NativeBackend")
_REFERENCE = BackendEntry("reference", "tandem.compute.torch.attention", "ReferenceBackend")
_RECURRENT_REFERENCE = BackendEntry("reference", "tandem.compute.torch.recurrent", "ReferenceRecurrentBackend")
_LATENT_REFERENCE = replace(_REFERENCE, wrapper=LatentsAsKV)
_INDEXED_REFERENCE = BackendEntry("reference", "tandem.compute.torch.sparse", "ReferenceIndexedBackend")
_BLOCK_REFERENCE = replace(_REFERENCE, wrapper=BlocksAsKV)

BACKENDS: BackendTable = {
    KVSpec: {
        "cpu": (_NATIVE, _REFERENCE),
        "cuda": (
            BackendEntry("varlen", "tandem.compute.cuda.varlen_backend", "VarlenBackend"),
            BackendEntry("flashinfer", "tandem.compute.cuda.flashinfer_backend", "FlashInferBackend"),
            BackendEntry("triton", "tandem.compute.cuda.triton_backend", "TritonBackend"),
            _REFERENCE,
        ),
    },
    LatentSpec: {
        "cpu": (replace(_NATIVE, wrapper=LatentsAsKV), _LATENT_REFERENCE),
        "cuda": (BackendEntry("triton", "tandem.compute.cuda.latents", "TritonLatentBackend"), _LATENT_REFERENCE),
    },
    IndexedLatentSpec: {
        "cpu": (BackendEntry("native", "tandem.compute.native.sparse", "NativeIndexedBackend"), _INDEXED_REFERENCE),
        "cuda": (_INDEXED_REFERENCE,),
    },
    ChosenKVSpec: {
        "cpu": (replace(_NATIVE, wrapper=BlocksAsKV), _BLOCK_REFERENCE),
        "cuda": (_BLOCK_REFERENCE,),
    },
    RowsSpec: {
        "cpu": (replace(_NATIVE, wrapper=RowsAsKV), replace(_REFERENCE, wrapper=RowsAsKV)),
        "cuda": (replace(_REFERENCE, wrapper=RowsAsKV),),
    },
    EntriesSpec: {
        "cpu": (
            BackendEntry("native", "tandem.compute.native.sparse", "NativeEntriesBackend"),
            replace(_REFERENCE, wrapper=EntriesAsKV),
        ),
        "cuda": (replace(_REFERENCE, wrapper=EntriesAsKV),),
    },
    EntryInputsSpec: {
        "cpu": (replace(_NATIVE, wrapper=EntryInputsBackend), replace(_REFERENCE, wrapper=EntryInputsBackend)),
        "cuda": (replace(_REFERENCE, wrapper=EntryInputsBackend),),
    },
    RecurrentSpec: {
        "cpu": (
            BackendEntry("native", "tandem.compute.native.recurrent", "NativeRecurrentBackend"),
            _RECURRENT_REFERENCE,
        ),
        "cuda": (
            BackendEntry("triton", "tandem.compute.cuda.recurrent", "TritonRecurrentBackend"),
            _RECURRENT_REFERENCE,
        ),
    },
}


def check_name(name: str, table: BackendTable = BACKENDS) -> None:
    """Raises `ConfigurationError` unless the name is "auto" or that of a backend."""
    known = sorted({entry.name for devices in table.values() for entries in devices.values() for entry in entries})
    if name not in ("auto", *known):
        raise ConfigurationError(f"attention_backend={name!r} is unknown; choose auto or one of {known}")


def choose_backends(
    name: str,
    device: torch.device,
    layout: KVLayout,
    softcap: float,
    *,
    sinks: bool = False,
    table: BackendTable = BACKENDS,
) -> Backends:
    """For each kind of state in `layout` the named backend, or for "auto" the preferred one that serves all its groups.

    Raises:
        ConfigurationError: the name is unknown, or all candidates refuse some kind; the message has all reasons.
    """
    check_name(name, table)
    chosen: dict[type[StateSpec], Any] = {}
    reasons = []
    for kind, specs in _by_kind(layout).items():
        devices = table.get(kind, {})
        entries = [entry for entry in devices.get(device.type, ()) if name in ("auto", entry.name)]
        if not entries:
            reasons.append(f"{kind.__name__}: {_missing(devices, device, name)}")
        for entry in entries:
            backend = entry.create(device)
            reason = _refusal(backend, specs, layout.block_size, softcap, sinks)
            if reason is None:
                chosen[kind] = backend
                break
            reasons.append(f"{entry.name}: {reason}")
    if len(chosen) < len(_by_kind(layout)):
        raise ConfigurationError(
            f"attention_backend={name!r} cannot serve this model on {device}: {'; '.join(reasons)}"
        )
    return chosen


def _by_kind(layout: KVLayout) -> dict[type[StateSpec], list[StateSpec]]:
    specs: dict[type[StateSpec], list[StateSpec]] = {}
    for group in layout.groups:
        specs.setdefault(type(group.spec), []).append(group.spec)
    return specs


def _refusal(
    backend: StateBackend[Any], specs: Sequence[StateSpec], block_size: int, softcap: float, sinks: bool
) -> str | None:
    reasons = (backend.refuses(spec, block_size, softcap, sinks=sinks) for spec in specs)
    return next((reason for reason in reasons if reason is not None), None)


def _missing(devices: Mapping[str, Sequence[BackendEntry]], device: torch.device, name: str) -> str:
    """Error message if no candidate backend is known."""
    if not devices:
        return "no backend is registered for this kind of state"
    elsewhere = [each for each, entries in devices.items() if name in ("auto", *(entry.name for entry in entries))]
    if not elsewhere:
        return f"{name} does not read this kind of state"
    return f"{'every backend' if name == 'auto' else name} computes on {' or '.join(elsewhere)}, not on {device.type}"
