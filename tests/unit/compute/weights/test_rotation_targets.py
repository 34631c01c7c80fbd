"""Rotations are of the modules that a configuration names, under the checkpoint's names as under the model's."""

import pytest
import torch

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.weights.base import StoredTensor
from tandem.compute.weights.rotations import read_rotations

OURS, THEIRS = "model.layers.0.self_attn.o_proj", "backbone.layers.0.mixer.o_proj"
WEIGHT = TensorSpec(f"{OURS}.weight", (64, 64), is_weight=True)
STORED = {f"{OURS}.weight": StoredTensor(torch.int32, (64, 8), f"{THEIRS}.weight_packed")}


@pytest.mark.parametrize("target", [OURS, THEIRS, r"re:.*mixer\.o_proj$"])
@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_names_of_the_checkpoint_count_too(target: str, key: str) -> None:
    """Only the model's were compared, so a rotation by Nemotron-H's own names was not applied."""
    part = {"location": "input", "targets": ["Linear"], "ignore": []} | {key: [target]}
    scheme = {"type": "hadamard", "head_dim": 64, "apply": [part]}
    rotations = read_rotations(Fields({"transform_config": {"config_groups": {"R": scheme}}}, "config.json"), STORED)
    assert rotations.has(WEIGHT) is (key == "targets")
