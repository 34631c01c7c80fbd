"""Fields of the argument structs that Python packs (`calls`), by compiled function. Tests compare them with `src`."""

from tandem.compute.native.coded import CODED_GATED_FIELDS, CODED_LINEAR_FIELDS, CODED_ROWS_FIELDS
from tandem.compute.native.core_board import BORROW_FIELDS, TIME_FIELDS
from tandem.compute.native.exchange import ADD_FIELDS, COLLECT_FIELDS, GATHER_FIELDS, JOIN_FIELDS, PIPE_FIELDS
from tandem.compute.native.exchange_mirror import AWAIT_FIELDS, PUBLISH_FIELDS
from tandem.compute.native.expert_choice import CHOICE_FIELDS
from tandem.compute.native.experts import EXPERTS_FIELDS
from tandem.compute.native.index_choice import CHOOSE_BY_INDEX_FIELDS
from tandem.compute.native.packing import PACK_CODED_FIELDS, PACK_FIELDS
from tandem.compute.native.recurrent import CONVOLVE_FIELDS, RECUR_FIELDS
from tandem.compute.native.sampling import DRAW_FIELDS
from tandem.compute.native.stack import STACK_FIELDS

FIELDS = {
    "tandem_linear": "dtype out_dtype x x_stride weight bias out out_stride m n k sum_blocks is_packed threads",
    "tandem_linear_by_head": "dtype x x_stride x_head_stride weight out out_stride m heads n k is_packed threads",
    "tandem_paged_attention": """
        dtype q q_token_stride q_head_stride k_cache k_block_stride v_cache v_block_stride block_tables table_stride
        query_start seq_lens out out_token_stride out_head_stride num_requests num_heads num_kv_heads head_dim
        block_size scale:d window softcap:d sinks threads
    """,
    "tandem_rms_norm": """
        dtype x x_strides.outer_stride x_strides.inner_stride residual residual_strides.outer_stride
        residual_strides.inner_stride out out_strides.outer_stride out_strides.inner_stride weight weight_dtype
        unit_offset eps:d outer inner size threads
    """,
    "tandem_rope_and_write": """
        dtype q q_strides.outer_stride q_strides.inner_stride k k_strides.outer_stride k_strides.inner_stride v
        v_strides.outer_stride v_strides.inner_stride cos sin positions slots k_cache k_block_stride v_cache
        v_block_stride q_norm k_norm norm_dtype unit_offset eps:d num_tokens num_heads num_kv_heads head_dim half
        block_size threads
    """,
    "tandem_gated_linear": """
        dtype activation x x_stride gate up gate_bias up_bias out out_stride m n k is_packed threads
    """,
    "tandem_gated_product": "dtype activation gate gate_stride up up_stride out out_stride m n threads",
    "tandem_balance": "logits stride out num_tokens size iterations eps:d threads",
    "tandem_stack": STACK_FIELDS,
    "tandem_experts": EXPERTS_FIELDS,
    "tandem_choose_experts": CHOICE_FIELDS,
    "tandem_take_rows": "x indices out stride_bytes row_bytes n threads",
    "tandem_pack": PACK_FIELDS,
    "tandem_pack_coded": PACK_CODED_FIELDS,
    "tandem_coded_linear": CODED_LINEAR_FIELDS,
    "tandem_coded_rows": CODED_ROWS_FIELDS,
    "tandem_coded_gated_linear": CODED_GATED_FIELDS,
    "tandem_convolve": CONVOLVE_FIELDS,
    "tandem_recur": RECUR_FIELDS,
    "tandem_choose_by_index": CHOOSE_BY_INDEX_FIELDS,
    "tandem_add_over_ranks": ADD_FIELDS,
    "tandem_join_over_ranks": JOIN_FIELDS,
    "tandem_gather_over_ranks": GATHER_FIELDS,
    "tandem_collect_over_ranks": COLLECT_FIELDS,
    "tandem_send_to_rank": PIPE_FIELDS,
    "tandem_receive_from_rank": PIPE_FIELDS,
    "tandem_await_rank": AWAIT_FIELDS,
    "tandem_publish_rank": PUBLISH_FIELDS,
    "tandem_draw": DRAW_FIELDS,
    "tandem_borrow_cores": BORROW_FIELDS,
    "tandem_borrowed_time": TIME_FIELDS,
}
