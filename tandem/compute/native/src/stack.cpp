// All layers of a decoder in one call: the same calls as the decoder's, in the same order, with the same bits.
//
// Between two kernels there is then only a function call, where from Python ten microseconds pass in which no weight is
// read. Keeps no state; the caller's tables have the addresses of all tensors.
#include <cstring>
#include <utility>

#include "calls.h"

namespace tandem {
namespace {

// The constants of a layer's experts; what belongs to a step is filled in here.
struct Mixture {
  const void *router, *router_bias;
  ChooseExpertsArguments choice;
  ExpertsArguments experts;
};

// The numbers of a linear map: floats, or codes with scales.
struct LinearMap {
  const void* floats;
  const CodedWeights* codes;
  int64_t sum_blocks;
};

// A layer's constants. A null pointer is a tensor that the model does not have.
struct Layer {
  const void *input_norm, *after_attention, *before_mlp, *after_mlp;
  LinearMap q;
  const void* q_bias;
  LinearMap k;
  const void* k_bias;
  LinearMap v;
  const void* v_bias;
  LinearMap o;
  const void *o_bias, *q_norm, *k_norm;
  LinearMap gate, up, down;
  const float *cos, *sin;
  int64_t half, window;
  const Mixture* mixture;  // null: the block is gate, up and down
};

// The tokens whose hidden states are asked for: the last few of some requests, and those requests with these alone.
struct Wanted {
  const int64_t* rows;  // ascending; null: of all tokens
  int64_t num_rows;
  const int32_t *query_start, *seq_lens, *block_tables;
  int64_t table_stride, num_requests;
};

// A layer's share of the cache, and where this step's tokens are in it.
struct Cache {
  void* k;
  int64_t k_block_stride;
  void* v;
  int64_t v_block_stride;
  const int32_t* block_tables;
  int64_t table_stride;
  const int64_t* slots;
};

// Where a reader wants the residual stream at the inputs of layers: a pointer for each layer, null where it is not read.
struct States {
  char* const* rows;  // null: nobody reads
  int64_t stride;     // in elements
};

struct StackArguments {
  int64_t dtype, activation, unit_offset, hidden, ffn, num_heads, num_kv_heads, head_dim, block_size,
      num_experts, top_k;
  double eps, scale, softcap;
  int64_t num_layers;
  const Layer* layers;
  const void* final_norm;
  const Cache* caches;
  void *residual, *scratch, *out;  // [num_tokens, hidden]; scratch: see Stack
  const int64_t* positions;
  const int32_t *query_start, *seq_lens;
  int64_t num_tokens, num_requests, is_packed, threads;
  Wanted wanted;
  States states;
};

class Stack {
 public:
  explicit Stack(const StackArguments& arguments)
      : a(arguments), element_bytes(a.dtype == kFloat32 ? 4 : 2), q_size(a.num_heads * a.head_dim),
        kv_size(a.num_kv_heads * a.head_dim), num_tokens(a.num_tokens) {
    chosen = static_cast<int64_t*>(a.scratch);
    weights = reinterpret_cast<float*>(chosen + a.num_tokens * a.top_k);
    char* at = reinterpret_cast<char*>(weights + a.num_tokens * a.top_k);
    const auto take = [&](int64_t width) { return std::exchange(at, at + a.num_tokens * width * element_bytes); };
    normed = take(a.hidden), qkv = take(q_size + 2 * kv_size), attended = take(q_size), gated = take(a.ffn);
    delta = take(a.hidden), logits = take(a.num_experts);
  }

  void run() {
    for (int64_t i = 0; i < a.num_layers; ++i) {
      const Layer& layer = a.layers[i];
      i == 0 ? norm(a.residual, layer.input_norm, nullptr, normed) : norm(delta, layer.input_norm, a.residual, normed);
      if (a.states.rows && a.states.rows[i]) copy_states(a.states.rows[i]);
      project(layer);
      rotate_and_write(layer, a.caches[i]);
      const bool leaves_some_out = a.wanted.rows && i + 1 == a.num_layers;
      if (leaves_some_out) keep_wanted();
      if (!num_tokens) return;
      attend(layer, a.caches[i], leaves_some_out);
      linear(attended, q_size, layer.o, layer.o_bias, delta, a.hidden, a.hidden, a.is_packed);
      norm_into_mlp(layer);
      layer.mixture ? mixture(layer) : mlp(layer);
    }
    norm(delta, a.final_norm, a.residual, a.out);
  }

 private:
  const StackArguments& a;
  const int64_t element_bytes, q_size, kv_size;
  int64_t num_tokens;  // that are still computed
  int64_t* chosen;
  float* weights;
  char *normed, *qkv, *attended, *gated, *delta, *logits;

  void copy_states(char* rows) const {
    const int64_t row_bytes = a.hidden * element_bytes;
    for (int64_t i = 0; i < num_tokens; ++i)
      std::memcpy(rows + i * a.states.stride * element_bytes, static_cast<char*>(a.residual) + i * row_bytes, row_bytes);
  }

  // After the last layer's keys and values nobody reads a token that is not asked for.
  void keep_wanted() {
    num_tokens = a.wanted.num_rows;
    keep_rows(qkv, row(), q_size);
    keep_rows(static_cast<char*>(a.residual), a.hidden, a.hidden);
  }

  void keep_rows(char* x, int64_t stride, int64_t size) const {
    for (int64_t i = 0; i < num_tokens; ++i)
      std::memmove(x + i * stride * element_bytes, x + a.wanted.rows[i] * stride * element_bytes, size * element_bytes);
  }

  void norm(const void* x, const void* weight, void* residual, void* out) const {
    const RmsNormArguments call{a.dtype, x, {a.hidden, 0}, residual, {a.hidden, 0}, out, {a.hidden, 0}, weight,
                                a.dtype, a.unit_offset, a.eps, num_tokens, 1, a.hidden, a.threads};
    tandem_rms_norm(&call);
  }

  // [num_tokens, k] to [num_tokens, n], the rows of which are `stride` apart.
  void linear(const void* x, int64_t k, const LinearMap& weight, const void* bias, void* out, int64_t n, int64_t stride,
              int64_t is_packed) const {
    if (weight.codes) {
      const CodedLinearArguments call{a.dtype, a.dtype, x, k, weight.codes, bias, out, stride, num_tokens, a.threads};
      return tandem_coded_linear(&call);
    }
    const LinearArguments call{a.dtype, a.dtype, x, k, weight.floats, bias, out, stride, num_tokens, n, k,
                               weight.sum_blocks, is_packed,
                               a.threads};
    tandem_linear(&call);
  }

  int64_t row() const { return q_size + 2 * kv_size; }
  char* keys() const { return qkv + q_size * element_bytes; }
  char* values() const { return keys() + kv_size * element_bytes; }

  void project(const Layer& layer) const {
    if (are_joined(layer.q.codes, layer.k.codes) && are_joined(layer.q.codes, layer.v.codes)) {
      const JoinedCodedArguments call{
          a.dtype, normed, a.hidden,
          {{layer.q.codes, layer.q_bias}, {layer.k.codes, layer.k_bias}, {layer.v.codes, layer.v_bias}},
          qkv, row(), num_tokens, a.threads};
      return tandem_joined_coded_linear(&call);
    }
    if (!layer.q.codes && !layer.k.codes && !layer.v.codes) {
      const JoinedLinearArguments call{a.dtype, normed, a.hidden,
                                       {{layer.q.floats, layer.q_bias, q_size}, {layer.k.floats, layer.k_bias, kv_size},
                                        {layer.v.floats, layer.v_bias, kv_size}},
                                       qkv, row(), num_tokens, a.hidden, a.is_packed, a.threads};
      return tandem_joined_linear(&call);
    }
    linear(normed, a.hidden, layer.q, layer.q_bias, qkv, q_size, row(), a.is_packed);
    linear(normed, a.hidden, layer.k, layer.k_bias, keys(), kv_size, row(), a.is_packed);
    linear(normed, a.hidden, layer.v, layer.v_bias, values(), kv_size, row(), a.is_packed);
  }

  static bool are_joined(const CodedWeights* a, const CodedWeights* b) {
    return a && b && a->group_size == b->group_size && a->permutation == b->permutation &&
           a->rounds_rows == b->rounds_rows && (!a->rounds_rows || have_the_same_bytes(*a, *b));
  }

  // Rounded rows are laid out for the bytes that codes stand for.
  static bool have_the_same_bytes(const CodedWeights& a, const CodedWeights& b) {
    return a.kind == b.kind && (!a.table || !std::memcmp(a.table, b.table, kTableSize * sizeof(float)));
  }

  void rotate_and_write(const Layer& layer, const Cache& cache) const {
    const Matrix heads{row(), a.head_dim};
    const RopeAndWriteArguments call{
        a.dtype, qkv, heads, keys(), heads, values(), heads, layer.cos, layer.sin, a.positions, cache.slots, cache.k,
        cache.k_block_stride, cache.v, cache.v_block_stride, layer.q_norm, layer.k_norm, a.dtype, a.unit_offset,
        a.eps, num_tokens, a.num_heads, a.num_kv_heads, a.head_dim, layer.half, a.block_size, a.threads};
    tandem_rope_and_write(&call);
  }

  void attend(const Layer& layer, const Cache& cache, bool leaves_some_out) const {
    const Wanted all{nullptr, num_tokens, a.query_start, a.seq_lens, cache.block_tables, cache.table_stride,
                     a.num_requests};
    const Wanted& batch = leaves_some_out ? a.wanted : all;
    const PagedAttentionArguments call{
        a.dtype, qkv, row(), a.head_dim, cache.k, cache.k_block_stride, cache.v, cache.v_block_stride,
        batch.block_tables, batch.table_stride, batch.query_start, batch.seq_lens, attended, q_size, a.head_dim,
        batch.num_requests, a.num_heads, a.num_kv_heads, a.head_dim, a.block_size, a.scale, layer.window, a.softcap,
        nullptr, a.threads};
    tandem_paged_attention(&call);
  }

  void norm_into_mlp(const Layer& layer) const {
    if (!layer.before_mlp) return norm(delta, layer.after_attention, a.residual, normed);
    norm(delta, layer.after_attention, nullptr, normed);
    norm(normed, layer.before_mlp, a.residual, normed);
  }

  void mlp(const Layer& layer) const {
    gate_and_up(layer);
    void* const out = layer.after_mlp ? normed : delta;
    linear(gated, a.ffn, layer.down, nullptr, out, a.hidden, a.hidden, a.is_packed);
    if (layer.after_mlp) norm(normed, layer.after_mlp, nullptr, delta);
  }

  // NOTE: both are codes, decoded alike, or none is.
  void gate_and_up(const Layer& layer) const {
    if (layer.gate.codes) {
      const CodedGatedLinearArguments call{a.dtype, a.activation, normed, a.hidden, layer.gate.codes, layer.up.codes,
                                           nullptr, nullptr, gated, a.ffn, num_tokens, a.threads};
      return tandem_coded_gated_linear(&call);
    }
    const GatedLinearArguments call{a.dtype, a.activation, normed, a.hidden, layer.gate.floats, layer.up.floats, nullptr,
                                    nullptr, gated, a.ffn, num_tokens, a.ffn, a.hidden, a.is_packed, a.threads};
    tandem_gated_linear(&call);
  }

  void mixture(const Layer& layer) const {
    const Mixture& constants = *layer.mixture;
    linear(normed, a.hidden, {constants.router, nullptr, 1}, constants.router_bias, logits, a.num_experts, a.num_experts, 0);
    ChooseExpertsArguments choice = constants.choice;
    choice.dtype = a.dtype, choice.logits = logits, choice.stride = a.num_experts, choice.n = num_tokens;
    choice.weights = weights, choice.chosen = chosen, choice.threads = a.threads;
    tandem_choose_experts(&choice);
    ExpertsArguments experts = constants.experts;
    experts.dtype = a.dtype, experts.x = normed, experts.x_stride = a.hidden, experts.weights = weights, experts.chosen = chosen;
    experts.out = delta, experts.out_dtype = a.dtype, experts.num_tokens = num_tokens, experts.top_k = a.top_k;
    experts.threads = a.threads;
    tandem_experts(&experts);
    if (layer.after_mlp) norm(delta, layer.after_mlp, nullptr, delta);
  }
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_stack(const StackArguments* a) { Stack(*a).run(); }
