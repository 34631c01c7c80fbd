// Pairs of a token and one of its experts, in the order in which they are multiplied, and the sums of their products.
#pragma once
#include <algorithm>
#include <vector>

#include "calls.h"
#include "pool.h"
#include "strips.h"

namespace tandem {

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
  std::vector<const ExpertWeights*> experts;  // of each pair
  std::vector<int64_t> tokens;
  std::vector<float> weights;
  std::vector<int64_t> pairs;  // of each token, ascending

  Pairs(const ExpertsArguments& a, int64_t first, int64_t count, int64_t block_rows)
      : experts(size_t(count * a.top_k)), tokens(experts.size()), weights(tokens.size()), pairs(tokens.size()) {
    std::vector<int64_t> next(size_t(a.num_experts + 1));
    const int64_t* const chosen = a.chosen + first * a.top_k;
    for (size_t i = 0; i < tokens.size(); ++i) ++next[size_t(chosen[i] + 1)];
    for (int64_t e = 0; e < a.num_experts; ++e) {
      add_blocks(a.experts + e, next[size_t(e)], next[size_t(e + 1)], block_rows);
      next[size_t(e + 1)] += next[size_t(e)];
    }
    for (int64_t i = 0; i < int64_t(tokens.size()); ++i) {
      const int64_t pair = next[size_t(chosen[i])]++;
      experts[size_t(pair)] = a.experts + chosen[i];
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

// Adds the products of each token's pairs, float32 [pairs, hidden], into `out` [count, hidden].
template <class Out>
void sum_pairs(const ExpertsArguments& a, const Pairs& pairs, const float* products, Out* out, int64_t count) {
  const double cost = double(count * a.top_k * a.hidden) * kSumNs;
  Pool::run(count, split(count, cost, a.threads), [&](int64_t t, int64_t last) {
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
void for_each_panel(const ExpertsArguments& a, const Pairs& pairs, int64_t panels, double cost_ns, const Body& body) {
  const auto& blocks = pairs.blocks;
  const int64_t tasks = int64_t(blocks.size()) * panels;
  Pool::run(tasks, split(tasks, cost_ns, a.threads), [&](int64_t task, int64_t last) {
    for (; task < last; ++task) body(blocks[size_t(task / panels)], task % panels, task % panels + 1 < panels);
  });
}

}  // namespace tandem
