"""Fields of the structs of arguments that Python packs, by function, see `bind`. Tests compare them with `src`."""

from tandem.compute.native.coded import CODED_GATED_FIELDS, CODED_LINEAR_FIELDS, CODED_ROWS_FIELDS
from tandem.compute.native.exchange import ADD_FIELDS, JOIN_FIELDS
from tandem.compute.native.expert_choice import CHOICE_FIELDS
from tandem.compute.native.experts import EXPERTS_FIELDS
from tandem.compute.native.index_choice import CHOOSE_BY_INDEX_FIELDS
from tandem.compute.native.packing import PACK_CODED_FIELDS, PACK_FIELDS
from tandem.compute.native.recurrent import RECUR_FIELDS
from tandem.compute.native.stack import STACK_FIELDS

FIELDS = {
    "tandem_linear": "14q",
    "tandem_paged_attention": "20qdqd2q",
    "tandem_rms_norm": "13qd4q",
    "tandem_rope_and_write": "22qd7q",
    "tandem_gated_linear": "15q",
    "tandem_gated_product": "11q",
    "tandem_stack": STACK_FIELDS,
    "tandem_experts": EXPERTS_FIELDS,
    "tandem_choose_experts": CHOICE_FIELDS,
    "tandem_take_rows": "7q",
    "tandem_pack": PACK_FIELDS,
    "tandem_pack_coded": PACK_CODED_FIELDS,
    "tandem_coded_linear": CODED_LINEAR_FIELDS,
    "tandem_coded_rows": CODED_ROWS_FIELDS,
    "tandem_coded_gated_linear": CODED_GATED_FIELDS,
    "tandem_recur": RECUR_FIELDS,
    "tandem_choose_by_index": CHOOSE_BY_INDEX_FIELDS,
    "tandem_add_over_ranks": ADD_FIELDS,
    "tandem_join_over_ranks": JOIN_FIELDS,
}
