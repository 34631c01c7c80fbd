// The experts of a layer: pairs of token and expert are sorted by expert, each expert that is hit is multiplied with all
// its rows at once, and a token's outputs are added in the order of its experts. No other expert is read.
//
// A row's bits do not depend on those beside it: products are made of tiles (`tiles.h`), an output times its weight is
// rounded to float32, and a sum begins at zero. Threads share rows, outputs and experts, never K nor a sum.
#include <algorithm>
#include <atomic>
#include <vector>

#include "calls.h"
#include "gating.h"
#include "pool.h"
#include "tiles.h"

namespace tandem {
namespace {

constexpr int64_t kScratchBytes = 128 << 20;  // of gated rows and outputs; more tokens are computed in parts
constexpr double kSumNs = 0.1;                // one thread's time for an element

// Rows of one expert that are computed together, by their number in the order of pairs.
struct Block {
  const ExpertWeights* expert;
  int64_t first, count;
};

// Pairs of token and expert, by expert and then by token.
struct Pairs {
  std::vector<Block> blocks;
  std::vector<int64_t> tokens;   // of each pair
  std::vector<float> weights;
  std::vector<int64_t> pairs;  // of each token, ascending

  Pairs(const ExpertsArguments& a, int64_t first, int64_t count, int64_t block_rows)
      : tokens(size_t(count * a.top_k)), weights(tokens.size()), pairs(tokens.size()) {
    std::vector<int64_t> next(size_t(a.num_experts + 1));
    const int64_t* const chosen = a.chosen + first * a.top_k;
    for (size_t i = 0; i < tokens.size(); ++i) ++next[size_t(chosen[i] + 1)];
    for (int64_t e = 0; e < a.num_experts; ++e) {
      add_blocks(a.experts + e, next[size_t(e)], next[size_t(e + 1)], block_rows);
      next[size_t(e + 1)] += next[size_t(e)];
    }
    for (int64_t i = 0; i < int64_t(tokens.size()); ++i) {
      const int64_t pair = next[size_t(chosen[i])]++;
      tokens[size_t(pair)] = first + i / a.top_k;
      weights[size_t(pair)] = a.weights[first * a.top_k + i];
      pairs[size_t(i)] = pair;
    }
    for (int64_t t = 0; t < count; ++t) std::sort(&pairs[size_t(t * a.top_k)], &pairs[size_t(t * a.top_k)] + a.top_k);
  }

 private:
  void add_blocks(const ExpertWeights* expert, int64_t first, int64_t count, int64_t block_rows) {
    const int64_t parts = ceil_div(count, block_rows);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t begin = count * i / parts, end = count * (i + 1) / parts;
      blocks.push_back({expert, first + begin, end - begin});
    }
  }
};

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
      : a(arguments), gated_units_(copied_units<T>(a.ffn)), is_packed_(a.is_packed != 0), threads_(int(a.threads)) {}

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
    if (a.out_dtype == kFloat32) sum(pairs, out, static_cast<float*>(a.out) + first * a.hidden, count);
    else sum(pairs, out, static_cast<T*>(a.out) + first * a.hidden, count);
  }

  void gate(const Pairs& pairs, X* gated) const {
    const int64_t panels = ceil_div(a.ffn, kStrip);
    const uint64_t call = next_call();
    const Gating gating{int(a.activation), float(a.alpha), float(a.limit)};
    for_each_panel(pairs, panels, a.hidden, [&, call](const Block& block, int64_t panel, bool has_next) {
      Strip<T> strips[kPanelStrips], next[kPanelStrips];
      gate_and_up(*block.expert, panel, strips);
      gate_and_up(*block.expert, has_next ? panel + 1 : panel, next);
      const TiledRows<T> rows{copied(pairs, block, call), copied_units<T>(a.hidden), block.count, 0,
                              num_tiles(block.count)};
      const f32x16 gate_shift = bias_of(strips[0]), up_shift = bias_of(strips[1]);
      multiply_panel(strips, rows, a.hidden, is_packed_, has_next ? Ahead(next, a.hidden) : Ahead(),
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
    for_each_panel(pairs, panels, a.ffn, [&](const Block& block, int64_t panel, bool has_next) {
      Strip<T> strips[kPanelStrips], next[kPanelStrips];
      down(*block.expert, panel, strips);
      down(*block.expert, has_next ? panel + 1 : panel, next);
      const TiledRows<T> rows{gated + block.first * gated_units_, gated_units_, block.count, 0, num_tiles(block.count)};
      multiply_panel(strips, rows, a.ffn, is_packed_, has_next ? Ahead(next, a.ffn) : Ahead(),
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

  template <class Out> void sum(const Pairs& pairs, const float* products, Out* out, int64_t count) const {
    Pool::run(count, split(count, double(count * a.top_k * a.hidden) * kSumNs, threads_), [&](int64_t t, int64_t last) {
      for (; t < last; ++t)
        for (int64_t i = 0; i < a.hidden; i += kLanes) {
          const int width = int(min64(kLanes, a.hidden - i));
          f32x16 total{};
          for (int64_t k = 0; k < a.top_k; ++k)
            total += load16(products + pairs.pairs[size_t(t * a.top_k + k)] * a.hidden + i, width);
          store16(out + t * a.hidden + i, total, width);
        }
    });
  }

  // body(block, panel, whether the next panel of the block follows), panels of a block one after the other.
  template <class Body>
  void for_each_panel(const Pairs& pairs, int64_t panels, int64_t k_size, const Body& body) const {
    const auto& blocks = pairs.blocks;
    const int64_t tasks = int64_t(blocks.size()) * panels, width = panels * kPanelStrips * kStrip;
    const double cost = double(blocks.size()) * cost_ns<T>(0, width, k_size) +
                        double(pairs.tokens.size()) * (cost_ns<T>(1, width, k_size) - cost_ns<T>(0, width, k_size));
    Pool::run(tasks, split(tasks, cost, threads_), [&](int64_t task, int64_t last) {
      for (; task < last; ++task) body(blocks[size_t(task / panels)], task % panels, task % panels + 1 < panels);
    });
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
  const int threads_;
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_experts(const ExpertsArguments* a) {
  with_dtype(a->dtype, [a](auto tag) { Experts<decltype(tag)>(*a).run(); });
}
