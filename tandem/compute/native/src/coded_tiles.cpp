// The inner loops of products with quantised weights, compiled once for all callers.
#include <new>

#include "segment_sums.h"

namespace tandem {
namespace {

// `kStrips` strips side by side.
template <int kKind, class P, int kRows, int kStrips>
void stream_codes(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead& ahead,
                  f32x16 (*sums)[kPanelStrips]) {
  using Decoder = Numbers<kKind>;
  constexpr int kWords = Decoder::kWords, kUnits = kStepInputs / Unit<P>::kElements, kVectors = kStrips * kVecs;
  const OpenStrip& last = strips[kStrips - 1];
  const Decoder decoders[2] = {Decoder(strips->table), Decoder(last.table)};
  SegmentSums<kRows, kVectors> total(shape, rows.segment_sums);
  for (int64_t segment = 0, step = 0; segment < shape.segments(); ++segment) {
    const int64_t end = min64(step + shape.segment_steps(), shape.steps());
    Vec acc[kRows][kVectors] = {};
    for (; step < end; ++step) {
      ahead.ask<kStrips * kWords>();
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
    total.add(segment, acc, [&](int i) { return part_of(strips->scales, last.scales, segment, i); },
              [&](int i) { return part_of(strips->offsets, last.offsets, segment, i); });
  }
  for (int m = 0; m < kRows; ++m) std::memcpy(sums[m], total.sums()[m], sizeof(f32x16) * kStrips);
}

template <int kKind, class P, int kRows = kFewRows>
void stream_any(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead& ahead,
                f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows.count < kRows) return stream_any<kKind, P, kRows - 1>(strips, rows, shape, ahead, sums);
  constexpr int kStrips = kRows * kPanelStrips * kVecs <= kStreamedVectors ? kPanelStrips : 1;
  for (int s = 0; s < kPanelStrips; s += kStrips)
    stream_codes<kKind, P, kRows, kStrips>(strips + s, rows, shape, ahead, from_strip(sums, s));
}

// The units of steps `first` to `last` of a strip.
template <int kKind, class P>
void decode_units(const OpenStrip& strip, int64_t first, int64_t last, Ahead& ahead, f32x16* out) {
  using Decoder = Numbers<kKind>;
  constexpr int kWords = Decoder::kWords, kUnits = kStepInputs / Unit<P>::kElements;
  const Decoder decoder(strip.table);
  StoredVec* to = reinterpret_cast<StoredVec*>(out);
  for (int64_t step = first; step < last; ++step, to += kUnits * kVecs) {
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
template <class P>
void decode_steps(const OpenStrip& strip, int64_t first, int64_t last, Ahead& ahead, f32x16* out) {
  with_kind(strip.kind, [&](auto kind) { decode_units<decltype(kind)::value, P>(strip, first, last, ahead, out); });
}

// The units of one strip from that of segment `first` on, or those of two where there are registers for them.
struct UnitsOf {
  const f32x16* strip[kTileStrips];
};

// Adds segments `first` to `last` of a tile.
template <class P, int kRows>
void add_segments(const OpenStrip* strips, const UnitsOf& units, const CodedRows<P>& rows, const CodedShape& shape,
                  int64_t first, int64_t last, SegmentSums<kRows, 2>& total) {
  constexpr int kUnits = kStepInputs / Unit<P>::kElements;
  const StoredVec* left = reinterpret_cast<const StoredVec*>(units.strip[0]);
  const StoredVec* right = kTileStrips == 2 ? reinterpret_cast<const StoredVec*>(units.strip[kTileStrips - 1]) : left + 1;
  const OpenStrip& other = strips[kTileStrips - 1];
  int64_t step = first * shape.segment_steps();
  const auto* x = rows.x + step * kUnits;
  for (int64_t segment = first; segment < last; ++segment) {
    const int64_t end = min64(step + shape.segment_steps(), shape.steps());
    Vec acc[kRows][2] = {};
    for (; step < end; ++step)
#pragma GCC unroll 8
      for (int u = 0; u < kUnits; ++u, left += kVecs, right += kVecs, ++x) {
        const Vec w[2] = {*left, *right};
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
          for (int i = 0; i < 2; ++i) acc[m][i] = Unit<P>::template dot<0>(acc[m][i], x + m * rows.stride, w[i]);
      }
    total.add(segment, acc, [&](int i) { return part_of(strips->scales, other.scales, segment, i); },
              [&](int i) { return part_of(strips->offsets, other.offsets, segment, i); });
  }
}

// Where the sums of a tile are between two blocks of inputs.
struct alignas(64) TileSpace {
  char bytes[sizeof(SegmentSums<kMaxRows, 2>)];
};

template <class P, int kRows = kMaxRows>
void multiply_tile_part(const OpenStrip* strips, const UnitsOf& units, const CodedRows<P>& rows, const CodedShape& shape,
                        int64_t first, int64_t last, TileSpace& space, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows.count < kRows)
      return multiply_tile_part<P, kRows - 1>(strips, units, rows, shape, first, last, space, sums);
  using Sums = SegmentSums<kRows, 2>;
  Sums& total = first ? *std::launder(reinterpret_cast<Sums*>(space.bytes))
                      : *new (space.bytes) Sums(shape, rows.segment_sums);
  add_segments<P, kRows>(strips, units, rows, shape, first, last, total);
  if (last < shape.segments()) return;
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) reinterpret_cast<StoredVec*>(sums[m])[i] = total.sums()[m][i];
}

template <class P> CodedRows<P> tile_of(const CodedRows<P>& rows, const CodedShape& shape, int64_t tile) {
  const int64_t row = first_row(tile, rows.count);
  return rows.part(row, first_row(tile + 1, rows.count) - row, shape);
}

}  // namespace

template <class P>
void stream_panel(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                  f32x16 (*sums)[kPanelStrips]) {
  with_kind(strips->kind, [&](auto kind) { stream_any<decltype(kind)::value, P>(strips, rows, shape, ahead, sums); });
}

template <class P>
void multiply_by_blocks(const OpenStrip* strips, const CodedRows<P>& rows, const CodedShape& shape, Ahead ahead,
                        f32x16 (*sums)[kPanelStrips]) {
  f32x16 units[kPanelStrips][kSumBlock / Unit<P>::kElements];
  TileSpace space[kBlockwiseTiles][kPanelStrips / kTileStrips];
  for (int64_t first = 0; first < shape.segments(); first += shape.in_block()) {
    const int64_t last = min64(first + shape.in_block(), shape.segments()), steps = shape.segment_steps();
    for (int s = 0; s < kPanelStrips; ++s)
      decode_steps<P>(strips[s], first * steps, min64(last * steps, shape.steps()), ahead, units[s]);
    for (int64_t t = 0; t < num_tiles(rows.count); ++t)
      for (int s = 0; s < kPanelStrips; s += kTileStrips) {
        UnitsOf of;
        for (int i = 0; i < kTileStrips; ++i) of.strip[i] = units[s + i];
        multiply_tile_part<P>(strips + s, of, tile_of(rows, shape, t), shape, first, last, space[t][s / kTileStrips],
                              from_strip(sums + first_row(t, rows.count), s));
      }
  }
}

template <class P> void decode_strip(const OpenStrip& strip, const CodedShape& shape, Ahead& ahead, f32x16* out) {
  decode_steps<P>(strip, 0, shape.steps(), ahead, out);
}

template <class P>
void multiply_tile(const OpenStrip* strips, const f32x16* const* units_of, const CodedRows<P>& rows,
                   const CodedShape& shape, int64_t tile, f32x16 (*sums)[kPanelStrips]) {
  TileSpace space;
  for (int s = 0; s < kPanelStrips; s += kTileStrips) {
    UnitsOf of;
    for (int i = 0; i < kTileStrips; ++i) of.strip[i] = units_of[s + i];
    multiply_tile_part<P>(strips + s, of, tile_of(rows, shape, tile), shape, 0, shape.segments(), space,
                          from_strip(sums, s));
  }
}

#define TANDEM_PRODUCTS_OF(P)                                                                              \
  template void stream_panel<P>(const OpenStrip*, const CodedRows<P>&, const CodedShape&, Ahead,           \
                                f32x16 (*)[kPanelStrips]);                                                 \
  template void multiply_by_blocks<P>(const OpenStrip*, const CodedRows<P>&, const CodedShape&, Ahead,     \
                                      f32x16 (*)[kPanelStrips]);                                           \
  template void decode_strip<P>(const OpenStrip&, const CodedShape&, Ahead&, f32x16*);                     \
  template void multiply_tile<P>(const OpenStrip*, const f32x16* const*, const CodedRows<P>&,              \
                                 const CodedShape&, int64_t, f32x16 (*)[kPanelStrips]);
TANDEM_PRODUCTS_OF(float)
#if defined(__AVX512BF16__)
TANDEM_PRODUCTS_OF(bf16)
#endif
#undef TANDEM_PRODUCTS_OF

}  // namespace tandem
