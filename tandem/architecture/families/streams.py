"""Reads several parallel residual streams (hyper-connections, specified in `residual`), with the tensor names of
DeepSeek-V4 in `transformers`.
"""

from dataclasses import dataclass

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.residual import HyperConnectionSpec, StreamsSpec, StreamWeights
from tandem.architecture.tensors import LinearSpec, NormSpec, Source, TensorSpec

_MOST_STREAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSizes:
    """Sizes of the residual streams, read from a configuration. `norm_eps`: of the norm over all streams of a token."""

    hidden: int
    num_streams: int
    iterations: int
    eps: float
    norm_eps: float

    def connection(self, prefix: str) -> HyperConnectionSpec:
        """The connection of one block, with tensors `{prefix}.fn`, `.scale` and `.base`."""
        num_numbers = (2 + self.num_streams) * self.num_streams
        weights = self._weights(f"{prefix}.", prefix, num_numbers, num_scales=3)
        return HyperConnectionSpec(
            weights=weights, num_streams=self.num_streams, iterations=self.iterations, eps=self.eps
        )

    def ends(self) -> StreamsSpec:
        """Spec of the sum of all streams after a model's last layer."""
        prefix = "model.hc_head"
        weights = self._weights(f"{prefix}.hc_", prefix, self.num_streams, num_scales=1)
        return StreamsSpec(weights=weights, num_streams=self.num_streams, eps=self.eps)

    def of_layer(self, prefix: str) -> tuple[HyperConnectionSpec, HyperConnectionSpec]:
        """The connections of a layer's mixer and of its feed-forward block."""
        return self.connection(f"{prefix}.attn_hc"), self.connection(f"{prefix}.ffn_hc")

    def _weights(self, tensors: str, name: str, num_numbers: int, num_scales: int) -> StreamWeights:
        width = self.num_streams * self.hidden
        return StreamWeights(
            norm=NormSpec(f"{name}.norm", width, self.norm_eps, weight=None),
            linear=LinearSpec(name, num_numbers, width, weight_source=Source(f"{tensors}fn"), is_float32=True),
            scales=TensorSpec(f"{tensors}scale", (num_scales,), is_float32=True),
            biases=TensorSpec(f"{tensors}base", (num_numbers,), is_float32=True),
        )


def read_streams(fields: Fields, sizes: base.Sizes) -> StreamSizes:
    """Reads the sizes of streams."""
    return StreamSizes(
        hidden=sizes.hidden,
        num_streams=fields.count("hc_mult", 4, high=_MOST_STREAMS),
        iterations=fields.count("hc_sinkhorn_iters", 20, high=1 << 10),
        eps=fields.number("hc_eps", 1e-6, high=1.0),
        norm_eps=sizes.eps,
    )
