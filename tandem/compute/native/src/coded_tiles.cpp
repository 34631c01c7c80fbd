// The loops of products with codes, compiled once for all that multiply by them.
#include "coded_tiles.h"

namespace tandem {
namespace {

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

template <int kKind, class P> void decode_units(const OpenStrip& strip, const CodedShape& shape, Ahead& ahead, f32x16* out) {
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

}  // namespace

template <class P>
void stream_panel(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                  f32x16 (*sums)[kPanelStrips]) {
  with_kind(strips->kind, [&](auto kind) { stream_any<decltype(kind)::value, P>(strips, rows, shape, ahead, sums); });
}

template <class P> void decode_strip(const OpenStrip& strip, const CodedShape& shape, Ahead& ahead, f32x16* out) {
  with_kind(strip.kind, [&](auto kind) { decode_units<decltype(kind)::value, P>(strip, shape, ahead, out); });
}

template <class P>
void multiply_tile(const OpenStrip* strips, const f32x16* const* units_of, const CodedRows<P>& rows,
                   const CodedShape& shape, f32x16 (*sums)[kPanelStrips]) {
  any_coded_tile<P>(strips, units_of, rows, shape, sums);
}

#define TANDEM_PRODUCTS_OF(P)                                                                              \
  template void stream_panel<P>(const OpenStrip*, const CodedRows<P>&, const CodedShape&, Ahead,           \
                                f32x16 (*)[kPanelStrips]);                                                 \
  template void decode_strip<P>(const OpenStrip&, const CodedShape&, Ahead&, f32x16*);                     \
  template void multiply_tile<P>(const OpenStrip*, const f32x16* const*, const CodedRows<P>&,              \
                                 const CodedShape&, f32x16 (*)[kPanelStrips]);
TANDEM_PRODUCTS_OF(float)
#if defined(__AVX512BF16__)
TANDEM_PRODUCTS_OF(bf16)
#endif
#undef TANDEM_PRODUCTS_OF

}  // namespace tandem
