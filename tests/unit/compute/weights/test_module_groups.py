"""Groups of a configuration whose targets overlap: a module belongs to the one that compressed-tensors gives it."""

from itertools import permutations

import pytest
import torch

from tandem.architecture.fields import Fields
from tandem.architecture.tensors import TensorSpec
from tandem.compute.weights.modules import closest_group, read_entries

match = pytest.importorskip("compressed_tensors.utils.match", reason="compressed_tensors, the oracle, is not installed")

MODULES = ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"]
TARGETS = {
    "class": ["Linear"],
    "name": ["model.layers.1.mlp.down_proj"],
    "pattern": [r"re:.*down_proj$", r"re:.*gate_proj$"],
    "earlier pattern": [r"re:.*(up|down)_proj$"],
}
SETS = [names for count in range(1, len(TARGETS) + 1) for names in permutations(TARGETS, count)]


@pytest.mark.parametrize("names", SETS, ids=", ".join)
def test_the_closest_target_decides_whatever_the_order_of_groups(names: tuple[str, ...]) -> None:
    """Regression: the first group with any fitting target was taken, so that "Linear" hid the groups after it."""
    groups = {name: read_entries(Fields({"targets": TARGETS[name]}, "config.json"), "targets") for name in names}
    group_of, linear = closest_group(groups, None), torch.nn.Linear(1, 1)
    owners = {target: name for name in names for target in TARGETS[name]}
    for module in MODULES:
        matched = match.match_targets(module, linear, owners)
        expected = owners[matched[0]] if matched else None
        assert group_of(TensorSpec(f"{module}.weight", (1, 1), is_weight=True)) == expected


def test_of_groups_with_the_same_target_the_last_counts() -> None:
    entries = read_entries(Fields({"targets": ["Linear"]}, "config.json"), "targets")
    group_of = closest_group({"first": entries, "second": entries}, None)
    assert group_of(TensorSpec(f"{MODULES[0]}.weight", (1, 1), is_weight=True)) == "second"
