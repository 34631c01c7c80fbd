// Rows of x rounded to 8 bits: each segment of inputs (a group, or 128 of a longer one) has its own scale, its largest
// magnitude / 127; numbers are rounded to the nearest, halves to even. A segment without numbers of 2^-100 or more is
// all zeros.
#pragma once
#include <cmath>

#include "coded_tiles.h"
#include "integer_codes.h"
#include "pool.h"

namespace tandem {

constexpr float kLeastRounded = 0x1p-100f;

// `x` has so many words a step as the way of `decoding` says; past the last input they are zeros.
struct RoundedRows {
  const IntegerDecoding* decoding;
  const uint32_t* x;
  int64_t stride, count;      // words
  const float* scales;        // [count, segments]
  const int32_t* shifts;      // [count, segments] sums of the rounded inputs, times `low`
  const float* segment_sums;  // [count, segments] of what x is rounded to; null: no strip has offsets

  RoundedRows part(int64_t first, int64_t size, const CodedShape& shape) const {
    const int64_t at = first * shape.segments();
    return {decoding, x + first * stride, stride, size, scales + at, shifts + at,
            segment_sums ? segment_sums + at : nullptr};
  }
};

// The largest magnitude of some numbers; a NaN where one is.
template <class T> float largest_of(const T* x, int64_t count) {
  i32x16 largest{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const i32x16 bits = bits_of(load16(x + i, int(min64(kLanes, count - i)))) & splat(int32_t(0x7fffffff));
    largest = bits_of(select(bits > largest, float_of(bits), float_of(largest)));
  }
  int32_t most = 0;
  for (int i = 0; i < kLanes; ++i) most = largest[i] > most ? largest[i] : most;
  return as_float(uint32_t(most));
}

// To the nearest integers, halves to even. NOTE: no sum that a compiler would fuse with the product before it.
TANDEM_INLINE i32x16 nearest(const f32x16& v) {
#if defined(__AVX512F__)
  return reinterpret_cast<i32x16>(_mm512_cvtps_epi32(v));
#elif defined(__AVX2__)
  return by_part<IntVec>([](const Vec& x) { return reinterpret_cast<IntVec>(_mm256_cvtps_epi32(__m256(x))); }, v);
#else
  alignas(64) int32_t rounded[kLanes];
  for (int i = 0; i < kLanes; ++i) rounded[i] = int32_t(std::lrintf(v[i]));
  i32x16 out;
  std::memcpy(&out, rounded, sizeof out);
  return out;
#endif
}

// Makes rows ready for products by weights like `first`.
template <class T> class RowRounding {
 public:
  RowRounding(const CodedWeights& first, const CodedShape& shape, bool has_offsets, int num_threads)
      : decoding_(integer_decoding_of(first)), order_(input_order(decoding_.way, first.kind)), shape_(shape),
        has_offsets_(has_offsets), num_threads_(num_threads) {}

  // row(i): row i of x, a `RowOf`. They are valid until the calling thread asks for others.
  template <class Row> RoundedRows gathered(const Row& row, int64_t count) const {
    thread_local Workspace words, numbers;
    const int64_t segments = shape_.segments(), row_words = shape_.steps() * words_of_step();
    uint32_t* const x = reinterpret_cast<uint32_t*>(words.reserve(size_t(count * row_words)));
    float* const scales = numbers.reserve(size_t(3 * count * segments));
    int32_t* const shifts = reinterpret_cast<int32_t*>(scales + count * segments);
    float* const sums = has_offsets_ ? scales + 2 * count * segments : nullptr;
    const double cost = double(count * shape_.k) * kNsPerRounded;
    Pool::run(count, split(count, cost, num_threads_), [=](int64_t i, int64_t last) {
      for (; i < last; ++i) {
        const T* const from = in_order(row(i), shape_.k);
        for (int64_t s = 0; s < segments; ++s) {
          const int64_t at = i * segments + s;
          const int32_t sum = round(from, s, x + i * row_words, scales + at);
          shifts[at] = sum * decoding_.low;
          if (sums) sums[at] = scales[at] * float(sum);
        }
      }
    });
    return {&decoding_, x, row_words, count, scales, shifts, sums};
  }

  RoundedRows placed(const T* x, int64_t stride, const int64_t* permutation, int64_t count) const {
    return gathered([=](int64_t i) { return RowOf<T>{x + i * stride, permutation}; }, count);
  }

 private:
  static constexpr double kNsPerRounded = 0.3;  // of one thread

  int64_t words_of_step() const { return decoding_.way == kWordsWay ? 4 : 2; }

  // Rounds segment `index`; returns the sum of the integers.
  int32_t round(const T* row, int64_t index, uint32_t* words, float* scale) const {
    const int64_t first = index * shape_.segment, count = min64(shape_.segment, shape_.k - first);
    const float largest = largest_of(row + first, count);
    const bool is_zero = largest < kLeastRounded;
    const f32x16 inverse = splat(is_zero ? 0.0f : float(kLargestRounded) / largest);
    *scale = is_zero ? 0.0f : largest / float(kLargestRounded);
    alignas(64) int32_t rounded[kSumBlock + kLanes] = {};
    for (int64_t i = 0; i < count; i += kLanes) {
      const f32x16 x = load16(row + first + i, int(min64(kLanes, count - i)));
      const i32x16 integers = nearest(x * inverse);
      std::memcpy(rounded + i, &integers, sizeof integers);
    }
    int32_t sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += rounded[i];
    const int64_t steps = ceil_div(count, kStepInputs);
    uint32_t* const to = words + first / kStepInputs * words_of_step();
    if (decoding_.way == kWordsWay) arrange<int16_t>(rounded, steps, to);
    else arrange<int8_t>(rounded, steps, to);
    return sum;
  }

  template <class Integer> void arrange(const int32_t* rounded, int64_t steps, uint32_t* words) const {
    constexpr int kStepWords = kStepInputs * int(sizeof(Integer)) / int(sizeof(uint32_t));
    for (int64_t step = 0; step < steps; ++step) {
      Integer out[kStepInputs];
      for (int i = 0; i < kStepInputs; ++i) out[i] = Integer(rounded[step * kStepInputs + order_[i]]);
      std::memcpy(words + step * kStepWords, out, sizeof out);
    }
  }

  const IntegerDecoding decoding_;
  const int* const order_;
  const CodedShape shape_;
  const bool has_offsets_;
  const int num_threads_;
};

}  // namespace tandem
