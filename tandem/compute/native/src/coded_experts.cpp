// The experts of a layer (`experts.cpp`) with quantised weights: alike in kind and groups, each with its own
// permutation of inputs, if any.
//
// Rows are prepared for each pair of token and expert before each of the two products, because experts may permute them
// differently.
#include "coded_product.h"
#include "expert_pairs.h"
#include "gating.h"

namespace tandem {
namespace {

TANDEM_INLINE const CodedWeights& codes_of(const void* matrix) { return *static_cast<const CodedWeights*>(matrix); }
TANDEM_INLINE CodedShape shape_of(const CodedWeights& w) { return {w.k, segment_of(w)}; }

// `ready`, `gated_ready`: make rows ready for the first product and the second, each as its matrices want them, rounded
// or not.
template <class T> class CodedExperts {
 public:
  explicit CodedExperts(const ExpertsArguments& arguments)
      : a(arguments), inner_(shape_of(codes_of(a.experts->gate))), outer_(shape_of(codes_of(a.experts->down))) {}

  template <class Ready, class GatedReady> void run(const Ready& ready, const GatedReady& gated_ready) const {
    const int64_t units = max64(inner_.steps(), outer_.steps()) * kStepInputs;
    const int64_t pair_bytes = (units + a.ffn + a.hidden) * int64_t(sizeof(float));
    const int64_t part = max64(1, kScratchBytes / (pair_bytes * a.top_k));
    for (int64_t first = 0; first < a.num_tokens; first += part)
      run(ready, gated_ready, first, min64(part, a.num_tokens - first));
  }

 private:
  template <class Ready, class GatedReady>
  void run(const Ready& ready, const GatedReady& gated_ready, int64_t first, int64_t count) const {
    thread_local Workspace gated_space, out_space;
    const Pairs pairs(a, first, count, kChunkRows);
    const int64_t num_pairs = int64_t(pairs.tokens.size());
    T* const gated = reinterpret_cast<T*>(gated_space.reserve(size_t(num_pairs * a.ffn)));
    float* const out = out_space.reserve(size_t(num_pairs * a.hidden));
    gate(ready, pairs, gated);
    project(gated_ready, pairs, gated, out);
    if (a.out_dtype == kFloat32) sum_pairs(a, pairs, out, static_cast<float*>(a.out) + first * a.hidden, count);
    else sum_pairs(a, pairs, out, static_cast<T*>(a.out) + first * a.hidden, count);
  }

  template <class Ready> void gate(const Ready& ready, const Pairs& pairs, T* gated) const {
    const T* const x = static_cast<const T*>(a.x);
    const auto rows = ready.gathered([&](int64_t i) {
      return RowOf<T>{x + pairs.tokens[size_t(i)] * a.x_stride, codes_of(pairs.experts[size_t(i)]->gate).permutation};
    }, int64_t(pairs.tokens.size()));
    const int64_t panels = ceil_div(a.ffn, kStrip);
    const Gating gating{int(a.activation), float(a.alpha), float(a.limit), float(a.shift)};
    for_each_panel(a, pairs, panels, cost(pairs, codes_of(a.experts->gate), 2), [&](const Block& block, int64_t panel, bool has_next) {
      const ExpertWeights& expert = *block.expert;
      const CodedStrip codes[kPanelStrips] = {{&codes_of(expert.gate), panel}, {&codes_of(expert.up), panel}};
      const CodedStrip next[kPanelStrips] = {{codes[0].weights, panel + 1}, {codes[1].weights, panel + 1}};
      const int64_t column = panel * kStrip;
      const int width = int(min64(kStrip, a.ffn - column));
      const f32x16 gate_shift = bias(expert.gate_bias, column, width), up_shift = bias(expert.up_bias, column, width);
      multiply_coded_panel(codes, rows.part(block.first, block.count, inner_), inner_, has_next ? codes_ahead(next) : Ahead(),
                           [&](const f32x16 (*sums)[kPanelStrips], int64_t row, int count) {
        for (int m = 0; m < count; ++m)
          store16(gated + (block.first + row + m) * a.ffn + column,
                  gating(sums[m][0] + gate_shift, sums[m][1] + up_shift), width);
      });
    });
  }

  template <class Ready> void project(const Ready& ready, const Pairs& pairs, const T* gated, float* out) const {
    const int64_t num_pairs = int64_t(pairs.tokens.size());
    bool is_permuted = false;
    for (const Block& block : pairs.blocks) is_permuted |= codes_of(block.expert->down).permutation != nullptr;
    const auto row = [&](int64_t i) {
      return RowOf<T>{gated + i * a.ffn, codes_of(pairs.experts[size_t(i)]->down).permutation};
    };
    const auto rows = is_permuted ? ready.gathered(row, num_pairs) : ready.placed(gated, a.ffn, nullptr, num_pairs);
    const int64_t strips = ceil_div(a.hidden, kStrip), panels = ceil_div(strips, kPanelStrips);
    for_each_panel(a, pairs, panels, cost(pairs, codes_of(a.experts->down), 1), [&](const Block& block, int64_t panel, bool has_next) {
      const ExpertWeights& expert = *block.expert;
      // NOTE: past the end it is the last strip again, whose sums are then stored twice.
      const auto strip = [&](int64_t index) { return CodedStrip{&codes_of(expert.down), min64(index, strips - 1)}; };
      const int64_t first = panel * kPanelStrips;
      const CodedStrip codes[kPanelStrips] = {strip(first), strip(first + 1)};
      const CodedStrip next[kPanelStrips] = {strip(first + 2), strip(first + 3)};
      multiply_coded_panel(codes, rows.part(block.first, block.count, outer_), outer_, has_next ? codes_ahead(next) : Ahead(),
                           [&](const f32x16 (*sums)[kPanelStrips], int64_t row, int count) {
        for (int s = 0; s < kPanelStrips; ++s) {
          const int64_t column = codes[s].index * kStrip;
          const int width = int(min64(kStrip, a.hidden - column));
          const f32x16 shift = bias(expert.down_bias, column, width);
          for (int m = 0; m < count; ++m) {
            const int64_t pair = block.first + row + m;
            store16(out + pair * a.hidden + column, (sums[m][s] + shift) * splat(pairs.weights[size_t(pair)]), width);
          }
        }
      });
    });
  }

  // The time of one thread for `matrices` like `w` of all blocks.
  static double cost(const Pairs& pairs, const CodedWeights& w, int64_t matrices) {
    const double none = coded_cost_ns(w.kind, 0, matrices * w.n, w.k), one = coded_cost_ns(w.kind, 1, matrices * w.n, w.k);
    return double(pairs.blocks.size()) * none + double(pairs.tokens.size()) * (one - none);
  }

  static f32x16 bias(const void* bias, int64_t column, int width) {
    return bias ? load16(static_cast<const T*>(bias) + column, width) : f32x16{};
  }

  const ExpertsArguments& a;
  const CodedShape inner_, outer_;
};

// body(what makes rows ready for weights like `w`).
template <class T, class Body> void with_ready(const CodedWeights& w, int threads, const Body& body) {
  if (w.rounds_rows) return body(RowRounding<T>(w, shape_of(w), w.offsets, threads));
  body(PreparedRows<T>(shape_of(w), w.offsets, threads));
}

}  // namespace
}  // namespace tandem

using namespace tandem;

void tandem_coded_experts(const ExpertsArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const CodedExperts<T> experts(*a);
    with_ready<T>(codes_of(a->experts->gate), int(a->threads), [&](const auto& ready) {
      with_ready<T>(codes_of(a->experts->down), int(a->threads),
                    [&](const auto& gated_ready) { experts.run(ready, gated_ready); });
    });
  });
}
