"""Reads the kinds of DeepSeek-V4's layers and their tokens per entry (a vector compressed from several tokens, see
`entry_mixers`).
"""

from collections.abc import Mapping, Sequence

from tandem.architecture.families import base
from tandem.architecture.fields import Fields

CHOSEN, ALL = "compressed_sparse_attention", "heavily_compressed_attention"  # layers attend to chosen or all entries
_SPANS = {CHOSEN: 4, ALL: 128}
_OLDER_KEYS = {CHOSEN: "compress_rate_csa", ALL: "compress_rate_hca"}
_KIND_OF_RATIO = {0: base.SLIDING, 4: CHOSEN, 128: ALL}


def read_kinds(fields: Fields, num_layers: int) -> Sequence[str]:
    """Reads the kind of each layer, from `layer_types` or from `compress_ratios`, which goes on after the last layer.
    Without either: two layers attending to all entries, then alternately such layers and layers that choose.
    """
    types = base.read_layer_types(fields, num_layers, (base.SLIDING, CHOSEN, ALL))
    ratios = fields.get("compress_ratios")
    if types is not None:
        return types
    if ratios is None:
        return [CHOSEN if index > 1 and index % 2 else ALL for index in range(num_layers)]
    if not isinstance(ratios, list) or len(ratios) < num_layers or not {*map(repr, ratios)} <= {"0", "4", "128"}:
        raise fields.wrong("compress_ratios", f"a list of 0, 4 and 128, at least num_hidden_layers={num_layers}")
    return [_KIND_OF_RATIO[ratio] for ratio in ratios[:num_layers]]


def read_spans(fields: Fields) -> Mapping[str, int]:
    """Reads the tokens per entry, by kind of layer."""
    rates = fields.section("compress_rates") or Fields({}, fields.where)
    spans = {kind: rates.count(kind, span, high=1 << 12) for kind, span in _SPANS.items()}
    rates.refuse_unread()
    return {kind: fields.count(_OLDER_KEYS[kind], span, high=1 << 12) for kind, span in spans.items()}
