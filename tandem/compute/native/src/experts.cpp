// The experts of a layer: pairs of token and expert are sorted by expert, each chosen expert is multiplied with all its
// rows at once, and a token's outputs are added in the order of its experts. No other expert is read.
//
// A row's bits do not depend on other rows: products are made of tiles (`tiles.h`), an output times its weight is
// rounded to float32, and a sum begins at zero. Threads divide rows, outputs and experts, never K nor a sum.
#include <atomic>

#include "expert_pairs.h"
#include "gating.h"
#include "tiles.h"

namespace tandem {
namespace {

// Numbers calls, so that a thread knows whether what it copied belongs to the present one.
inline uint64_t next_call() {
  static std::atomic<uint64_t> calls{0};
  return ++calls;
}

template <class T> class Experts {
  using X = typename Unit<T>::Type;
  static constexpr int kElements = Unit<T>::kElements, kFloats = sizeof(X) / sizeof(float);

 public:
  explicit Experts(const ExpertsArguments& arguments)
      : a(arguments), gated_units_(copied_units<T>(a.ffn)), is_packed_(a.is_packed != 0) {}

  void run() const {
    const int64_t pair_bytes = (gated_units_ * kFloats + a.hidden) * int64_t(sizeof(float));
    const int64_t part = max64(1, kScratchBytes / (pair_bytes * a.top_k));
    for (int64_t first = 0; first < a.num_tokens; first += part) run(first, min64(part, a.num_tokens - first));
  }

 private:
  void run(int64_t first, int64_t count) const {
    thread_local Workspace gated_space, out_space;
    const Pairs pairs(a, first, count, chunk_rows<T>(max64(a.hidden, a.ffn), is_packed_));
    const int64_t num_pairs = int64_t(pairs.tokens.size());
    X* const gated = reinterpret_cast<X*>(gated_space.reserve(size_t(num_pairs * gated_units_ * kFloats)));
    float* const out = out_space.reserve(size_t(num_pairs * a.hidden));
    gate(pairs, gated);
    project(pairs, gated, out);
    if (a.out_dtype == kFloat32) sum_pairs(a, pairs, out, static_cast<float*>(a.out) + first * a.hidden, count);
    else sum_pairs(a, pairs, out, static_cast<T*>(a.out) + first * a.hidden, count);
  }

  void gate(const Pairs& pairs, X* gated) const {
    const int64_t panels = ceil_div(a.ffn, kStrip);
    const uint64_t call = next_call();
    const Gating gating{int(a.activation), float(a.alpha), float(a.limit), float(a.shift)};
    for_each_panel(a, pairs, panels, cost(pairs, panels, a.hidden), [&, call](const Block& block, int64_t panel, bool has_next) {
      Strip<T> strips[kPanelStrips], next[kPanelStrips];
      gate_and_up(*block.expert, panel, strips);
      gate_and_up(*block.expert, has_next ? panel + 1 : panel, next);
      const TiledRows<T> rows{copied(pairs, block, call), copied_units<T>(a.hidden), block.count, 0,
                              num_tiles(block.count)};
      const f32x16 gate_shift = bias_of(strips[0]), up_shift = bias_of(strips[1]);
      multiply_panel(strips, rows, a.hidden, 1, is_packed_, has_next ? Ahead(next, a.hidden) : Ahead(),
                     [&](const f32x16 (*sums)[kPanelStrips], int64_t row, int count) {
        X* const tile = gated + (block.first + row) * gated_units_;
        for (int m = 0; m < count; ++m)
          store_units(tile, count, m, strips->column, gating(sums[m][0] + gate_shift, sums[m][1] + up_shift),
                      strips->rows);
      });
    });
  }

  void project(const Pairs& pairs, const X* gated, float* out) const {
    const int64_t panels = ceil_div(ceil_div(a.hidden, kStrip), kPanelStrips);
    for_each_panel(a, pairs, panels, cost(pairs, panels, a.ffn), [&](const Block& block, int64_t panel, bool has_next) {
      Strip<T> strips[kPanelStrips], next[kPanelStrips];
      down(*block.expert, panel, strips);
      down(*block.expert, has_next ? panel + 1 : panel, next);
      const TiledRows<T> rows{gated + block.first * gated_units_, gated_units_, block.count, 0, num_tiles(block.count)};
      multiply_panel(strips, rows, a.ffn, a.down_blocks, is_packed_, has_next ? Ahead(next, a.ffn) : Ahead(),
                     [&](const f32x16 (*sums)[kPanelStrips], int64_t row, int count) {
        for (int s = 0; s < kPanelStrips; ++s) {
          const f32x16 shift = bias_of(strips[s]);
          for (int m = 0; m < count; ++m) {
            const int64_t pair = block.first + row + m;
            store16(out + pair * a.hidden + strips[s].column, (sums[m][s] + shift) * splat(pairs.weights[size_t(pair)]),
                    strips[s].rows);
          }
        }
      });
    });
  }

  // The time of one thread for panels of all blocks.
  double cost(const Pairs& pairs, int64_t panels, int64_t k_size) const {
    const int64_t width = panels * kPanelStrips * kStrip;
    return double(pairs.blocks.size()) * cost_ns<T>(0, width, k_size) +
           double(pairs.tokens.size()) * (cost_ns<T>(1, width, k_size) - cost_ns<T>(0, width, k_size));
  }

  // The rows of a block as units, which the calling thread copies once for all its panels.
  const X* copied(const Pairs& pairs, const Block& block, uint64_t call) const {
    thread_local Workspace space;
    thread_local uint64_t copied_call = 0;
    thread_local int64_t copied_first = -1;
    const int64_t stride = copied_units<T>(a.hidden);
    X* const out = reinterpret_cast<X*>(space.reserve(size_t(block.count * stride * kFloats)));
    if (copied_call == call && copied_first == block.first) return out;
    const T* const x = static_cast<const T*>(a.x);
    for (int64_t t = 0; t < num_tiles(block.count); ++t) {
      const int64_t row = first_row(t, block.count);
      const int64_t* const tokens = &pairs.tokens[size_t(block.first + row)];
      copy_tile<T>([&](int m) { return x + tokens[m] * a.x_stride; }, int(first_row(t + 1, block.count) - row), a.hidden,
                   out + row * stride, stride);
    }
    copied_call = call, copied_first = block.first;
    return out;
  }

  // 16 elements of row m of a tile, rounded to T, where a product takes them as units; zeros up to a whole unit.
  void store_units(X* tile, int tile_rows, int m, int64_t column, f32x16 v, int count) const {
    T values[kLanes] = {};
    store16(values, v, count);
    const int whole = int(ceil_div(count, kElements)) * kElements;
    if constexpr (!kIsWidened<T>) {
      std::memcpy(reinterpret_cast<T*>(tile + m * gated_units_) + column, values, size_t(whole) * sizeof(T));
    } else {
      float* const to = reinterpret_cast<float*>(tile + column / kElements * tile_rows + m);
      for (int i = 0; i < whole; ++i) to[i / kElements * tile_rows * kElements + i % kElements] = to_float(values[i]);
    }
  }

  void gate_and_up(const ExpertWeights& expert, int64_t panel, Strip<T>* strips) const {
    const int64_t row = panel * kStrip;
    strips[0] = strip(expert.gate, expert.gate_bias, row, a.ffn, a.hidden);
    strips[1] = strip(expert.up, expert.up_bias, row, a.ffn, a.hidden);
  }

  // NOTE: past the end it is the last strip again, whose sums are then stored twice.
  void down(const ExpertWeights& expert, int64_t panel, Strip<T>* strips) const {
    const int64_t last = ceil_div(a.hidden, kStrip) - 1;
    for (int s = 0; s < kPanelStrips; ++s)
      strips[s] = strip(expert.down, expert.down_bias, min64(panel * kPanelStrips + s, last) * kStrip, a.hidden, a.ffn);
  }

  static Strip<T> strip(const void* weight, const void* bias, int64_t row, int64_t n_size, int64_t k_size) {
    return {static_cast<const T*>(weight) + row * k_size, bias ? static_cast<const T*>(bias) + row : nullptr, row,
            int(min64(kStrip, n_size - row))};
  }

  const ExpertsArguments& a;
  const int64_t gated_units_;
  const bool is_packed_;
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_experts(const ExpertsArguments* a) {
  if (a->is_coded) return tandem_coded_experts(a);
  with_dtype(a->dtype, [a](auto tag) { Experts<decltype(tag)>(*a).run(); });
}
