// Shared vocabulary of the kernels: element types, 16-lane float vectors, conversions and exp2.
//
// Everything is written on GCC vector extensions, which lower to AVX-512, AVX2, SSE or NEON alike; intrinsics
// appear only where they pay. Each helper does the same operations on every lane, and a partial vector goes
// through the same arithmetic as a full one, so where an element sits never changes its bits.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))
#define TANDEM_INLINE static inline __attribute__((always_inline))

namespace tandem {

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
enum DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Calls `body` with a value of the element type that `dtype` names.
template <class Body> inline void with_dtype(int64_t dtype, const Body& body) {
  if (dtype == kBFloat16) return body(bf16{});
  if (dtype == kFloat16) return body(fp16{});
  body(float{});
}

constexpr int kLanes = 16;
typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(64)));

// What one instruction multiplies: 16 lanes or, since the compiler keeps no longer vectors in registers than the
// processor has, half of them.
#if defined(__AVX512F__)
using Vec = f32x16;
using IntVec = i32x16;
#else
typedef float Vec __attribute__((vector_size(32), aligned(32), may_alias));
typedef int32_t IntVec __attribute__((vector_size(32), aligned(32), may_alias));
#endif
constexpr int kVecLanes = sizeof(Vec) / sizeof(float), kVecs = kLanes / kVecLanes;
TANDEM_INLINE Vec load_vec(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
TANDEM_INLINE void store_vec(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

TANDEM_INLINE f32x16 splat(float value) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(value);
#else
  return value - f32x16{};
#endif
}
TANDEM_INLINE i32x16 bits_of(f32x16 v) { return reinterpret_cast<i32x16>(v); }
TANDEM_INLINE f32x16 float_of(i32x16 v) { return reinterpret_cast<f32x16>(v); }
TANDEM_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return a > b ? a : b; }

TANDEM_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// ---- scalar conversions: round to nearest even, NaN stays NaN ----
TANDEM_INLINE float as_float(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
TANDEM_INLINE uint32_t as_bits(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }
TANDEM_INLINE float to_float(float v) { return v; }
TANDEM_INLINE float to_float(bf16 v) { return as_float(uint32_t(v.bits) << 16); }
TANDEM_INLINE float to_float(fp16 v) {
  const uint32_t sign = uint32_t(v.bits & 0x8000u) << 16, magnitude = v.bits & 0x7fffu;
  const float scaled = as_float(magnitude << 13) * as_float(0x77800000u);  // x 2^112 rebiases, subnormals too
  return as_float((magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : as_bits(scaled)) | sign);
}
template <class T> TANDEM_INLINE T from_float(float v);
template <> inline float from_float<float>(float v) { return v; }
template <> inline bf16 from_float<bf16>(float v) {
  const uint32_t u = as_bits(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((u >> 16) | 0x40u)};
  return bf16{uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
template <> inline fp16 from_float<fp16>(float v) {
  const uint32_t u = as_bits(v), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return fp16{uint16_t(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return fp16{uint16_t(sign | 0x7c00u)};
  if (magnitude < 0x38800000u) {  // subnormal half: adding 0.5 makes the hardware round at the right bit
    const float shifted = as_float(magnitude) + 0.5f;
    return fp16{uint16_t(sign | (as_bits(shifted) - 0x3f000000u))};
  }
  return fp16{uint16_t(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13))};
}

// ---- 16 elements at a time; the partial forms touch only `count` elements and read the rest as zero ----
template <class T> TANDEM_INLINE f32x16 load16(const T* p, int count = kLanes) {
  f32x16 v{};
  for (int i = 0; i < count; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T> TANDEM_INLINE void store16(T* p, f32x16 v, int count = kLanes) {
  for (int i = 0; i < count; ++i) p[i] = from_float<T>(v[i]);
}
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
TANDEM_INLINE __mmask16 mask_of(int count) { return __mmask16((1u << count) - 1u); }
TANDEM_INLINE f32x16 load16(const float* p, int count = kLanes) {
  return count == kLanes ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(mask_of(count), p);
}
TANDEM_INLINE __m256i load16_halves(const void* p, int count) {
  return count == kLanes ? _mm256_loadu_si256(static_cast<const __m256i*>(p))
                         : _mm256_maskz_loadu_epi16(mask_of(count), p);
}
TANDEM_INLINE f32x16 load16(const bf16* p, int count = kLanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load16_halves(p, count)), 16));
}
TANDEM_INLINE f32x16 load16(const fp16* p, int count = kLanes) {
  return _mm512_cvtph_ps(load16_halves(p, count));
}
TANDEM_INLINE __m256i to_bf16_halves(f32x16 v) {
  const __m512i u = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), one);
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
TANDEM_INLINE void store16(float* p, f32x16 v, int count = kLanes) {
  _mm512_mask_storeu_ps(p, mask_of(count), v);
}
TANDEM_INLINE void store16(bf16* p, f32x16 v, int count = kLanes) {
  _mm256_mask_storeu_epi16(p, mask_of(count), to_bf16_halves(v));
}
TANDEM_INLINE void store16(fp16* p, f32x16 v, int count = kLanes) {
  _mm256_mask_storeu_epi16(p, mask_of(count), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#endif

// ---- reductions over the 16 lanes, one fixed tree ----
TANDEM_INLINE float reduce_add(f32x16 v) {
#if defined(__AVX512F__)
  const __m512 pairs = _mm512_add_ps(v, _mm512_permute_ps(v, 0b01001110));
  const __m512 lanes = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0b10110001));
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), upper);
  return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  float lane[4];
  for (int i = 0; i < 4; ++i) lane[i] = (v[4 * i] + v[4 * i + 2]) + (v[4 * i + 1] + v[4 * i + 3]);
  return (lane[0] + lane[2]) + (lane[1] + lane[3]);
#endif
}
TANDEM_INLINE float reduce_max(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// 2^f for f in [-0.5, 0.5]; exactly 1 at 0. Minimax polynomial of degree 6.
TANDEM_INLINE f32x16 exp2_fraction(f32x16 f) {
  f32x16 y = splat(1.5353362e-4f);
  y = fma(y, f, splat(1.3398874e-3f));
  y = fma(y, f, splat(9.6184373e-3f));
  y = fma(y, f, splat(5.5503324e-2f));
  y = fma(y, f, splat(2.4022648e-1f));
  y = fma(y, f, splat(6.9314718e-1f));
  return fma(y, f, splat(1.0f));
}
// 2^x within 2 ulp; exactly 1 at 0, 0 for x below -150, saturating above 127. A NaN stays NaN.
TANDEM_INLINE f32x16 exp2_16(f32x16 x) {
#if defined(__AVX512F__)
  x = _mm512_min_ps(splat(130.0f), _mm512_max_ps(splat(-150.0f), x));  // operand order lets NaN through
  const f32x16 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return _mm512_scalef_ps(exp2_fraction(x - n), n);
#else
  const f32x16 low = splat(-126.0f), high = splat(127.0f), magic = splat(12582912.0f);
  const f32x16 below = x < high ? x : high, clamped = below > low ? below : low;
  const f32x16 shifted = clamped + magic;
  const f32x16 y = exp2_fraction(clamped - (shifted - magic));
  const f32x16 scaled = float_of(bits_of(y) + ((bits_of(shifted) - bits_of(magic)) << 23));
  return x == x ? (x < low ? f32x16{} : scaled) : x;
#endif
}
constexpr float kLog2E = 1.44269504088896341f;
TANDEM_INLINE f32x16 exp_16(f32x16 x) { return exp2_16(x * splat(kLog2E)); }
TANDEM_INLINE f32x16 sigmoid_16(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exp_16(-x)); }
TANDEM_INLINE f32x16 tanh_16(f32x16 x) { return splat(1.0f) - splat(2.0f) / (exp_16(x + x) + splat(1.0f)); }

TANDEM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TANDEM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
TANDEM_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Scratch of one thread, kept between calls.
class Workspace {
 public:
  float* reserve(size_t floats) {
    if (floats > size_) {
      data_.reset(static_cast<float*>(std::aligned_alloc(64, ceil_div(floats * sizeof(float), 64) * 64)));
      size_ = floats;
    }
    return data_.get();
  }

 private:
  struct Free { void operator()(float* p) const { std::free(p); } };
  std::unique_ptr<float, Free> data_;
  size_t size_ = 0;
};

}  // namespace tandem
