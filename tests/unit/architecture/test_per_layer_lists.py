"""Lists of one entry a layer: another length is refused in every family, whether it reads the list or not."""

from typing import Any

import pytest

from tandem.architecture.families.base import PER_LAYER_KEYS
from tandem.architecture.fields import Fields
from tandem.architecture.registry import find_family
from tandem.core.errors import CorruptCheckpointError
from tests.unit.architecture.test_unread_keys import MODEL_TYPES, SIZES

NUM_LAYERS = SIZES["num_hidden_layers"]
WITHOUT_LAYER_LISTS = {"mamba2"}  # all layers are alike, and transformers knows no such list
OWN_CHECK = {"nemotron_h"}  # the list decides how many layers there are
ENTRIES: dict[str, Any] = {"no_rope_layers": 1, "attn_type_list": 1}


def read(model_type: str, **changes: Any) -> None:
    fields = Fields({"model_type": model_type, **SIZES, **MODEL_TYPES[model_type], **changes}, "config.json")
    find_family(fields).read_model(fields)


@pytest.mark.parametrize("model_type", sorted({*MODEL_TYPES} - WITHOUT_LAYER_LISTS - OWN_CHECK))
def test_a_list_of_another_length_is_refused(model_type: str) -> None:
    """Families that do not read `layer_types` used to load with any number of `full_attention`."""
    for name in PER_LAYER_KEYS:
        for length in (0, NUM_LAYERS - 1, NUM_LAYERS + 1):
            message = (
                f"config.json: {name} must be a list of num_hidden_layers={NUM_LAYERS} entries, one a layer, "
                f"found {length}; correct the list or num_hidden_layers"
            )
            with pytest.raises(CorruptCheckpointError) as refusal:
                read(model_type, **{name: [ENTRIES.get(name, "full_attention")] * length})
            assert str(refusal.value) == message


def test_the_layers_of_nemotron_h_are_those_of_its_list() -> None:
    listed = ["mamba", "attention"]
    with pytest.raises(CorruptCheckpointError, match="num_hidden_layers must be 2, as many as layers_block_type has"):
        read("nemotron_h", layers_block_type=listed)
    values = {"model_type": "nemotron_h", **SIZES, **MODEL_TYPES["nemotron_h"]}
    del values["num_hidden_layers"]
    alone = Fields({**values, "layers_block_type": listed}, "config.json")
    assert find_family(alone).read_model(alone).num_layers == len(listed)


@pytest.mark.parametrize(("name", "value"), [("mlp_only_layers", [True]), ("mlp_only_layers", [1.0])])
def test_only_integers_are_indices(name: str, value: list[Any]) -> None:
    """`true` used to be layer 1."""
    with pytest.raises(CorruptCheckpointError, match=rf"{name} must be a list of integers in \[0, 2\]"):
        read("qwen3_moe", **{name: value})
