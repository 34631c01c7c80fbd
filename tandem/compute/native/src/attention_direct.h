// One key tile of attention for the few query rows of a decode: K and V go from the cache through registers.
//
// With few rows, packing operands costs more time than it saves, and a decode is bound by memory: the next tile's lines
// are prefetched evenly all the way. Every output is summed in the same order as from packed operands, so the bits are
// the same.
#pragma once
#include <type_traits>

#include "attention_tile.h"

namespace tandem {

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <class T> constexpr bool kReadsDirectly = std::is_same_v<T, bf16>;
constexpr int kChunk = 2 * kLanes;  // head dimensions that fill a register of bfloat16
constexpr int kDirectRows = 8;      // the most query rows that are worth it

// The next tile's rows, to be asked for line by line.
class Ahead {
 public:
  Ahead(const bf16* const* rows, int head_dim) : rows_(rows), head_dim_(head_dim) {}
  __attribute__((always_inline)) void prefetch() {
    if (!rows_) return;
    __builtin_prefetch(*rows_ + at_, 0, 2);
    at_ += kChunk;
    if (at_ == head_dim_) ++rows_, at_ = 0;
  }

 private:
  const bf16* const* rows_;
  int head_dim_, at_ = 0;
};

// scores[row][key]: as multiply_add over packed keys. `used`: keys of the tile, rounded up to vectors.
template <int kRows>
void direct_scores(const float* q, int words, const bf16* const* keys, const bf16* const* next, int used,
                   float (*scores)[kTile]) {
  Ahead ahead(next, 2 * words);
  for (int j = 0; j < used; j += kLanes) {
    f32x16 acc[kRows] = {};
    for (int w = 0; w < words; w += kLanes) {
      f32x16 v[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) v[i] = Words<bf16>::load(keys[j + i] + 2 * w, kLanes);
      transpose16(v);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        ahead.prefetch();
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r] = Words<bf16>::dot(acc[r], q[r * words + w + i], v[i]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store16(scores[r] + j, acc[r]);
  }
}

// sums[row] = sums[row] * scale[row] + probabilities[row] . values, `pairs` pairs of keys; as multiply_add over packed
// values. Interleaving two keys' registers leaves blocks of four dimensions in another order, which is undone.
template <int kRows>
void direct_values(const float (*probabilities)[kTile / 2], const bf16* const* values, const bf16* const* next,
                   int pairs, int head_dim, const float* scale, float* sums) {
  Ahead ahead(next, head_dim);
  for (int c = 0; c < head_dim / kChunk; ++c) {
    f32x16 low[kRows], high[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float* from = sums + r * head_dim + c * kChunk;
      const f32x16 a = load16(from) * splat(scale[r]), b = load16(from + kLanes) * splat(scale[r]);
      low[r] = _mm512_shuffle_f32x4(a, b, 0x88), high[r] = _mm512_shuffle_f32x4(a, b, 0xdd);
    }
    for (int p = 0; p < pairs; ++p) {
      ahead.prefetch(), ahead.prefetch();
      const __m512i a = _mm512_loadu_si512(values[2 * p] + c * kChunk);
      const __m512i b = _mm512_loadu_si512(values[2 * p + 1] + c * kChunk);
      const f32x16 ab_low = (f32x16)_mm512_unpacklo_epi16(a, b), ab_high = (f32x16)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        low[r] = Words<bf16>::dot(low[r], probabilities[r][p], ab_low);
        high[r] = Words<bf16>::dot(high[r], probabilities[r][p], ab_high);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      float* to = sums + r * head_dim + c * kChunk;
      const f32x16 first = _mm512_shuffle_f32x4(low[r], high[r], 0x44), last = _mm512_shuffle_f32x4(low[r], high[r], 0xee);
      store16(to, _mm512_shuffle_f32x4(first, first, 0xd8));
      store16(to + kLanes, _mm512_shuffle_f32x4(last, last, 0xd8));
    }
  }
}
#else
template <class T> constexpr bool kReadsDirectly = false;
constexpr int kChunk = 2 * kLanes, kDirectRows = 0;
template <int, class... Given> void direct_scores(Given...);  // never called
template <int, class... Given> void direct_values(Given...);
#endif

}  // namespace tandem
