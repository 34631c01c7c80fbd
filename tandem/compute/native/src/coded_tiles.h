// Rows of x times two strips of codes. An output's sum over a segment of inputs (a group, or a block of one that is longer)
// begins at zero and walks its inputs in order; times the scale it is added to its block's, and blocks to one another as
// `sums.h` has it. A few rows are multiplied while codes are decoded in registers; for more, a panel is decoded once into
// units of the thread's own. Both take the same steps on the same numbers, so a row's bits do not depend on their number.
#pragma once
#include "coded.h"
#include "tiles.h"

namespace tandem {

// What is multiplied where x has elements T: pairs of bfloat16 where the processor multiplies such, else floats.
template <class T> using Multiplied = std::conditional_t<kIsWidened<T>, float, T>;

#if defined(__AVX512F__)
constexpr int kFewRows = 4;  // decoded for in registers
#else
constexpr int kFewRows = 2;
#endif

// The same for all strips of a product.
struct CodedShape {
  int64_t k, segment;
  int64_t steps() const { return num_steps(k); }
  int64_t segments() const { return ceil_div(k, segment); }
  int64_t segment_steps() const { return segment / kStepInputs; }
  int64_t in_block() const { return kSumBlock / segment; }
};

struct CodedStrip {
  const CodedWeights* weights;
  int64_t index;
};

// A strip as a product walks it: scales and offsets as floats, by segment.
struct OpenStrip {
  int kind;
  const uint32_t* lanes;
  const float* table;
  const f32x16 *scales, *offsets;  // no offsets: null
};

// Rows of x as units, zeros up to a whole step.
template <class P> struct CodedRows {
  const typename Unit<P>::Type* x;
  int64_t stride, count;
  const float* segment_sums;  // [count, segments]; null: no strip has offsets
};

TANDEM_INLINE Ahead codes_ahead(const CodedStrip* strips) {
  if (!strips[0].weights->is_packed) return {};
  const auto at = [](const CodedStrip& strip) {
    return static_cast<const uint32_t*>(strip.weights->codes) + strip.index * strip_lanes(*strip.weights);
  };
  return {at(strips[0]), at(strips[1]), strip_lanes(*strips[0].weights) * int64_t(sizeof(uint32_t))};
}

// By segment, times `factor`.
inline void widen_scales(const CodedWeights& w, const void* scales, int64_t dtype, double factor, const CodedShape& shape,
                         f32x16* out) {
  const f32x16 times = splat(float(factor));
  if (w.group_size == shape.segment) {
    for (int64_t i = 0; i < shape.segments(); ++i) out[i] = scales_at(scales, dtype, i * kStrip) * times;
  } else {
    for (int64_t i = 0; i < shape.segments(); ++i)
      out[i] = scales_at(scales, dtype, i * shape.segment / w.group_size * kStrip) * times;
  }
}

inline OpenStrip open_strip(const CodedStrip& strip, const CodedShape& shape, int number) {
  thread_local Workspace packed_space[kPanelStrips], scale_space[kPanelStrips];
  const CodedWeights& w = *strip.weights;
  const int64_t lanes = strip_lanes(w), groups = num_groups(w), segments = shape.segments();
  const int64_t scales_size = groups * kStrip * scale_bytes(w.scale_dtype);
  const int64_t offsets_size = w.offsets ? groups * kStrip * scale_bytes(w.offset_dtype) : 0;
  const uint32_t* codes = static_cast<const uint32_t*>(w.codes) + strip.index * lanes;
  const char* scales = static_cast<const char*>(w.scales) + strip.index * scales_size;
  const char* offsets = static_cast<const char*>(w.offsets) + strip.index * offsets_size;
  if (!w.is_packed) {
    float* const space = packed_space[number].reserve(size_t(lanes + (groups * 2) * kStrip));
    pack_codes(w, strip.index, reinterpret_cast<uint32_t*>(space));
    pack_scales(w, strip.index, w.scales, w.scale_dtype, space + lanes);
    if (w.offsets) pack_scales(w, strip.index, w.offsets, w.offset_dtype, space + lanes + groups * kStrip);
    codes = reinterpret_cast<const uint32_t*>(space);
    scales = reinterpret_cast<const char*>(space + lanes);
    offsets = reinterpret_cast<const char*>(space + lanes + groups * kStrip);
  }
  f32x16* const widened = reinterpret_cast<f32x16*>(scale_space[number].reserve(size_t(2 * segments * kStrip)));
  const Decoding decoding = decoding_of(w);
  widen_scales(w, scales, w.scale_dtype, w.factor * decoding.factor, shape, widened);
  if (w.offsets) widen_scales(w, offsets, w.offset_dtype, 1.0, shape, widened + segments);
  return {decoding.kind, codes, w.table, widened, w.offsets ? widened + segments : nullptr};
}

// Adds segments to blocks, and blocks to the whole. `kVectors` for each row; lane i of them has scale i.
template <int kRows, int kVectors> class SegmentSums {
 public:
  SegmentSums(const CodedShape& shape, const float* segment_sums)
      : in_block_(shape.in_block()), segments_(shape.segments()), segment_sums_(segment_sums) {}

  // scales(i), offsets(i): vector i of those of segment `index`, if there are offsets.
  template <class Scales, class Offsets>
  inline __attribute__((always_inline)) void add(int64_t index, const Vec (*acc)[kVectors], const Scales& scales,
                                                 const Offsets& offsets) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      const Vec scale = scales(i);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) sums_[m][i] = scale * acc[m][i] + sums_[m][i];
    }
    if (segment_sums_)
      for (int i = 0; i < kVectors; ++i) {
        const Vec offset = offsets(i);
        for (int m = 0; m < kRows; ++m) sums_[m][i] = offset * segment_sums_[m * segments_ + index] + sums_[m][i];
      }
    if (++added_ < in_block_ && index + 1 < segments_) return;
    tree_.add(block_++, index + 1 == segments_, sums_[0]);
    if (index + 1 == segments_) return;
    added_ = 0;
    for (int m = 0; m < kRows; ++m)
      for (int i = 0; i < kVectors; ++i) sums_[m][i] = Vec{};
  }
  const Vec (*sums() const)[kVectors] { return sums_; }

 private:
  const int64_t in_block_, segments_;
  const float* const segment_sums_;
  int64_t added_ = 0, block_ = 0;
  Vec sums_[kRows][kVectors] = {};
  SumTree<kRows * kVectors> tree_;
};

// Vector i of two strips side by side.
TANDEM_INLINE Vec part_of(const f32x16* first, const f32x16* second, int64_t index, int i) {
  return reinterpret_cast<const StoredVec*>((i < kVecs ? first : second) + index)[i % kVecs];
}

// A few rows: codes are decoded where they are multiplied.
template <int kKind, class P, int kRows>
void stream_codes(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead& ahead,
                  f32x16 (*sums)[kPanelStrips]) {
  using Decoder = Numbers<kKind>;
  constexpr int kWords = Decoder::kWords, kUnits = kStepInputs / Unit<P>::kElements, kVectors = kPanelStrips * kVecs;
  const Decoder decoders[kPanelStrips] = {Decoder(strips[0].table), Decoder(strips[1].table)};
  SegmentSums<kRows, kVectors> total(shape, rows.segment_sums);
  for (int64_t segment = 0, step = 0; segment < shape.segments(); ++segment) {
    const int64_t end = min64(step + shape.segment_steps(), shape.steps());
    Vec acc[kRows][kVectors] = {};
    for (; step < end; ++step) {
      ahead.ask<kPanelStrips * kWords>();
      const auto* const x = rows.x + step * kUnits;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        UintVec lanes[kWords];
        for (int i = 0; i < kWords; ++i)
          lanes[i] = load_lanes(strips[v / kVecs].lanes + (step * kWords + i) * kStrip + v % kVecs * kVecLanes);
#pragma GCC unroll 8
        for (int u = 0; u < kUnits; ++u) {
          const Vec w = decoders[v / kVecs].template unit<P>(lanes, u);
#pragma GCC unroll 4
          for (int m = 0; m < kRows; ++m) acc[m][v] = Unit<P>::template dot<0>(acc[m][v], x + m * rows.stride + u, w);
        }
      }
    }
    total.add(segment, acc, [&](int i) { return part_of(strips[0].scales, strips[1].scales, segment, i); },
              [&](int i) { return part_of(strips[0].offsets, strips[1].offsets, segment, i); });
  }
  std::memcpy(sums, total.sums(), sizeof(f32x16) * kRows * kPanelStrips);
}

template <int kKind, class P, int kRows = kFewRows>
void stream_any(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead& ahead,
                f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows.count < kRows) return stream_any<kKind, P, kRows - 1>(strips, rows, shape, ahead, sums);
  stream_codes<kKind, P, kRows>(strips, rows, shape, ahead, sums);
}

// All units of a strip.
template <int kKind, class P> void decode_strip(const OpenStrip& strip, const CodedShape& shape, Ahead& ahead, f32x16* out) {
  using Decoder = Numbers<kKind>;
  constexpr int kWords = Decoder::kWords, kUnits = kStepInputs / Unit<P>::kElements;
  const Decoder decoder(strip.table);
  StoredVec* to = reinterpret_cast<StoredVec*>(out);
  for (int64_t step = 0; step < shape.steps(); ++step, to += kUnits * kVecs) {
    ahead.ask<kWords>();
#pragma GCC unroll 2
    for (int part = 0; part < kVecs; ++part) {
      UintVec lanes[kWords];
      for (int i = 0; i < kWords; ++i)
        lanes[i] = load_lanes(strip.lanes + (step * kWords + i) * kStrip + part * kVecLanes);
#pragma GCC unroll 8
      for (int u = 0; u < kUnits; ++u) to[u * kVecs + part] = decoder.template unit<P>(lanes, u);
    }
  }
}

// Rows of a tile times the units of one strip, or of two where there are registers for them.
template <class P, int kRows>
void coded_tile(const OpenStrip* strips, const f32x16* const* units_of, const CodedRows<P>& rows, const CodedShape& shape,
                f32x16 (*sums)[kPanelStrips]) {
  constexpr int kUnits = kStepInputs / Unit<P>::kElements;
  const StoredVec* const first = reinterpret_cast<const StoredVec*>(units_of[0]);
  const StoredVec* const second = kTileStrips == 2 ? reinterpret_cast<const StoredVec*>(units_of[1]) : first + 1;
  const OpenStrip& other = strips[kTileStrips - 1];
  SegmentSums<kRows, 2> total(shape, rows.segment_sums);
  for (int64_t segment = 0, step = 0; segment < shape.segments(); ++segment) {
    const int64_t end = min64(step + shape.segment_steps(), shape.steps());
    Vec acc[kRows][2] = {};
    for (; step < end; ++step)
#pragma GCC unroll 8
      for (int64_t u = step * kUnits; u < (step + 1) * kUnits; ++u) {
        const Vec w[2] = {first[u * kVecs], second[u * kVecs]};
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) acc[m][i] = Unit<P>::template dot<0>(acc[m][i], rows.x + m * rows.stride + u, w[i]);
      }
    total.add(segment, acc, [&](int i) { return part_of(strips->scales, other.scales, segment, i); },
              [&](int i) { return part_of(strips->offsets, other.offsets, segment, i); });
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) reinterpret_cast<StoredVec*>(sums[m])[i] = total.sums()[m][i];
}

template <class P, int kRows = kMaxRows>
void any_coded_tile(const OpenStrip* strips, const f32x16* const* units_of, const CodedRows<P>& rows,
                    const CodedShape& shape, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows.count < kRows) return any_coded_tile<P, kRows - 1>(strips, units_of, rows, shape, sums);
  coded_tile<P, kRows>(strips, units_of, rows, shape, sums);
}

// Two strips of the same kind times rows of x; store(sums, row, rows) gets the sums of rows from `row` on.
template <class P, class Store>
void multiply_coded_panel(const CodedStrip* panel, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                          const Store& store) {
  const OpenStrip strips[kPanelStrips] = {open_strip(panel[0], shape, 0), open_strip(panel[1], shape, 1)};
  f32x16 sums[kMaxRows][kPanelStrips];
  if (rows.count <= kFewRows) {
    with_kind(strips->kind,
              [&](auto kind) { stream_any<decltype(kind)::value, P>(strips, rows, shape, ahead, sums); });
    return store(sums, 0, int(rows.count));
  }
  thread_local Workspace workspace;
  const int64_t units = shape.steps() * (kStepInputs / Unit<P>::kElements);
  f32x16* const space = reinterpret_cast<f32x16*>(workspace.reserve(size_t(kPanelStrips * units * kLanes)));
  const f32x16* const units_of[kPanelStrips] = {space, space + units};
  for (int s = 0; s < kPanelStrips; ++s)
    with_kind(strips[s].kind, [&](auto kind) {
      decode_strip<decltype(kind)::value, P>(strips[s], shape, ahead, space + s * units);
    });
  for (int64_t t = 0; t < num_tiles(rows.count); ++t) {
    const int64_t row = first_row(t, rows.count);
    const CodedRows<P> tile{rows.x + row * rows.stride, rows.stride, first_row(t + 1, rows.count) - row,
                            rows.segment_sums ? rows.segment_sums + row * shape.segments() : nullptr};
    for (int s = 0; s < kPanelStrips; s += kTileStrips)
      any_coded_tile<P>(strips + s, units_of + s, tile, shape, reinterpret_cast<f32x16(*)[kPanelStrips]>(&sums[0][s]));
    store(sums, row, int(tile.count));
  }
}

}  // namespace tandem
