"""Parts of a model's specs, by their types."""

from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec


def attention_of(model: ModelSpec) -> list[AttentionSpec]:
    """The mixers of the layers, which all attend over K and V."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionSpec)]
    assert len(mixers) == model.num_layers
    return mixers
