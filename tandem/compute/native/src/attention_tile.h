// One key tile of attention: packing K and V, and the small matrix products over them.
//
// Packed operands are 32-bit words: two bfloat16 along the summed dimension where the CPU multiplies such pairs,
// one float otherwise. Lanes are outputs and every output is summed in order, so no result depends on its neighbours.
#pragma once
#include "common.h"

namespace tandem {

constexpr int kTile = 64;  // keys
// Query rows in a register tile, and 16 lanes of keys or values beside them.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileVectors = 4;  // 24 of 32 registers
#else
constexpr int kTileRows = 6, kTileVectors = 1;  // 12 of 16
#endif

// What is multiplied: a 32-bit word is two bfloat16 along the summed dimension, or one float.
template <class T> struct Words {
  static constexpr int kPair = 1;
  static f32x16 load(const T* p, int count) { return load16(p, count); }
  TANDEM_INLINE Vec dot(Vec acc, float a, Vec b) { return a * b + acc; }
  static void store_probabilities(float* to, f32x16 a, f32x16 b) { store16(to, a), store16(to + kLanes, b); }
  static void interleave(const T* a, const T*, float* to, int count) { store16(to, load16(a, min64(count, 16))); }
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct Words<bf16> {
  static constexpr int kPair = 2;
  static f32x16 load(const bf16* p, int count) {
    return _mm512_maskz_loadu_ps(mask_of(count), p);
  }
  TANDEM_INLINE f32x16 dot(f32x16 acc, float a, f32x16 b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)splat(a), (__m512bh)b);
  }
  static void store_probabilities(float* to, f32x16 a, f32x16 b) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b, a));
  }
  // Words (a[d], b[d]) of two keys' values, for 16 d.
  static void interleave(const bf16* a, const bf16* b, float* to, int count) {
    const __m512i low = _mm512_cvtepu16_epi32(load16_halves(a, count));
    const __m512i high = _mm512_cvtepu16_epi32(load16_halves(b, count));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};
#endif

// Asks L2 for `count` rows of the next tile. Done a little at a time between packing steps, in address order: in bursts
// the core runs out of outstanding misses.
template <class T> TANDEM_INLINE void prefetch_rows(const T* const* rows, int count, int head_dim) {
  for (int j = 0; j < count; ++j)
    for (int offset = 0; offset < head_dim; offset += int(64 / sizeof(T))) __builtin_prefetch(rows[j] + offset, 0, 2);
}

#if defined(__AVX2__) && !defined(__AVX512F__)
TANDEM_INLINE void transpose8(Vec* v) {
  __m256 a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(__m256(v[i]), __m256(v[i + 1]));
    a[i + 1] = _mm256_unpackhi_ps(__m256(v[i]), __m256(v[i + 1]));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44), b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44), b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = Vec(_mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
    v[i + 4] = Vec(_mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
  }
}
#endif

TANDEM_INLINE void transpose16(f32x16* v) {
#if defined(__AVX512F__)
  f32x16 t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]), t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const auto lo = [](f32x16 a, f32x16 b) { return (f32x16)_mm512_unpacklo_pd((__m512d)a, (__m512d)b); };
    const auto hi = [](f32x16 a, f32x16 b) { return (f32x16)_mm512_unpackhi_pd((__m512d)a, (__m512d)b); };
    v[i] = lo(t[i], t[i + 2]), v[i + 1] = hi(t[i], t[i + 2]);
    v[i + 2] = lo(t[i + 1], t[i + 3]), v[i + 3] = hi(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), t[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88), t[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88), v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
#elif defined(__AVX2__)
  f32x16 t[16];
  for (int half = 0; half < 2; ++half)
    for (int part = 0; part < 2; ++part) {
      Vec quarter[8];
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) quarter[i] = v[8 * half + i].part[part];
      transpose8(quarter);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) t[8 * part + i].part[half] = quarter[i];
    }
  std::memcpy(v, t, sizeof t);
#else
  f32x16 t[16];
  float* to = reinterpret_cast<float*>(t);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) std::memcpy(to + j * 16 + i, reinterpret_cast<const float*>(v) + i * 16 + j, sizeof *to);
  std::memcpy(v, t, sizeof t);
#endif
}

// packed[word][key]: 16 keys' K, transposed so that lanes are keys. `next`: 16 rows to prefetch meanwhile, or null.
template <class T> void pack_keys(const T* const* rows, const T* const* next, int head_dim, float* packed) {
  const int words = head_dim / Words<T>::kPair;
  for (int w = 0; w < words; w += kLanes) {
    const int count = int(min64(kLanes, words - w));
    if (next) prefetch_rows(next + w * 16 / words, (w + count) * 16 / words - w * 16 / words, head_dim);
    f32x16 v[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = Words<T>::load(rows[i] + w * Words<T>::kPair, count);
    transpose16(v);
    if (count == kLanes) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) store16(packed + (w + i) * kTile, v[i]);
    } else {
      for (int i = 0; i < count; ++i) store16(packed + (w + i) * kTile, v[i]);
    }
  }
}

// packed[key word][d]: 16 keys' V; a word holds the values of kPair consecutive keys. `next` as above.
template <class T>
void pack_values(const T* const* rows, const T* const* next, int head_dim, int padded_dim, float* packed) {
  constexpr int kPair = Words<T>::kPair;
  for (int j = 0; j < kLanes; j += kPair) {
    if (next) prefetch_rows(next + j, kPair, head_dim);
    for (int d = 0; d < head_dim; d += kLanes)
      Words<T>::interleave(rows[j] + d, rows[j + kPair - 1] + d, packed + j / kPair * padded_dim + d,
                           int(min64(kLanes, head_dim - d)));
  }
}

// c[row][0 .. 16 kVectors) = c * scale[row] + sum over steps of a[row][step] * b[step][...]; c starts at 0 without scale.
template <class T, int kCount, int kVectors>
void multiply_add(const float* a, int lda, const float* b, int ldb, int steps, const float* scale, float* c, int ldc) {
  constexpr int kAll = kVectors * kVecs;
  Vec acc[kCount][kAll] = {};
  if (scale) {
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kAll; ++v) acc[r][v] = load_vec(c + r * ldc + v * kVecLanes) * scale[r];
  }
  for (int s = 0; s < steps; ++s) {
    Vec right[kAll];
#pragma GCC unroll 4
    for (int v = 0; v < kAll; ++v) right[v] = load_vec(b + s * ldb + v * kVecLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kAll; ++v) acc[r][v] = Words<T>::dot(acc[r][v], a[r * lda + s], right[v]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kCount; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kAll; ++v) store_vec(c + r * ldc + v * kVecLanes, acc[r][v]);
}

template <class T, int kCount>
void multiply_add_vectors(int vectors, const float* a, int lda, const float* b, int ldb, int steps,
                          const float* scale, float* c, int ldc) {
  for (; vectors >= kTileVectors; vectors -= kTileVectors, b += kTileVectors * kLanes, c += kTileVectors * kLanes)
    multiply_add<T, kCount, kTileVectors>(a, lda, b, ldb, steps, scale, c, ldc);
  if constexpr (kTileVectors > 1) {
    if (vectors == 3) multiply_add<T, kCount, 3>(a, lda, b, ldb, steps, scale, c, ldc);
    if (vectors == 2) multiply_add<T, kCount, 2>(a, lda, b, ldb, steps, scale, c, ldc);
    if (vectors == 1) multiply_add<T, kCount, 1>(a, lda, b, ldb, steps, scale, c, ldc);
  }
}

template <class T>
void multiply_add_rows(int rows, int vectors, const float* a, int lda, const float* b, int ldb, int steps,
                       const float* scale, float* c, int ldc) {
  switch (rows) {
    case 1: return multiply_add_vectors<T, 1>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
    case 2: return multiply_add_vectors<T, 2>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
    case 3: return multiply_add_vectors<T, 3>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
    case 4: return multiply_add_vectors<T, 4>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
    case 5: return multiply_add_vectors<T, 5>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
    default: return multiply_add_vectors<T, kTileRows>(vectors, a, lda, b, ldb, steps, scale, c, ldc);
  }
}

}  // namespace tandem
