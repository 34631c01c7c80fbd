// Codes as bytes, for products with rows rounded to 8 bits: sums of integers, which are exact in any order.
//
// A step of 8 inputs is two quads: a 32-bit lane of each output has four bytes, those of four inputs. 8-bit codes are
// in lanes as packed, inputs 0 to 3 and 4 to 7. 4-bit codes are looked up, inputs 0, 4, 1, 5 and 2, 6, 3, 7. Rows of x
// are arranged likewise (`integer_rows.h`).
#pragma once
#include "coded.h"

namespace tandem {

#if defined(__AVX512F__) ? defined(__AVX512BW__) : defined(__AVX2__)
constexpr bool kHasBytePairs = true;  // products of bytes, added in pairs into 16 bits that saturate
#else
constexpr bool kHasBytePairs = false;
#endif
#if defined(__AVX512F__) ? defined(__AVX512VNNI__) : defined(__AVXVNNI__)
constexpr bool kHasByteQuads = true;  // four at once into 32 bits, without saturation
#else
constexpr bool kHasByteQuads = false;
#endif
constexpr int kLargestRounded = 127;
constexpr int kMostOfPairs = 32767 / (4 * kLargestRounded);  // an unsigned byte, so that two pairs together do not saturate

// Unsigned bytes in quads, signed ones in words, or unsigned ones in pairs: the rows of each are laid out in a way of its own.
enum IntegerWay : int { kQuadsWay, kWordsWay, kPairsWay };

// How a product multiplies by codes: by bytes `number / factor - low`; the sum of a row times `low` is added.
struct IntegerDecoding {
  int way, low;
  double factor;
  alignas(kTableSize) uint8_t bytes[kTableSize];  // of 4 bits, by code
};

inline IntegerDecoding integer_decoding_of(const CodedWeights& w) {
  constexpr int kWide = kHasByteQuads || !kHasBytePairs ? kQuadsWay : kWordsWay;
  if (w.kind == kInt8) return {kWide, kWide == kQuadsWay ? -128 : 0, 1.0, {}};
  const int shift = byte_table_shift(w.table);
  int numbers[kTableSize], low = 127, high = -128;
  for (int i = 0; i < kTableSize; ++i) {
    numbers[i] = int(w.table[i] * float(1 << shift));
    low = numbers[i] < low ? numbers[i] : low, high = numbers[i] > high ? numbers[i] : high;
  }
  const int way = kWide == kWordsWay && high - low <= kMostOfPairs ? kPairsWay : kWide;
  IntegerDecoding decoding{way, way == kWordsWay ? 0 : low, 1.0 / double(1 << shift), {}};
  for (int i = 0; i < kTableSize; ++i) decoding.bytes[i] = uint8_t(numbers[i] - decoding.low);
  return decoding;
}

// ---- quads of a step from lanes ----
// As they are: what `decode_quads` has made.
struct QuadLanes {
  static constexpr int kWords = 2;
  explicit QuadLanes(const IntegerDecoding&) {}
  inline __attribute__((always_inline)) void quads(const uint32_t* lanes, UintVec* out) const {
    out[0] = load_lanes(lanes), out[1] = load_lanes(lanes + kStrip);
  }
};

// Signed bytes, which become unsigned where quads are multiplied.
struct Int8Lanes {
  static constexpr int kWords = 2;
  const uint32_t flip;
  explicit Int8Lanes(const IntegerDecoding& decoding) : flip(decoding.low ? 0x80808080u : 0u) {}
  inline __attribute__((always_inline)) void quads(const uint32_t* lanes, UintVec* out) const {
    out[0] = load_lanes(lanes) ^ flip, out[1] = load_lanes(lanes + kStrip) ^ flip;
  }
};

struct Table4Lanes {
  static constexpr int kWords = 1;
  inline __attribute__((always_inline)) void quads(const uint32_t* lanes, UintVec* out) const {
    const UintVec codes = load_lanes(lanes);
    out[0] = found(codes & 0x0f0f0f0fu), out[1] = found((codes >> 4) & 0x0f0f0f0fu);
  }

#if defined(__AVX512F__) && defined(__AVX512BW__)
  __m512i bytes;
  explicit Table4Lanes(const IntegerDecoding& d)
      : bytes(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(d.bytes)))) {}
  inline __attribute__((always_inline)) UintVec found(UintVec index) const {
    return reinterpret_cast<UintVec>(_mm512_shuffle_epi8(bytes, reinterpret_cast<__m512i>(index)));
  }
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i bytes;
  explicit Table4Lanes(const IntegerDecoding& d)
      : bytes(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(d.bytes)))) {}
  inline __attribute__((always_inline)) UintVec found(UintVec index) const {
    return reinterpret_cast<UintVec>(_mm256_shuffle_epi8(bytes, reinterpret_cast<__m256i>(index)));
  }
#else
  const uint8_t* bytes;
  explicit Table4Lanes(const IntegerDecoding& d) : bytes(d.bytes) {}
  UintVec found(UintVec index) const {
    UintVec out{};
    for (int i = 0; i < kVecLanes; ++i)
      for (int bit = 0; bit < 32; bit += 8) out[i] |= uint32_t(bytes[index[i] >> bit & 15]) << bit;
    return out;
  }
#endif
};

// ---- products ----
TANDEM_INLINE UintVec every_lane(uint32_t value) { return value - UintVec{}; }
TANDEM_INLINE Vec floats_of(IntVec lanes) { return floats_of(reinterpret_cast<UintVec>(lanes)); }

// A step is multiplied in `kParts`: the weights of one, then all rows with it. `kWords`: of a row in a step.
struct QuadsWay {
  static constexpr int kWay = kQuadsWay, kParts = 2, kWords = 2, kRows = kMaxRows;
  using Weights = UintVec;
  template <int kPart> TANDEM_INLINE Weights weights(const UintVec* quads) { return quads[kPart]; }
  template <int kPart> TANDEM_INLINE IntVec dot(IntVec acc, const uint32_t* x, UintVec w) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
    return reinterpret_cast<IntVec>(
        _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(int(x[kPart]))));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return reinterpret_cast<IntVec>(_mm256_dpbusd_avx_epi32(
        reinterpret_cast<__m256i>(acc), reinterpret_cast<__m256i>(w), _mm256_set1_epi32(int(x[kPart]))));
#else
    for (int bit = 0; bit < 32; bit += 8)
      acc += reinterpret_cast<IntVec>((w >> bit) & 0xffu) * int32_t(int8_t(x[kPart] >> bit));
    return acc;
#endif
  }
};

#if defined(__AVX512F__) && defined(__AVX512BW__)
using Integers = __m512i;
TANDEM_INLINE Integers add_byte_pairs(Integers u, Integers s) { return _mm512_maddubs_epi16(u, s); }
TANDEM_INLINE Integers add_word_pairs(Integers a, Integers b) { return _mm512_madd_epi16(a, b); }
TANDEM_INLINE Integers add_words(Integers a, Integers b) { return _mm512_add_epi16(a, b); }
TANDEM_INLINE Integers even_bytes(Integers v) { return _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 8); }
TANDEM_INLINE Integers odd_bytes(Integers v) { return _mm512_srai_epi16(v, 8); }
TANDEM_INLINE Integers every_integer(uint32_t value) { return _mm512_set1_epi32(int(value)); }
constexpr int kPairRows = 8;
#elif defined(__AVX2__) && !defined(__AVX512F__)
using Integers = __m256i;
TANDEM_INLINE Integers add_byte_pairs(Integers u, Integers s) { return _mm256_maddubs_epi16(u, s); }
TANDEM_INLINE Integers add_word_pairs(Integers a, Integers b) { return _mm256_madd_epi16(a, b); }
TANDEM_INLINE Integers add_words(Integers a, Integers b) { return _mm256_add_epi16(a, b); }
TANDEM_INLINE Integers even_bytes(Integers v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
TANDEM_INLINE Integers odd_bytes(Integers v) { return _mm256_srai_epi16(v, 8); }
TANDEM_INLINE Integers every_integer(uint32_t value) { return _mm256_set1_epi32(int(value)); }
constexpr int kPairRows = 3;  // six sums, four vectors of weights, two of x and three more
#endif

#if (defined(__AVX512F__) && defined(__AVX512BW__)) || (defined(__AVX2__) && !defined(__AVX512F__))
// Signed bytes of any size: those of even and odd places of a quad, widened.
struct WordsWay {
  static constexpr int kWay = kWordsWay, kParts = 4, kWords = 4, kRows = kMaxRows;
  using Weights = Integers;
  template <int kPart> TANDEM_INLINE Weights weights(const UintVec* quads) {
    const Integers quad = reinterpret_cast<Integers>(quads[kPart / 2]);
    return kPart % 2 ? odd_bytes(quad) : even_bytes(quad);
  }
  template <int kPart> TANDEM_INLINE IntVec dot(IntVec acc, const uint32_t* x, Integers w) {
    return acc + reinterpret_cast<IntVec>(add_word_pairs(w, every_integer(x[kPart])));
  }
};

// Unsigned bytes up to `kMostOfPairs`.
struct PairsWay {
  static constexpr int kWay = kPairsWay, kParts = 1, kWords = 2, kRows = kPairRows;
  struct Weights {
    Integers first, second;
  };
  template <int> TANDEM_INLINE Weights weights(const UintVec* quads) {
    return {reinterpret_cast<Integers>(quads[0]), reinterpret_cast<Integers>(quads[1])};
  }
  template <int> TANDEM_INLINE IntVec dot(IntVec acc, const uint32_t* x, const Weights& w) {
    const Integers sums = add_words(add_byte_pairs(w.first, every_integer(x[0])), add_byte_pairs(w.second, every_integer(x[1])));
    return acc + reinterpret_cast<IntVec>(add_word_pairs(sums, every_integer(0x00010001u)));
  }
};
#endif

// body(a value of the way's type).
template <class Body> TANDEM_INLINE void with_way(int way, const Body& body) {
#if (defined(__AVX512F__) && defined(__AVX512BW__)) || (defined(__AVX2__) && !defined(__AVX512F__))
  if constexpr (!kHasByteQuads) {
    if (way == kPairsWay) return body(PairsWay{});
    return body(WordsWay{});
  }
#endif
  body(QuadsWay{});
}

// Inputs of a step in the order in which a row has them, words first to last.
inline const int* input_order(int way, int64_t kind) {
  static constexpr int kOrders[2][2][kStepInputs] = {{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 4, 1, 5, 2, 6, 3, 7}},
                                                     {{0, 2, 1, 3, 4, 6, 5, 7}, {0, 1, 4, 5, 2, 3, 6, 7}}};
  return kOrders[way == kWordsWay][kind == kTable4];
}

}  // namespace tandem
