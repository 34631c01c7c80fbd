"""Builds the connections of a layer's blocks to the residual streams, and the streams' ends, from their specs."""

from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.hyper_connections import HyperConnection, ManyStreams
from tandem.models.layers.residual import Addition, Connection, OneStream, StreamEnds
from tandem.models.parameters import Parameters


def build_connections(spec: LayerSpec, parameters: Parameters, kernels: Kernels) -> tuple[Connection, Connection]:
    """Connections of a layer's mixers and of its feed-forward block."""
    if spec.connections is not None:
        mixer, block = spec.connections
        return HyperConnection(mixer, parameters, kernels), HyperConnection(block, parameters, kernels)
    return Addition(spec.residual_scale), Addition(spec.residual_scale)


def build_stream_ends(spec: ModelSpec, parameters: Parameters, kernels: Kernels) -> StreamEnds:
    """Begin and end of the residual stream, for a model or a stage of one."""
    if spec.streams is not None:
        return ManyStreams(spec.streams, parameters, kernels, has_end=spec.has_head)
    return OneStream()
