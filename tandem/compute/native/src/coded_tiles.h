// Rows of x times two strips of quantised weights. An output's sum over a segment of inputs (a group, or a block of a
// longer one) begins at zero and adds its inputs in order; times the scale it is added to its block's sum, and block
// sums are added as in `sums.h`. A few rows are multiplied while codes are decoded in registers; for more, codes are
// decoded once into buffers of the thread. Both take the same steps on the same numbers, so a row's bits do not depend
// on the number of rows.
#pragma once
#include "coded.h"
#include "tiles.h"

namespace tandem {

// What is multiplied where x has elements T: pairs of bfloat16 where the processor multiplies such, else floats.
template <class T> using Multiplied = std::conditional_t<kIsWidened<T>, float, T>;

constexpr int kFewRows = 4;         // decoded for in registers
constexpr int kStreamedVectors = 8;  // sums of them, for which there are registers
constexpr int kBlockwiseTiles = 4;  // decoded for block by block

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

  CodedRows part(int64_t first, int64_t size, const CodedShape& shape) const {
    return {x + first * stride, stride, size, segment_sums ? segment_sums + first * shape.segments() : nullptr};
  }
};

// A row of x, and the order in which its elements are multiplied; null: their own.
template <class T> struct RowOf {
  const T* x;
  const int64_t* permutation;
};
// Its elements in that order, valid until the calling thread asks for others.
template <class T> const T* in_order(const RowOf<T>& row, int64_t count) {
  if (!row.permutation) return row.x;
  thread_local Workspace workspace;
  T* const out = reinterpret_cast<T*>(workspace.reserve(size_t(count)));
  for (int64_t i = 0; i < count; ++i) out[i] = row.x[row.permutation[i]];
  return out;
}

TANDEM_INLINE Ahead codes_ahead(const CodedStrip* strips) {
  if (!strips[0].weights->is_packed) return {};
  const auto at = [](const CodedStrip& strip) {
    return static_cast<const uint32_t*>(strip.weights->codes) + strip.index * strip_lanes(*strip.weights);
  };
  return {at(strips[0]), at(strips[1]), strip_lanes(*strips[0].weights) * int64_t(sizeof(uint32_t))};
}

// Scales or offsets of a strip. `supers`: numbers that they are multiples of, or null.
struct StripScales {
  const char* scales;
  int64_t dtype;
  const fp16* supers;
};

// Of a strip, made in `space` where the matrix is not packed.
inline StripScales scales_of(const CodedWeights& w, int64_t strip, const void* scales, int64_t dtype, const uint16_t* supers,
                             float* space) {
  const int64_t groups = num_groups(w), size = groups * kStrip * scale_bytes(dtype), super_size = num_supers(w) * kStrip;
  if (w.is_packed) {
    const fp16* const there = reinterpret_cast<const fp16*>(supers);
    return {static_cast<const char*>(scales) + strip * size, dtype, there ? there + strip * super_size : nullptr};
  }
  pack_scales(w, strip, scales, groups, dtype, space);
  if (supers) pack_scales(w, strip, supers, num_supers(w), kFloat16, space + groups * kStrip);
  return {reinterpret_cast<const char*>(space), dtype,
          supers ? reinterpret_cast<const fp16*>(space + groups * kStrip) : nullptr};
}

// By segment, times `factor`.
inline void widen_scales(const CodedWeights& w, const StripScales& from, double factor, const CodedShape& shape,
                         f32x16* out) {
  const f32x16 times = splat(float(factor));
  const char* const scales = from.scales;
  const int64_t dtype = from.dtype;
  if (from.supers) {
    for (int64_t i = 0; i < shape.segments(); ++i) {
      const int64_t input = i * shape.segment;
      out[i] = scales_at(scales, dtype, input / w.group_size * kStrip) *
               (load16(from.supers + input / w.super_size * kStrip) * times);
    }
  } else if (w.group_size == shape.segment) {
    for (int64_t i = 0; i < shape.segments(); ++i) out[i] = scales_at(scales, dtype, i * kStrip) * times;
  } else {
    for (int64_t i = 0; i < shape.segments(); ++i)
      out[i] = scales_at(scales, dtype, i * shape.segment / w.group_size * kStrip) * times;
  }
}

// `number`: of the strip among those that a thread has open. Scales are times the factor of `decoding`.
inline OpenStrip open_strip(const CodedStrip& strip, const CodedShape& shape, int number, const Decoding& decoding) {
  thread_local Workspace packed_space[kPanelStrips], scale_space[kPanelStrips];
  const CodedWeights& w = *strip.weights;
  const int64_t lanes = strip_lanes(w), segments = shape.segments(), room = (num_groups(w) + num_supers(w)) * kStrip;
  const uint32_t* codes = static_cast<const uint32_t*>(w.codes) + strip.index * lanes;
  float* space = nullptr;
  if (!w.is_packed) {
    space = packed_space[number].reserve(size_t(lanes + 2 * room));
    pack_codes(w, strip.index, reinterpret_cast<uint32_t*>(space));
    codes = reinterpret_cast<const uint32_t*>(space);
    space += lanes;
  }
  f32x16* const widened = reinterpret_cast<f32x16*>(scale_space[number].reserve(size_t(2 * segments * kStrip)));
  widen_scales(w, scales_of(w, strip.index, w.scales, w.scale_dtype, w.super_scales, space), w.factor * decoding.factor,
               shape, widened);
  if (w.offsets)
    widen_scales(w, scales_of(w, strip.index, w.offsets, w.offset_dtype, w.super_offsets, space ? space + room : nullptr),
                 1.0, shape, widened + segments);
  return {decoding.kind, codes, w.table, widened, w.offsets ? widened + segments : nullptr};
}

// Rows that are few: codes are decoded where they are multiplied.
template <class P>
void stream_panel(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                  f32x16 (*sums)[kPanelStrips]);

// Rows of a few tiles: codes are decoded block after block of inputs, each of which stays in L1 while all rows pass.
template <class P>
void multiply_by_blocks(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                        f32x16 (*sums)[kPanelStrips]);

// All units of a strip, and the rows of a tile times those of a panel.
template <class P> void decode_strip(const OpenStrip& strip, const CodedShape& shape, Ahead& ahead, f32x16* out);
template <class P>
void multiply_tile(const OpenStrip* strips, const f32x16* const* units_of, const CodedRows<P>& rows,
                   const CodedShape& shape, int64_t tile, f32x16 (*sums)[kPanelStrips]);

// Two strips that are decoded alike, both with offsets or both without, times rows of x; store(sums, row, rows) gets the
// sums of rows from `row` on.
template <class P, class Store>
void multiply_coded_panel(const CodedStrip* panel, CodedRows<P> rows, const CodedShape& shape, Ahead ahead,
                          const Store& store) {
  const OpenStrip strips[kPanelStrips] = {open_strip(panel[0], shape, 0, decoding_of(*panel[0].weights)),
                                          open_strip(panel[1], shape, 1, decoding_of(*panel[1].weights))};
  if (!strips->offsets) rows.segment_sums = nullptr;
  f32x16 sums[kBlockwiseTiles * kMaxRows][kPanelStrips];
  if (rows.count <= kBlockwiseTiles * kMaxRows) {
    if (rows.count <= kFewRows) stream_panel<P>(strips, rows, shape, ahead, sums);
    else multiply_by_blocks<P>(strips, rows, shape, ahead, sums);
    return store(sums, 0, int(rows.count));
  }
  thread_local Workspace workspace;
  const int64_t units = shape.steps() * (kStepInputs / Unit<P>::kElements);
  f32x16* const space = reinterpret_cast<f32x16*>(workspace.reserve(size_t(kPanelStrips * units * kLanes)));
  const f32x16* const units_of[kPanelStrips] = {space, space + units};
  for (int s = 0; s < kPanelStrips; ++s) decode_strip<P>(strips[s], shape, ahead, space + s * units);
  for (int64_t t = 0; t < num_tiles(rows.count); ++t) {
    const int64_t row = first_row(t, rows.count);
    multiply_tile<P>(strips, units_of, rows, shape, t, sums);
    store(sums, row, int(first_row(t + 1, rows.count) - row));
  }
}

}  // namespace tandem
