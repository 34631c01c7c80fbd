// Vectors of 16 numbers: the compiler's own if the processor has vectors of that size, otherwise several shorter ones.
//
// NOTE: a compiler passes vectors longer than the processor's through memory and compares them number by number, so
// there they are divided here. Comparisons give all bits or none in each lane.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define TANDEM_INLINE static inline __attribute__((always_inline))

namespace tandem {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
typedef float f32x16 __attribute__((vector_size(64), aligned(64)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(64)));
typedef double f64x16 __attribute__((vector_size(128)));
using Vec = f32x16;  // what one instruction multiplies
using IntVec = i32x16;
using StoredVec = Vec;  // the same where memory holds something else, or parts of something longer
TANDEM_INLINE f32x16 splat(float value) { return _mm512_set1_ps(value); }
TANDEM_INLINE i32x16 splat(int32_t value) { return value - i32x16{}; }
TANDEM_INLINE i32x16 bits_of(f32x16 v) { return reinterpret_cast<i32x16>(v); }
TANDEM_INLINE f32x16 float_of(i32x16 v) { return reinterpret_cast<f32x16>(v); }
TANDEM_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return mask ? a : b; }
TANDEM_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
TANDEM_INLINE f64x16 to_double(f32x16 v) { return __builtin_convertvector(v, f64x16); }
TANDEM_INLINE i32x16 to_int(f32x16 v) { return __builtin_convertvector(v, i32x16); }
#else
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(32)));
typedef double DoubleVec __attribute__((vector_size(32)));
typedef float StoredVec __attribute__((vector_size(32), aligned(32), may_alias));

template <class V> struct alignas(64) Sixteen {
  using Number = std::remove_reference_t<decltype(V{}[0])>;
  static constexpr int kPartLanes = sizeof(V) / sizeof(Number), kParts = kLanes / kPartLanes;
  V part[kParts];

  Number operator[](int i) const { return part[i / kPartLanes][i % kPartLanes]; }
};
using f32x16 = Sixteen<Vec>;
using i32x16 = Sixteen<IntVec>;
using f64x16 = Sixteen<DoubleVec>;

// body(parts of each), part after part.
template <class To, class Body, class... From> TANDEM_INLINE Sixteen<To> by_part(const Body& body, const From&... from) {
  Sixteen<To> out;
#pragma GCC unroll 4
  for (int i = 0; i < Sixteen<To>::kParts; ++i) out.part[i] = body(from.part[i]...);
  return out;
}
#define TANDEM_OPERATOR(op)                                                                             \
  template <class V> TANDEM_INLINE Sixteen<V> operator op(const Sixteen<V>& a, const Sixteen<V>& b) {   \
    return by_part<V>([](const V& x, const V& y) { return V(x op y); }, a, b);                          \
  }                                                                                                     \
  template <class V> TANDEM_INLINE Sixteen<V>& operator op##=(Sixteen<V>& a, const Sixteen<V>& b) {     \
    return a = a op b;                                                                                  \
  }
TANDEM_OPERATOR(+)
TANDEM_OPERATOR(-)
TANDEM_OPERATOR(*)
TANDEM_OPERATOR(/)
TANDEM_OPERATOR(&)
TANDEM_OPERATOR(|)
#undef TANDEM_OPERATOR
#define TANDEM_COMPARISON(op)                                                                           \
  template <class V> TANDEM_INLINE i32x16 operator op(const Sixteen<V>& a, const Sixteen<V>& b) {       \
    return by_part<IntVec>([](const V& x, const V& y) { return IntVec(x op y); }, a, b);                \
  }
TANDEM_COMPARISON(<)
TANDEM_COMPARISON(>)
TANDEM_COMPARISON(>=)
TANDEM_COMPARISON(==)
TANDEM_COMPARISON(!=)
#undef TANDEM_COMPARISON
template <class V> TANDEM_INLINE Sixteen<V> operator-(const Sixteen<V>& a) {
  return by_part<V>([](const V& x) { return V(-x); }, a);
}
TANDEM_INLINE i32x16 operator~(const i32x16& a) {
  return by_part<IntVec>([](const IntVec& x) { return IntVec(~x); }, a);
}
TANDEM_INLINE i32x16 operator<<(const i32x16& a, int count) {
  return by_part<IntVec>([count](const IntVec& x) { return IntVec(x << count); }, a);
}
TANDEM_INLINE f32x16 splat(float value) {
  const Vec part = value - Vec{};
  return {{part, part}};
}
TANDEM_INLINE i32x16 splat(int32_t value) {
  const IntVec part = value - IntVec{};
  return {{part, part}};
}
TANDEM_INLINE i32x16 bits_of(const f32x16& v) {
  return by_part<IntVec>([](const Vec& x) { return reinterpret_cast<IntVec>(x); }, v);
}
TANDEM_INLINE f32x16 float_of(const i32x16& v) {
  return by_part<Vec>([](const IntVec& x) { return reinterpret_cast<Vec>(x); }, v);
}
TANDEM_INLINE f32x16 select(const i32x16& mask, const f32x16& a, const f32x16& b) {
  return by_part<Vec>([](const IntVec& m, const Vec& x, const Vec& y) { return Vec(m ? x : y); }, mask, a, b);
}
TANDEM_INLINE f32x16 fma(const f32x16& a, const f32x16& b, const f32x16& c) { return a * b + c; }
TANDEM_INLINE f64x16 to_double(const f32x16& v) {
  typedef float Quarter __attribute__((vector_size(16)));
  f64x16 out;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Quarter quarter;
    std::memcpy(&quarter, reinterpret_cast<const char*>(v.part) + i * sizeof quarter, sizeof quarter);
    out.part[i] = __builtin_convertvector(quarter, DoubleVec);
  }
  return out;
}
TANDEM_INLINE i32x16 to_int(const f32x16& v) {
  return by_part<IntVec>([](const Vec& x) { return IntVec(__builtin_convertvector(x, IntVec)); }, v);
}
#endif

constexpr int kVecLanes = sizeof(Vec) / sizeof(float), kVecs = kLanes / kVecLanes;
// a * b + c, rounded once where the processor has such an instruction, however the compiler moves the product.
TANDEM_INLINE Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__) && defined(__FP_FAST_FMAF)  // GCC's and Clang's word for FMA
  return Vec(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < int(sizeof(Vec) / sizeof(float)); ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}
TANDEM_INLINE Vec load_vec(const float* p) { Vec v; std::memcpy(&v, p, sizeof v); return v; }
TANDEM_INLINE void store_vec(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// a > b ? a : b, so b where either is no number.
TANDEM_INLINE f32x16 vmax(const f32x16& a, const f32x16& b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return by_part<Vec>([](const Vec& x, const Vec& y) { return Vec(_mm256_max_ps(x, y)); }, a, b);
#else
  return select(a > b, a, b);
#endif
}
TANDEM_INLINE f32x16 vmin(const f32x16& a, const f32x16& b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return by_part<Vec>([](const Vec& x, const Vec& y) { return Vec(_mm256_min_ps(x, y)); }, a, b);
#else
  return select(a < b, a, b);
#endif
}
TANDEM_INLINE i32x16 lane_numbers() {
#if defined(__AVX512F__)
  return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return {{IntVec{0, 1, 2, 3, 4, 5, 6, 7}, IntVec{8, 9, 10, 11, 12, 13, 14, 15}}};
#endif
}
// One bit a lane.
TANDEM_INLINE uint32_t bits_set(const i32x16& mask) {
#if defined(__AVX512F__)
  const __m512i lanes = reinterpret_cast<__m512i>(mask);
  return _mm512_test_epi32_mask(lanes, lanes);
#elif defined(__AVX2__)
  const auto bits = [](const IntVec& part) { return uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(__m256i(part)))); };
  return bits(mask.part[0]) | bits(mask.part[1]) << 8;
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= uint32_t(mask[i] != 0) << i;
  return bits;
#endif
}

}  // namespace tandem
