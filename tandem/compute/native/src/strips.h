// Weights in the order in which a product reads them: strips of 16 rows. A transposed strip has, unit after unit of K,
// that unit of all 16 rows, so that it is read as one stream from memory. Strips that are stored as rows are transposed
// into a panel that stays in L2 while all rows of x pass. Meanwhile the next panel is prefetched, so weights come from
// memory only once.
#pragma once
#include <type_traits>

#include "common.h"

namespace tandem {

constexpr int kStrip = kLanes;
constexpr int kPanelStrips = 2;  // strips whose products are stored together

// A tile multiplies two vectors: as many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int kTileStrips = 2, kMaxRows = 12;  // 24 of 32
#else
constexpr int kTileStrips = 1, kMaxRows = 6;  // 12 of 16
#endif
static_assert(kTileStrips * kVecs == 2, "a tile multiplies two vectors");
constexpr int kStreamingRows = kTileStrips == 2 ? kMaxRows : 4;
// Units that a streaming walk asks for ahead. More rows keep the processor from reaching the next loads by itself.
template <int kRows> constexpr int kUnitsAhead = kRows <= 4 ? 40 : 128;
constexpr int64_t kChunkRows = 384;         // rows of x in a task, at most
constexpr int64_t kChunkBytes = 256 << 10;  // that they take, widened, to stay in L2
constexpr double kBytesPerNs = 25.0, kFlopsPerNs = 200.0;  // what one thread reads and computes
constexpr int kLineBytes = 64;

// What one multiplication adds to a lane: one element as a float or, of bfloat16, two. `Type` is that of x, whose
// elements are floats where the processor multiplies nothing else: then x is widened once and not at each strip.
template <class T> struct Unit {
  using Type = float;
  static constexpr int kElements = 1;
  static constexpr int kParts = 1;  // multiplications
  static constexpr bool kIsStored = std::is_same<T, float>::value;  // memory has units
  TANDEM_INLINE f32x16 load(const T* p, int count) { return load16(p, count); }
  template <int> TANDEM_INLINE Vec part(const StoredVec* w) { return *w; }
  template <int> TANDEM_INLINE Vec dot(Vec acc, const float* x, Vec w) { return *x * w + acc; }
};
template <> struct Unit<bf16> {
#if defined(__AVX512BF16__)
  using Type = uint32_t;
#else
  struct Type { float first, second; };
#endif
  static constexpr int kElements = 2;
  static constexpr bool kIsStored = true;
  TANDEM_INLINE f32x16 load(const bf16* p, int count) {
    f32x16 units{};
    std::memcpy(&units, p, size_t(count) * sizeof(bf16));
    return units;
  }
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;
  template <int> TANDEM_INLINE Vec part(const StoredVec* w) { return *w; }
  template <int> TANDEM_INLINE Vec dot(Vec acc, const Type* x, Vec w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(int(*x)), (__m512bh)w);
  }
#else
  static constexpr int kParts = 2;
  template <int kPart> TANDEM_INLINE Vec part(const StoredVec* w) {
    const IntVec pairs = reinterpret_cast<IntVec>(Vec(*w));
    return reinterpret_cast<Vec>(kPart ? pairs & int32_t(0xffff0000u) : pairs << 16);
  }
  template <int kPart> TANDEM_INLINE Vec dot(Vec acc, const Type* x, Vec w) {
    return (kPart ? x->second : x->first) * w + acc;
  }
#endif
};
template <class T> constexpr int kBlock = kLanes * Unit<T>::kElements;  // elements of K that are turned round at once
template <class T> TANDEM_INLINE int64_t units(int64_t k) {
  return (k + Unit<T>::kElements - 1) / Unit<T>::kElements;
}

// Turns four units of 16 rows round, from unit u on: out[i] has unit u + i of every row.
TANDEM_INLINE void turn4(const float* const* row, int64_t u, f32x16* out) {
#if defined(__AVX512F__)
  __m512 v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // NOTE: a masked load is no shuffle, of which there is but one a cycle
    v[i] = _mm512_broadcast_f32x4(_mm_loadu_ps(row[i] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_loadu_ps(row[i + 4] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_loadu_ps(row[i + 8] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_loadu_ps(row[i + 12] + u));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
#elif defined(__AVX2__)
  float* to = reinterpret_cast<float*>(out);
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    __m128 a = _mm_loadu_ps(row[i] + u), b = _mm_loadu_ps(row[i + 1] + u);
    __m128 c = _mm_loadu_ps(row[i + 2] + u), d = _mm_loadu_ps(row[i + 3] + u);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_store_ps(to + i, a), _mm_store_ps(to + kLanes + i, b);
    _mm_store_ps(to + 2 * kLanes + i, c), _mm_store_ps(to + 3 * kLanes + i, d);
  }
#else
  float* to = reinterpret_cast<float*>(out);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) std::memcpy(to + j * kLanes + i, row[i] + u + j, sizeof *to);
#endif
}

// 16 weight rows or fewer: the first of them or, turned round, their units. Their products begin at `column`.
template <class T> struct Strip {
  const T *weight, *bias;
  int64_t column;
  int rows;
};
template <class T> TANDEM_INLINE f32x16 bias_of(const Strip<T>& strip) {
  return strip.bias ? load16(strip.bias, strip.rows) : f32x16{};
}

// Asks L2 for two strips, in address order: that keeps DRAM pages and the hardware prefetcher happy.
class Ahead {
 public:
  Ahead() = default;
  template <class T> Ahead(const Strip<T>* strips, int64_t k_size) : bytes_(kStrip * k_size * int64_t(sizeof(T))) {
    for (int s = 0; s < kPanelStrips; ++s) strip_[s] = reinterpret_cast<const char*>(strips[s].weight);
  }

  Ahead(const void* first, const void* second, int64_t bytes)
      : strip_{static_cast<const char*>(first), static_cast<const char*>(second)}, bytes_(bytes) {}

  template <int kLines> inline __attribute__((always_inline)) void ask() {
    if (at_ >= bytes_) return;
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(strip_[0] + at_ + i * kLineBytes, 0, 2);
    if ((at_ += kLines * kLineBytes) < bytes_ || strip_[0] == strip_[1]) return;
    at_ = 0;
    strip_[0] = strip_[1];
  }

 private:
  const char* strip_[kPanelStrips] = {};
  int64_t at_ = 0, bytes_ = 0;
};

// Where the units of 16 rows are: in the weights, or in `copy` where they are the last ones or not stored as such.
template <class T>
TANDEM_INLINE void block_of(const Strip<T>& strip, int64_t k, int64_t k_size, float (*copy)[kLanes], const float** at) {
  const bool is_there = Unit<T>::kIsStored && k + kBlock<T> <= k_size;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const T* row = strip.weight + min64(i, strip.rows - 1) * k_size + k;
    at[i] = is_there ? reinterpret_cast<const float*>(row) : copy[i];
    if (!is_there) store16(copy[i], Unit<T>::load(row, int(min64(kBlock<T>, k_size - k))));
  }
}

// A strip turned round: [unit][row], zeros up to a whole block. Rows that it lacks repeat its last.
template <class T> void turn(const Strip<T>& strip, int64_t k_size, f32x16* out, Ahead& ahead) {
  for (int64_t k = 0; k < k_size; k += kBlock<T>, out += kLanes) {
    alignas(64) float copy[kLanes][kLanes];
    const float* at[kLanes];
    block_of(strip, k, k_size, copy, at);
#pragma GCC unroll 4
    for (int u = 0; u < kLanes; u += 4) turn4(at, u, out + u);
    ahead.ask<8>();
  }
}

}  // namespace tandem
