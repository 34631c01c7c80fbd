// Sums of rows times strips of quantised weights, segment after segment of inputs (`coded_tiles.h`).
#pragma once
#include "coded_tiles.h"

namespace tandem {

// Adds segments to blocks, and blocks to the whole. `kVectors` for each row; lane i of them has scale i.
template <int kRows, int kVectors> class SegmentSums {
 public:
  SegmentSums(const CodedShape& shape, const float* segment_sums)
      : in_block_(shape.in_block()), segments_(shape.segments()), segment_sums_(segment_sums) {}

  // scales(i), offsets(i): vector i of those of segment `index`, if there are offsets. Changes `acc`.
  // NOTE: a block's sum is in `acc`, which is in registers, but between two segments of one block.
  template <class Scales, class Offsets>
  inline __attribute__((always_inline)) void add(int64_t index, Vec (*acc)[kVectors], const Scales& scales,
                                                 const Offsets& offsets) {
    const bool is_last = index + 1 == segments_;
    if (added_) scale(acc, scales, [&](int m, int i) { return sums_[m][i]; });
    else scale(acc, scales, [](int, int) { return Vec{}; });
    if (segment_sums_)
      for (int i = 0; i < kVectors; ++i) {
        const Vec offset = offsets(i);
        for (int m = 0; m < kRows; ++m) acc[m][i] = fused(offset, segment_sums_[m * segments_ + index] - Vec{}, acc[m][i]);
      }
    if (++added_ < in_block_ && !is_last) return keep(acc);
    added_ = 0;
    tree_.add(block_++, is_last, acc[0]);
    if (is_last) keep(acc);
  }
  const Vec (*sums() const)[kVectors] { return sums_; }

 private:
  template <class Scales, class Sums>
  static inline __attribute__((always_inline)) void scale(Vec (*acc)[kVectors], const Scales& scales, const Sums& sums) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vec scale = scales(i);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) acc[m][i] = fused(scale, acc[m][i], sums(m, i));
    }
  }
  inline __attribute__((always_inline)) void keep(const Vec (*acc)[kVectors]) {
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums_[m][i] = acc[m][i];
  }

  const int64_t in_block_, segments_;
  const float* const segment_sums_;
  int64_t added_ = 0, block_ = 0;
  Vec sums_[kRows][kVectors];
  SumTree<kRows * kVectors> tree_;
};

// Vector i of two strips side by side.
TANDEM_INLINE Vec part_of(const f32x16* first, const f32x16* second, int64_t index, int i) {
  return reinterpret_cast<const StoredVec*>((i < kVecs ? first : second) + index)[i % kVecs];
}

// Where strip s of a row's sums is.
TANDEM_INLINE f32x16 (*from_strip(f32x16 (*sums)[kPanelStrips], int s))[kPanelStrips] {
  return reinterpret_cast<f32x16(*)[kPanelStrips]>(&sums[0][s]);
}

}  // namespace tandem
