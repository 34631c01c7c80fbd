// Functions that can be called from Python and from one another: each takes one pointer to a struct of 8-byte fields
// (int64, double or pointer). Python packs the struct at once, which is several times cheaper than converting arguments
// one by one.
#pragma once
#include "common.h"

namespace tandem {

struct Matrix {  // [outer, inner] rows of a strided tensor
  int64_t outer_stride, inner_stride;
};

struct BorrowCoresArguments {
  const int32_t* busy;
  int64_t threads;
  const int64_t* cpus;
  int64_t num_cpus;
  int64_t* ok;
};

struct BorrowedTimeArguments {
  int64_t* ns;
};

struct TakeRowsArguments {
  const char* x;
  const int64_t* indices;
  char* out;
  int64_t stride_bytes, row_bytes, n, threads;
};

// `weight` [n, k] to `out` of the same size, strips of 16 rows turned round; no `out`: only whether that can be had.
struct PackArguments {
  int64_t dtype;
  const void* weight;
  void* out;
  int64_t n, k, threads;
  int64_t* ok;
};

struct LinearArguments {
  int64_t dtype, out_dtype;
  const void* x;
  int64_t x_stride;
  const void *weight, *bias;
  void* out;
  int64_t out_stride, m, n, k, sum_blocks, is_packed, threads;  // blocks: of K, see `sums.h`
};

// Each head of x [m, heads, k] times its own matrix of weight [heads, n, k].
struct LinearByHeadArguments {
  int64_t dtype;
  const void* x;
  int64_t x_stride, x_head_stride;
  const void* weight;
  void* out;
  int64_t out_stride, m, heads, n, k, is_packed, threads;  // heads of `out` lie side by side
};

struct GatedLinearArguments {
  int64_t dtype, activation;
  const void* x;
  int64_t x_stride;
  const void *gate, *up, *gate_bias, *up_bias;
  void* out;
  int64_t out_stride, m, n, k, is_packed, threads;
};

// activation(gate) * up, [m, n] each.
struct GatedProductArguments {
  int64_t dtype, activation;
  const void* gate;
  int64_t gate_stride;
  const void* up;
  int64_t up_stride;
  void* out;
  int64_t out_stride, m, n, threads;
};

// A matrix [size, size] of each token, rows of float32: `iterations` times its columns, and rows in between, divided by
// their sums and `eps`.
struct BalanceArguments {
  const float* logits;
  int64_t stride;  // between tokens
  float* out;
  int64_t num_tokens, size, iterations;
  double eps;
  int64_t threads;
};

constexpr int kTableSize = 16;  // of codes of 4 bits

// A matrix [n, k] as codes with scales: rows as Python has them, or strips (`coded.h`). Null: it has no such thing.
struct CodedWeights {
  int64_t kind, n, k, group_size, scale_dtype, offset_dtype, is_packed, super_size;
  int64_t rounds_rows;  // to 8 bits before they are multiplied (`integer_rows.h`)
  double factor;
  const void *codes, *scales, *offsets;
  const uint16_t *super_scales, *super_offsets;  // float16, of `super_size` inputs each: scales are multiples of them
  const float* table;
  const int64_t* permutation;  // of the columns of x
};

struct PackCodedArguments {
  const CodedWeights *weights, *packed;  // of rows, and where they are to be in strips
  int64_t threads;
};

// Rows `indices` of the numbers.
struct CodedRowsArguments {
  int64_t dtype;
  const CodedWeights* weights;
  const int64_t* indices;
  void* out;  // [n, k]
  int64_t n, threads;
};

struct CodedLinearArguments {
  int64_t dtype, out_dtype;
  const void* x;
  int64_t x_stride;
  const CodedWeights* weights;
  const void* bias;
  void* out;
  int64_t out_stride, m, threads;
};

// Gate and up are decoded alike, with the same groups and the same permutation, and round rows alike.
struct CodedGatedLinearArguments {
  int64_t dtype, activation;
  const void* x;
  int64_t x_stride;
  const CodedWeights *gate, *up;
  const void *gate_bias, *up_bias;
  void* out;
  int64_t out_stride, m, threads;
};

// Up to three products of the same rows, side by side in `out`: of groups of the same size, in the same order of inputs.
struct JoinedCodedArguments {
  struct Part {
    const CodedWeights* weights;
    const void* bias;
  };
  int64_t dtype;
  const void* x;
  int64_t x_stride;
  Part parts[3];
  void* out;
  int64_t out_stride, m, threads;
};

// Up to three products of the same rows, side by side in `out`.
struct JoinedLinearArguments {
  struct Part {
    const void *weight, *bias;
    int64_t rows;
  };
  int64_t dtype;
  const void* x;
  int64_t x_stride;
  Part parts[3];
  void* out;
  int64_t out_stride, m, k, is_packed, threads;
};

// One expert's matrices (floats, or `CodedWeights`) and biases; a null pointer is a bias that it does not have.
struct ExpertWeights {
  const void *gate, *up, *down, *gate_bias, *up_bias, *down_bias;
};

struct ExpertsArguments {
  int64_t dtype, activation;
  double alpha, limit, shift;  // of the clamped activation
  const ExpertWeights* experts;
  int64_t num_experts;
  const void* x;
  int64_t x_stride;
  const float* weights;   // [num_tokens, top_k]
  const int64_t* chosen;  // the same
  void* out;              // [num_tokens, hidden]
  int64_t out_dtype;      // that of x or float32
  int64_t num_tokens, top_k, hidden, ffn, down_blocks, is_packed, is_coded, threads;  // packed: of floats
};

// From logits [n, num_experts] to the weights and numbers of the experts of each row, both [n, top_k].
struct ChooseExpertsArguments {
  int64_t dtype;
  const void* logits;
  int64_t stride;
  const float* correction;     // [num_experts], added for the choice alone; null = none
  const float* expert_scales;  // [num_experts], of the weights; null = none
  double logit_scale, epsilon, scale;
  int64_t score, renormalise, rounding;  // weights are rounded to that dtype
  int64_t num_groups, top_groups, best_of_group;  // a group's score: the sum of so many of its experts', one or two
  int64_t n, num_experts, top_k;
  float* weights;
  int64_t *chosen, threads;
};

struct RmsNormArguments {
  int64_t dtype;
  const void* x;
  Matrix x_strides;
  void* residual;
  Matrix residual_strides;
  void* out;
  Matrix out_strides;
  const void* weight;
  int64_t weight_dtype, unit_offset;
  double eps;
  int64_t outer, inner, size, threads;
};

struct RopeAndWriteArguments {
  int64_t dtype;
  void* q;
  Matrix q_strides;
  void* k;
  Matrix k_strides;
  void* v;
  Matrix v_strides;
  const float *cos, *sin;
  const int64_t *positions, *slots;
  void* k_cache;
  int64_t k_block_stride;
  void* v_cache;
  int64_t v_block_stride;
  const void *q_norm, *k_norm;
  int64_t norm_dtype, unit_offset;
  double eps;
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, half, block_size, threads;
};

struct PagedAttentionArguments {
  int64_t dtype;
  const void* q;
  int64_t q_token_stride, q_head_stride;
  const void* k_cache;
  int64_t k_block_stride;
  const void* v_cache;
  int64_t v_block_stride;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t *query_start, *seq_lens;
  void* out;
  int64_t out_token_stride, out_head_stride, num_requests, num_heads, num_kv_heads, head_dim, block_size;
  double scale;
  int64_t window;
  double softcap;
  const float* sinks;  // of each head; null = none
  int64_t threads;
};

// Numbers of each token one after another: q, k [groups, columns]; v [heads, rows]; a of each head or of each of its
// columns; b of each head, or null = no delta, and a token's step is its beta. Pages begin `page_stride` numbers apart.
// Request i reads a state unless it is the first, and writes those of `first_write[i]` to `first_write[i + 1] - 1`.
struct RecurArguments {
  const float *q, *k, *v, *a, *b, *a_log, *a_bias;
  float* matrices;
  int64_t page_stride;
  const int64_t* read_pages;
  const uint8_t* is_first;
  const int32_t* query_start;
  const int64_t *first_write, *write_pages, *write_ends;
  float* out;
  int64_t num_requests, num_heads, num_groups, rows, columns, has_columns, has_rates;
  int64_t num_pages, heads_per_page, first_head, threads;
};

// Causal convolution: of each token the rows `tap_rows` [num_tokens, taps] of `rows`, in order times those of `weight`
// [taps, channels]. `bias` may be null.
struct ConvolveArguments {
  int64_t dtype;  // of rows and out
  const void* rows;
  const int64_t* tap_rows;
  const float *weight, *bias;
  void* out;
  int64_t num_tokens, taps, channels, has_activation, threads;
};

// Of each query the positions of the `most` keys with the highest scores, ascending, -1 where there are fewer: `chosen`
// [num_tokens, most]. q [heads, dim] and weights of each head, token after token; keys [block_size, dim] in each block.
struct ChooseByIndexArguments {
  int64_t dtype;
  const void* q;
  const float* weights;
  const void* keys;
  int64_t key_block_stride;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t *query_start, *seq_lens;
  int32_t* chosen;
  int64_t num_requests, num_heads, dim, block_size, span, most;
  double scale;
  int64_t threads;
};

// One rank's view of its group (`exchange.h`); Python keeps it.
struct RankGroup {
  char* memory;
  int64_t rank, num_ranks, buffer_bytes, deadline_ns;
  int64_t count;  // of exchanges so far
  int64_t failure, peer;  // a `RankFailure`, and the rank that was waited for
  int64_t* rows;  // [num_ranks + 1]: terms of `collect` so far by the rank that had them, then the most of each call added
};

struct AddOverRanksArguments {
  int64_t out_dtype;
  RankGroup* group;
  const float* node;  // [m, n]
  const void* bias;
  void* out;
  int64_t out_stride, m, n, threads;
};

struct JoinOverRanksArguments {
  RankGroup* group;
  const float* part;  // [m, bounds[rank + 1] - bounds[rank]]
  const int64_t* bounds;
  float* out;  // [m, bounds[num_ranks]]; of rank 0
  int64_t m;
};

struct GatherOverRanksArguments {
  RankGroup* group;
  const void* part;  // [m, row_bytes]
  void* out;  // [m, num_ranks, row_bytes]
  int64_t m, row_bytes;
};

struct PipeArguments {
  RankGroup* group;
  void* data;
  int64_t size;  // bytes
};

struct CollectOverRanksArguments {
  int64_t out_dtype;
  RankGroup* group;
  const float* terms;  // [own terms, n]
  const int64_t* owners;  // [m, k]
  void* out;  // [m, n]
  int64_t m, k, n, threads;
};

struct AwaitRankArguments {
  RankGroup* group;
  int64_t* size;  // -1: the group has ended
};

struct PublishRankArguments {
  RankGroup* group;
  int64_t size;
};

}  // namespace tandem

TANDEM_EXPORT void tandem_borrow_cores(const tandem::BorrowCoresArguments*);
TANDEM_EXPORT void tandem_borrowed_time(const tandem::BorrowedTimeArguments*);
TANDEM_EXPORT void tandem_take_rows(const tandem::TakeRowsArguments*);
TANDEM_EXPORT void tandem_pack(const tandem::PackArguments*);
TANDEM_EXPORT void tandem_linear(const tandem::LinearArguments*);
TANDEM_EXPORT void tandem_linear_by_head(const tandem::LinearByHeadArguments*);
TANDEM_EXPORT void tandem_pack_coded(const tandem::PackCodedArguments*);
TANDEM_EXPORT void tandem_coded_rows(const tandem::CodedRowsArguments*);
TANDEM_EXPORT void tandem_coded_linear(const tandem::CodedLinearArguments*);
TANDEM_EXPORT void tandem_coded_gated_linear(const tandem::CodedGatedLinearArguments*);
void tandem_joined_coded_linear(const tandem::JoinedCodedArguments*);
void tandem_coded_experts(const tandem::ExpertsArguments*);
void tandem_joined_linear(const tandem::JoinedLinearArguments*);
TANDEM_EXPORT void tandem_gated_linear(const tandem::GatedLinearArguments*);
TANDEM_EXPORT void tandem_gated_product(const tandem::GatedProductArguments*);
TANDEM_EXPORT void tandem_experts(const tandem::ExpertsArguments*);
TANDEM_EXPORT void tandem_choose_experts(const tandem::ChooseExpertsArguments*);
TANDEM_EXPORT void tandem_rms_norm(const tandem::RmsNormArguments*);
TANDEM_EXPORT void tandem_rope_and_write(const tandem::RopeAndWriteArguments*);
TANDEM_EXPORT void tandem_convolve(const tandem::ConvolveArguments*);
TANDEM_EXPORT void tandem_recur(const tandem::RecurArguments*);
TANDEM_EXPORT void tandem_choose_by_index(const tandem::ChooseByIndexArguments*);
TANDEM_EXPORT void tandem_paged_attention(const tandem::PagedAttentionArguments*);
TANDEM_EXPORT void tandem_add_over_ranks(const tandem::AddOverRanksArguments*);
TANDEM_EXPORT void tandem_join_over_ranks(const tandem::JoinOverRanksArguments*);
TANDEM_EXPORT void tandem_gather_over_ranks(const tandem::GatherOverRanksArguments*);
TANDEM_EXPORT void tandem_send_to_rank(const tandem::PipeArguments*);
TANDEM_EXPORT void tandem_receive_from_rank(const tandem::PipeArguments*);
TANDEM_EXPORT void tandem_collect_over_ranks(const tandem::CollectOverRanksArguments*);
TANDEM_EXPORT void tandem_await_rank(const tandem::AwaitRankArguments*);
TANDEM_EXPORT void tandem_publish_rank(const tandem::PublishRankArguments*);
