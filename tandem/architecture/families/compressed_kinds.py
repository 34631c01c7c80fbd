"""Reads the kinds of DeepSeek-V4's layers, their tokens per entry (a vector compressed from several tokens, see
`entry_mixers`), and their rotary embeddings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.rope import RopeSpec, read_rope

CHOSEN, ALL = "compressed_sparse_attention", "heavily_compressed_attention"  # layers attend to chosen or all entries
_SPANS = {CHOSEN: 4, ALL: 128}
_OLDER_KEYS = {CHOSEN: "compress_rate_csa", ALL: "compress_rate_hca"}
_KIND_OF_RATIO = {0: base.SLIDING, 4: CHOSEN, 128: ALL}
_MAIN, _COMPRESSED = "main", "compress"
_THETAS = {_MAIN: ("rope_theta", 10_000.0), _COMPRESSED: ("compress_rope_theta", 160_000.0)}
_ROTATED_SHARE = 64 / 512


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


def read_ropes(fields: Fields, sizes: base.Sizes) -> Mapping[str, RopeSpec]:
    """Reads the rotary embedding of each kind of layer. Newer files describe one for sliding layers and one for the
    others; older ones only the scaling of the latter, with a factor of cosines and sines only if the file gives one.
    """
    nested, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    thetas = {name: fields.number(key, theta) for name, (key, theta) in _THETAS.items()}
    if nested is not None and nested.has(_MAIN):
        sections = {name: nested.section(name) for name in thetas}
        nested.refuse_unread()
        thetas[_COMPRESSED] = thetas[_MAIN]  # NOTE: as in transformers, where an object has none
    else:
        sections = {_MAIN: None, _COMPRESSED: scaling or nested}
    rotary_dim = fields.optional_count("qk_rope_head_dim", high=sizes.head_dim)
    ropes = {
        name: read_rope(
            fields,
            section,
            head_dim=sizes.head_dim,
            max_positions=sizes.max_positions,
            default_theta=thetas[name],
            default_share=_ROTATED_SHARE if rotary_dim is None else rotary_dim / sizes.head_dim,
            served_shares=None,
            is_one_of_several=True,
        )
        for name, section in sections.items()
    }
    compressed, flat = ropes[_COMPRESSED], scaling or nested
    if flat is not None and sections[_COMPRESSED] is flat:
        factor = flat.number("attention_factor", 1.0)
        compressed = replace(compressed, theta=thetas[_COMPRESSED], attention_factor=factor)
    return {base.SLIDING: ropes[_MAIN], CHOSEN: compressed, ALL: compressed}
