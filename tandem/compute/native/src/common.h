// Shared vocabulary of the kernels: element types, 16-lane float vectors, conversions and exp2.
//
// Everything is written on GCC vector extensions, which lower to AVX-512, AVX2, SSE or NEON alike (`vectors.h`);
// intrinsics appear only where they pay. Each helper does the same operations on every lane, and a partial vector
// goes through the same arithmetic as a full one, so where an element sits never changes its bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "vectors.h"

#define TANDEM_EXPORT extern "C" __attribute__((visibility("default")))

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
  alignas(64) float values[kLanes] = {};
  for (int i = 0; i < count; ++i) values[i] = to_float(p[i]);
  f32x16 v;
  std::memcpy(&v, values, sizeof v);
  return v;
}
template <class T> TANDEM_INLINE void store16(T* p, f32x16 v, int count = kLanes) {
  alignas(64) float values[kLanes];
  std::memcpy(values, &v, sizeof v);
  for (int i = 0; i < count; ++i) p[i] = from_float<T>(values[i]);
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
#elif defined(__AVX2__) && !defined(__AVX512F__)
TANDEM_INLINE f32x16 load_whole(const float* p) { return {{load_vec(p), load_vec(p + kVecLanes)}}; }
TANDEM_INLINE void store_whole(float* p, f32x16 v) { store_vec(p, v.part[0]), store_vec(p + kVecLanes, v.part[1]); }
TANDEM_INLINE Vec load_half(const bf16* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return Vec(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)));
}
TANDEM_INLINE f32x16 load_whole(const bf16* p) { return {{load_half(p), load_half(p + kVecLanes)}}; }
TANDEM_INLINE __m256i to_bf16_words(Vec v) {
  const __m256i u = _mm256_castps_si256(__m256(v)), one = _mm256_set1_epi32(1);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), one);
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(__m256(v), __m256(v), _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
TANDEM_INLINE void store_whole(bf16* p, f32x16 v) {
  const __m256i words = _mm256_packus_epi32(to_bf16_words(v.part[0]), to_bf16_words(v.part[1]));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
}
// A partial vector takes the way of a whole one, from and to a copy.
template <class T> TANDEM_INLINE f32x16 load_any(const T* p, int count) {
  if (count == kLanes) return load_whole(p);
  T copy[kLanes] = {};
  for (int i = 0; i < count; ++i) copy[i] = p[i];
  return load_whole(copy);
}
template <class T> TANDEM_INLINE void store_any(T* p, const f32x16& v, int count) {
  if (count == kLanes) return store_whole(p, v);
  T copy[kLanes];
  store_whole(copy, v);
  for (int i = 0; i < count; ++i) p[i] = copy[i];
}
TANDEM_INLINE f32x16 load16(const float* p, int count = kLanes) { return load_any(p, count); }
TANDEM_INLINE f32x16 load16(const bf16* p, int count = kLanes) { return load_any(p, count); }
TANDEM_INLINE void store16(float* p, f32x16 v, int count = kLanes) { store_any(p, v, count); }
TANDEM_INLINE void store16(bf16* p, f32x16 v, int count = kLanes) { store_any(p, v, count); }
#if defined(__F16C__)
TANDEM_INLINE Vec load_half(const fp16* p) {
  return Vec(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
TANDEM_INLINE f32x16 load_whole(const fp16* p) { return {{load_half(p), load_half(p + kVecLanes)}}; }
TANDEM_INLINE void store_whole(fp16* p, f32x16 v) {
  for (int i = 0; i < kVecs; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + i * kVecLanes),
                     _mm256_cvtps_ph(__m256(v.part[i]), _MM_FROUND_TO_NEAREST_INT));
}
TANDEM_INLINE f32x16 load16(const fp16* p, int count = kLanes) { return load_any(p, count); }
TANDEM_INLINE void store16(fp16* p, f32x16 v, int count = kLanes) { store_any(p, v, count); }
#endif
#endif

// ---- reductions over the 16 lanes, one fixed tree ----
TANDEM_INLINE float reduce_add(f32x16 v) {
#if defined(__AVX512F__)
  const __m512 pairs = _mm512_add_ps(v, _mm512_permute_ps(v, 0b01001110));
  const __m512 lanes = _mm512_add_ps(pairs, _mm512_permute_ps(pairs, 0b10110001));
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), upper);
  return _mm_cvtss_f32(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  const auto lanes_of = [](Vec part) {
    const __m256 pairs = _mm256_add_ps(__m256(part), _mm256_permute_ps(__m256(part), 0b01001110));
    return _mm256_add_ps(pairs, _mm256_permute_ps(pairs, 0b10110001));
  };
  const __m256 half = _mm256_add_ps(lanes_of(v.part[0]), lanes_of(v.part[1]));
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
#elif defined(__AVX2__)
  const __m256 half = _mm256_max_ps(__m256(v.part[0]), __m256(v.part[1]));
  __m128 best = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  best = _mm_max_ps(best, _mm_permute_ps(best, 0b01001110));
  return _mm_cvtss_f32(_mm_max_ps(best, _mm_permute_ps(best, 0b10110001)));
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
  const f32x16 clamped = vmax(vmin(x, high), low);
  const f32x16 shifted = clamped + magic;
  const f32x16 y = exp2_fraction(clamped - (shifted - magic));
  const f32x16 scaled = float_of(bits_of(y) + ((bits_of(shifted) - bits_of(magic)) << 23));
  return select(x == x, select(x < low, f32x16{}, scaled), x);
#endif
}
constexpr float kLog2E = 1.44269504088896341f;
TANDEM_INLINE f32x16 exp_16(f32x16 x) { return exp2_16(x * splat(kLog2E)); }
TANDEM_INLINE f32x16 sigmoid_16(f32x16 x) { return splat(1.0f) / (splat(1.0f) + exp_16(-x)); }

// exp(x) within 2 ulp far from 0 too, where products and sums are fused: x * log2(e), a sum of two numbers, is not
// rounded before its whole part is taken off. 0 below -87, saturating above 88. A NaN stays NaN.
TANDEM_INLINE f32x16 accurate_exp_16(f32x16 x) {
  const f32x16 low = splat(-87.0f), magic = splat(12582912.0f);
  const f32x16 clamped = vmax(vmin(x, splat(88.0f)), low);
  const f32x16 shifted = fma(clamped, splat(kLog2E), magic);
  const f32x16 f = fma(clamped, splat(1.92596303e-8f), fma(clamped, splat(kLog2E), magic - shifted)), y = exp2_fraction(f);
  const f32x16 scaled = float_of(bits_of(y) + ((bits_of(shifted) - bits_of(magic)) << 23));
  return select(x == x, select(x < low, f32x16{}, scaled), x);
}
// log(1 + exp(x)) within 3 ulp. Of e = exp(-|x|), log(1 + e) = 2 atanh(e / (e + 2)) = log(2) + 2 atanh((e - 1) / (e + 3)).
TANDEM_INLINE f32x16 softplus_16(f32x16 x) {
  const f32x16 e = accurate_exp_16(vmin(x, -x));
  const i32x16 is_small = e < splat(0.41421356f);
  const f32x16 s = select(is_small, e, e - splat(1.0f)) / (e + select(is_small, splat(2.0f), splat(3.0f))), t = s * s;
  f32x16 y = fma(t, splat(1.0f / 11), splat(1.0f / 9));
  y = fma(y, t, splat(1.0f / 7));
  y = fma(y, t, splat(1.0f / 5));
  y = fma(y, t, splat(1.0f / 3));
  const f32x16 rest = fma(y * t, s + s, s + s);
  return vmax(x, f32x16{}) + select(is_small, rest, rest + splat(0.69314718f));
}
// The same of one number.
inline float softplus(float x) { return softplus_16(splat(x))[0]; }
TANDEM_INLINE f32x16 tanh_16(f32x16 x) { return splat(1.0f) - splat(2.0f) / (exp_16(x + x) + splat(1.0f)); }

enum Activation : int { kSilu = 0, kGeluTanh = 1, kClampedSwiGlu = 2 };

TANDEM_INLINE f32x16 activate(int activation, f32x16 v) {
  if (activation == kSilu) return v * sigmoid_16(v);
  const f32x16 inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * v * v, v, v);
  return v * sigmoid_16(inner + inner);  // 0.5 (1 + tanh u) = sigmoid(2u)
}

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
