// Quantised weights (codes with scales): strips of 16 outputs, whose numbers are decoded from codes in registers.
//
// A strip has, step after step of 8 inputs, one 32-bit lane for each output (4 bits) or two (8 bits): a vector of lanes
// holds codes of all 16 outputs for the same inputs. In a lane of 4 bits input 2i + p begins at bit 4i + 16p, so that
// one shift moves the pairs of bfloat16 instructions into place; bytes are in the order of inputs. Scales and offsets
// are [strip][group][16] in their own dtype, and so are the units of integers among them. Inputs past the last are
// zeros in x, outputs past the last are not stored.
#pragma once
#include "calls.h"
#include "strips.h"
#include "sums.h"

namespace tandem {

enum CodeKind : int { kTable4 = 0, kInt8 = 1, kE4m3 = 2 };
enum ScaleDType : int { kE4m3Scale = 3, kE8m0Scale = 4, kInt8Scale = 5 };  // beside those of `DType`
constexpr int kStepInputs = 8;

typedef uint32_t UintVec __attribute__((vector_size(sizeof(Vec))));
TANDEM_INLINE UintVec load_lanes(const uint32_t* p) { UintVec v; std::memcpy(&v, p, sizeof v); return v; }
TANDEM_INLINE Vec to_vec(UintVec bits) { return reinterpret_cast<Vec>(bits); }
TANDEM_INLINE Vec floats_of(UintVec signed_lanes) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(reinterpret_cast<__m512i>(signed_lanes));
#else
  return __builtin_convertvector(reinterpret_cast<IntVec>(signed_lanes), Vec);
#endif
}
TANDEM_INLINE Vec smaller(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return Vec(_mm256_min_ps(__m256(a), __m256(b)));
#else
  return a < b ? a : b;
#endif
}

// Byte `i` of each lane as a signed number times 2^24.
TANDEM_INLINE Vec signed_byte(UintVec lanes, int i) {
  if (i == 0) return floats_of(lanes << 24);
  return floats_of((lanes << (24 - 8 * i)) & 0xff000000u);
}

// Byte `i` of each lane as float8_e4m3fn. NOTE: with an exponent for normal numbers a subnormal comes out as v where it
// should be 2v - 2^-6, which is the smaller of the two; of a normal number v is. So no float here is subnormal. The codes
// of NaN count as 480.
TANDEM_INLINE Vec e4m3_byte(UintVec lanes, int i) {
  const UintVec code = i == 3 ? lanes : lanes << (24 - 8 * i);
  const Vec v = to_vec(((code >> 4) & 0x07f00000u) + (120u << 23));
  const Vec magnitude = smaller(v, v + v - 0x1p-6f);
  return to_vec(reinterpret_cast<UintVec>(magnitude) | (code & 0x80000000u));
}

// Numbers of codes, those of `decoding_of` times a power of two: unit u of a step from the lanes of its codes.
template <int kKind> struct Numbers {  // of 8 bits
  static constexpr int kWords = 2;  // lanes of an output in a step
  explicit Numbers(const float*) {}

  inline __attribute__((always_inline)) Vec number(const UintVec* lanes, int input) const {
    return kKind == kInt8 ? signed_byte(lanes[input / 4], input % 4) : e4m3_byte(lanes[input / 4], input % 4);
  }
  template <class P> inline __attribute__((always_inline)) Vec unit(const UintVec* lanes, int u) const {
    if constexpr (Unit<P>::kElements == 1) return number(lanes, u);
    // Their lower halves are zeros: a number has at most 8 bits.
    const UintVec first = reinterpret_cast<UintVec>(number(lanes, 2 * u));
    return to_vec((first >> 16) | reinterpret_cast<UintVec>(number(lanes, 2 * u + 1)));
  }
};

template <> struct Numbers<kTable4> {
  static constexpr int kWords = 1;

#if defined(__AVX512F__)
  Vec floats;
  __m512i pairs;  // of bfloat16, twice: of an index 5 bits count
  explicit Numbers(const float* table) : floats(_mm512_loadu_ps(table)) {
    alignas(64) bf16 halves[2 * kTableSize];
    for (int i = 0; i < 2 * kTableSize; ++i) halves[i] = from_float<bf16>(table[i % kTableSize]);
    pairs = _mm512_load_si512(halves);
  }
  inline __attribute__((always_inline)) Vec number(UintVec lanes, int bit) const {
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(lanes >> bit), floats);
  }
#elif defined(__AVX2__)
  __m256 low, high;
  explicit Numbers(const float* table) : low(_mm256_loadu_ps(table)), high(_mm256_loadu_ps(table + 8)) {}
  inline __attribute__((always_inline)) Vec number(UintVec lanes, int bit) const {
    const __m256i index = reinterpret_cast<__m256i>(lanes >> bit), is_high = reinterpret_cast<__m256i>(lanes << (28 - bit));
    return Vec(_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                                _mm256_castsi256_ps(is_high)));
  }
#else
  const float* table;
  explicit Numbers(const float* numbers) : table(numbers) {}
  Vec number(UintVec lanes, int bit) const {
    Vec out;
    for (int i = 0; i < kVecLanes; ++i) out[i] = table[lanes[i] >> bit & 15];
    return out;
  }
#endif
  template <class P> inline __attribute__((always_inline)) Vec unit(const UintVec* lanes, int u) const {
#if defined(__AVX512BF16__)
    if constexpr (Unit<P>::kElements == 2)
      return (Vec)_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(lanes[0] >> 4 * u), pairs);
#endif
    return number(lanes[0], 4 * (u / 2) + 16 * (u % 2));
  }
};

// Log2 of what a table's numbers are to be multiplied by to be signed bytes; negative: they are no such.
TANDEM_INLINE int byte_table_shift(const float* table) {
  for (int shift = 0; shift < 8; ++shift) {
    bool is_whole = true;
    for (int i = 0; i < kTableSize; ++i) {
      const float scaled = table[i] * float(1 << shift);
      is_whole = is_whole && scaled >= -128.0f && scaled <= 127.0f && float(int(scaled)) == scaled;
    }
    if (is_whole) return shift;
  }
  return -1;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kByteTable4 = 3;  // of 4 bits, a table whose numbers are bytes times a power of two: one shuffle looks up 32

template <> struct Numbers<kByteTable4> {
  static constexpr int kWords = 1;
  __m256i bytes;

  explicit Numbers(const float* table) {
    const float factor = float(1 << byte_table_shift(table));
    alignas(32) int8_t twice[2 * kTableSize];
    for (int i = 0; i < 2 * kTableSize; ++i) twice[i] = int8_t(table[i % kTableSize] * factor);
    bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(twice));
  }
  template <class P> inline __attribute__((always_inline)) Vec unit(const UintVec* lanes, int input) const {
    const UintVec index = (input & 2 ? lanes[0] >> 4 : lanes[0]) & 0x0f0f0f0fu;
    const __m256i found = _mm256_shuffle_epi8(bytes, reinterpret_cast<__m256i>(index));
    return signed_byte(reinterpret_cast<UintVec>(found), 2 * (input & 1) + (input >> 2));
  }
};
#endif

// How a product decodes, and what its numbers are to be multiplied by.
struct Decoding {
  int kind;
  double factor;
};
TANDEM_INLINE Decoding decoding_of(const CodedWeights& w) {
  if (w.kind == kInt8) return {kInt8, 0x1p-24};
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (const int shift = w.kind == kTable4 ? byte_table_shift(w.table) : -1; shift >= 0)
    return {kByteTable4, 0x1p-24 / double(1 << shift)};
#endif
  return {int(w.kind), 1.0};
}

// body(kind as a constant).
template <class Body> TANDEM_INLINE void with_kind(int64_t kind, const Body& body) {
  if (kind == kTable4) return body(std::integral_constant<int, kTable4>{});
  if (kind == kInt8) return body(std::integral_constant<int, kInt8>{});
#if defined(__AVX2__) && !defined(__AVX512F__)
  if (kind == kByteTable4) return body(std::integral_constant<int, kByteTable4>{});
#endif
  body(std::integral_constant<int, kE4m3>{});
}

// ---- sizes ----
TANDEM_INLINE int64_t step_lanes(int64_t kind) { return kind == kTable4 ? kStrip : 2 * kStrip; }
TANDEM_INLINE int64_t num_steps(int64_t k) { return ceil_div(k, kStepInputs); }
TANDEM_INLINE int64_t strip_lanes(const CodedWeights& w) { return num_steps(w.k) * step_lanes(w.kind); }
TANDEM_INLINE int64_t num_groups(const CodedWeights& w) { return ceil_div(w.k, w.group_size); }
TANDEM_INLINE int64_t num_supers(const CodedWeights& w) { return w.super_size ? ceil_div(w.k, w.super_size) : 0; }
TANDEM_INLINE int64_t num_strips(const CodedWeights& w) { return ceil_div(w.n, kStrip); }
TANDEM_INLINE int64_t scale_bytes(int64_t dtype) { return dtype == kFloat32 ? 4 : dtype < kE4m3Scale ? 2 : 1; }
// Inputs that are summed before a scale is applied: a group, or a block of one that is longer.
TANDEM_INLINE int64_t segment_of(const CodedWeights& w) {
  return w.group_size >= w.k ? kSumBlock : min64(w.group_size, kSumBlock);
}

// ---- scales as floats ----
TANDEM_INLINE f32x16 byte_scales(const uint8_t* p, int64_t dtype) {
  alignas(64) uint32_t lanes[kLanes];
#if defined(__AVX2__)
  for (int i = 0; i < kLanes; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i));
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + i), _mm256_cvtepu8_epi32(bytes));
  }
#else
  for (int i = 0; i < kLanes; ++i) lanes[i] = p[i];
#endif
  f32x16 out;
  for (int i = 0; i < kVecs; ++i) {
    const UintVec codes = load_lanes(lanes + i * kVecLanes);
    const UintVec smallest = reinterpret_cast<UintVec>(codes == 0) & 0x00400000u;  // 2^-127
    reinterpret_cast<StoredVec*>(&out)[i] = dtype == kInt8Scale   ? signed_byte(codes, 0) * 0x1p-24f
                                            : dtype == kE4m3Scale ? e4m3_byte(codes, 0)
                                                                  : to_vec(codes << 23 | smallest);
  }
  return out;
}
TANDEM_INLINE f32x16 scales_at(const void* scales, int64_t dtype, int64_t index) {
  if (dtype == kFloat32) return load16(static_cast<const float*>(scales) + index);
  if (dtype == kBFloat16) return load16(static_cast<const bf16*>(scales) + index);
  if (dtype == kFloat16) return load16(static_cast<const fp16*>(scales) + index);
  return byte_scales(static_cast<const uint8_t*>(scales) + index, dtype);
}

// ---- packing ----
// Four bytes of a row, 8 codes of 4 bits with the first in the lowest, as a lane.
TANDEM_INLINE uint32_t packed_lane(uint32_t codes) {
  const auto gathered = [](uint32_t v) {  // the lower half of each byte
    v &= 0x0f0f0f0fu;
    v = (v | v >> 4) & 0x00ff00ffu;
    return (v | v >> 8) & 0xffffu;
  };
  return gathered(codes) | gathered(codes >> 4) << 16;
}

// Strip `index` of a matrix that is stored as rows, to where a packed one has it. Rows that it lacks repeat its last.
inline void pack_codes(const CodedWeights& w, int64_t index, uint32_t* out) {
  const bool is_table = w.kind == kTable4;
  const int64_t row_bytes = is_table ? ceil_div(w.k, 2) : w.k, steps = num_steps(w.k), words = is_table ? 1 : 2;
  for (int i = 0; i < kStrip; ++i) {
    const uint8_t* const row = static_cast<const uint8_t*>(w.codes) + min64(index * kStrip + i, w.n - 1) * row_bytes;
    for (int64_t at = 0; at < steps * words; ++at) {
      uint32_t lane = 0;
      if (const int64_t left = row_bytes - at * 4; left > 0) std::memcpy(&lane, row + at * 4, size_t(min64(left, 4)));
      out[at * kStrip + i] = is_table ? packed_lane(lane) : lane;
    }
  }
}
inline void pack_scales(const CodedWeights& w, int64_t index, const void* scales, int64_t groups, int64_t dtype,
                        void* out) {
  const int64_t bytes = scale_bytes(dtype);
  for (int i = 0; i < kStrip; ++i) {
    const char* const row = static_cast<const char*>(scales) + min64(index * kStrip + i, w.n - 1) * groups * bytes;
    for (int64_t g = 0; g < groups; ++g)
      std::memcpy(static_cast<char*>(out) + (g * kStrip + i) * bytes, row + g * bytes, size_t(bytes));
  }
}

}  // namespace tandem
