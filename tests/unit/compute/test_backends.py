"""Choice of backends by kind of state and device, with kinds and backends that the product does not have."""

import pytest
import torch

from tandem.architecture.state import KVSpec, StateSpec
from tandem.compute.backends import BACKENDS, BackendEntry, BackendTable, choose_backends
from tandem.compute.torch.attention import ReferenceBackend
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout
from tests.helpers.toy_states import ATTENTION, ToyLatentSpec, ToyRecurrentSpec

CPU, META = torch.device("cpu"), torch.device("meta")
LATENT = ToyLatentSpec(6)


class EvenLatents:
    """Reads latents of even size."""

    name = "even"
    graph_safe = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def refuses(self, spec: ToyLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        return f"size={spec.size} is odd" if spec.size % 2 else None


class NoLatents(EvenLatents):
    """Refuses all."""

    name = "none"

    def refuses(self, spec: ToyLatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        return f"block_size={block_size} is not one of ()"


EVEN, NONE = (BackendEntry(each.name, __name__, each.__name__) for each in (EvenLatents, NoLatents))
TABLE: BackendTable = {**BACKENDS, ToyLatentSpec: {"cpu": (NONE, EVEN), "cuda": (NONE,)}}


def refusal(name: str, specs: list[StateSpec], device: torch.device = CPU, table: BackendTable = TABLE) -> str:
    with pytest.raises(ConfigurationError) as error:
        choose_backends(name, device, build_layout(specs, 16), 0.0, table=table)
    return str(error.value)


@pytest.mark.parametrize("name", ["auto", "even"])
def test_a_kind_of_state_that_is_added_to_the_table_is_served(name: str) -> None:
    backends = choose_backends(name, CPU, build_layout([LATENT] * 3, 16), 0.0, table=TABLE)
    assert {kind: type(backend).__name__ for kind, backend in backends.items()} == {ToyLatentSpec: "EvenLatents"}
    assert backends[ToyLatentSpec].device == CPU


def test_each_kind_has_a_backend_of_its_own() -> None:
    backends = choose_backends("auto", CPU, build_layout([ATTENTION, LATENT], 16), 0.0, table=TABLE)
    assert backends.keys() == {KVSpec, ToyLatentSpec}
    assert type(backends[ToyLatentSpec]).__name__ == "EvenLatents"
    assert backends[KVSpec].refuses(ATTENTION, 16, 0.0) is None


def test_all_reasons_are_told() -> None:
    assert refusal("auto", [ATTENTION, LATENT, ToyLatentSpec(7)]) == (
        "attention_backend='auto' cannot serve this model on cpu: "
        "none: block_size=16 is not one of (); even: size=7 is odd"
    )
    assert refusal("reference", [ATTENTION, LATENT]).endswith(
        "ToyLatentSpec: reference does not read this kind of state"
    )
    assert refusal("auto", [ToyRecurrentSpec(4, 32), ToyLatentSpec(7)]).endswith(
        "none: block_size=16 is not one of (); even: size=7 is odd; "
        "ToyRecurrentSpec: no backend is registered for this kind of state"
    )


def test_a_device_that_a_backend_does_not_compute_on() -> None:
    assert refusal("auto", [LATENT], META).endswith("ToyLatentSpec: every backend computes on cpu or cuda, not on meta")
    assert refusal("flashinfer", [ATTENTION]).endswith("KVSpec: flashinfer computes on cuda, not on cpu")


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    expected = "['even', 'flashinfer', 'native', 'none', 'reference', 'triton', 'varlen']"
    assert refusal("magic", [ATTENTION]) == f"attention_backend='magic' is unknown; choose auto or one of {expected}"


def test_a_model_without_k_and_v_is_refused() -> None:
    layout = build_layout([ATTENTION], 16)
    assert isinstance(choose_backends("reference", CPU, layout, 0.0)[KVSpec], ReferenceBackend)
    with pytest.raises(ConfigurationError, match="ToyLatentSpec: no backend is registered for this kind of state"):
        choose_backends("auto", CPU, build_layout([LATENT], 16), 0.0)
