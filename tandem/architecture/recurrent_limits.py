"""Uses of a model with recurrent layers that no test shows to be exact yet: they are refused by name."""

from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.quantisation import find_quantisation
from tandem.architecture.recurrent_mixers import RecurrentMixer
from tandem.core.errors import UnsupportedCheckpointError


def first_recurrent(model: ModelSpec) -> int | None:
    """Index of the first layer with a recurrent state; None = there is none."""
    mixers = ((index, mixer) for index, layer in enumerate(model.layers) for mixer in layer.mixers)
    return next((index for index, mixer in mixers if isinstance(mixer, RecurrentMixer)), None)


def refuse_codes(fields: Fields, model: ModelSpec) -> None:
    """Refuses quantised weights beside a recurrent state. `fields`: of the `config.json` that `model` was read from.

    Raises:
        UnsupportedCheckpointError: it has both, or its weights are quantised in a form that is not read.
    """
    layer = first_recurrent(model)
    if layer is not None and (quantisation := find_quantisation(fields)) is not None:
        raise UnsupportedCheckpointError(
            f"{fields.where}: quant_method={quantisation.text('quant_method')!r}, and layer {layer} keeps a recurrent "
            "state, beside which quantised weights are not served; serve the checkpoint that they were made of"
        )
