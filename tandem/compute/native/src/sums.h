// Sums over K in blocks of inputs, each summed from zero in order, then added in a tree whose shape depends only on the
// number of blocks. So the parts of a product that is divided between blocks add up to the bits of the whole. Quantised
// weights have blocks of 128 inputs; floats a few equal ones where ranks may split K (`LinearSpec.sum_blocks`), so that
// each rank's part is one node.
//
// Node (level, i) of the tree is the sum of blocks i << level up to (i + 1) << level: that of its two halves, or its
// left half alone if no block is in the right one.
#pragma once
#include "common.h"

namespace tandem {

constexpr int64_t kSumBlock = 128;  // inputs of codes; Python has it too, and a test compares them

// Adds up blocks in order, `kVectors` vectors of each: keeps the left halves of nodes that are not yet whole.
template <int kVectors> class SumTree {
 public:
  // Takes the sums of block `index`. Those of the last become the whole's.
  inline __attribute__((always_inline)) void add(int64_t index, bool is_last, Vec* sums) {
    int level = 0;
    for (int64_t left = index; is_last ? left != 0 : left & 1; left >>= 1, ++level) {
      if (!(left & 1)) continue;
#pragma GCC unroll 32
      for (int i = 0; i < kVectors; ++i) sums[i] = left_[level][i] + sums[i];
    }
    if (is_last) return;
#pragma GCC unroll 32
    for (int i = 0; i < kVectors; ++i) left_[level][i] = sums[i];
  }

 private:
  static constexpr int kLevels = 32;  // of 2^39 inputs
  Vec left_[kLevels][kVectors];
};

}  // namespace tandem
