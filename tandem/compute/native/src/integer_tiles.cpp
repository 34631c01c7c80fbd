// The inner loops of products with rounded rows, compiled once for all callers.
#include "integer_tiles.h"

#include "segment_sums.h"

namespace tandem {
namespace {

template <class Way, class Lanes, int kRows>
void multiply_tile(const OpenStrip* strips, const RoundedRows& rows, const CodedShape& shape, Ahead& ahead,
                   f32x16 (*sums)[kPanelStrips]) {
  constexpr int kVectors = kTileStrips * kVecs;
  const OpenStrip& last = strips[kTileStrips - 1];
  const Lanes codes(*rows.decoding);
  const int64_t segments = shape.segments();
  SegmentSums<kRows, kVectors> total(shape, rows.segment_sums);
  for (int64_t segment = 0, step = 0; segment < segments; ++segment) {
    const int64_t end = min64(step + shape.segment_steps(), shape.steps());
    IntVec acc[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) acc[m][i] = reinterpret_cast<IntVec>(every_lane(uint32_t(rows.shifts[m * segments + segment])));
    for (; step < end; ++step) {
      ahead.ask<kTileStrips * Lanes::kWords>();
      UintVec quads[kVectors][2];
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i)
        codes.quads(strips[i / kVecs].lanes + step * Lanes::kWords * kStrip + i % kVecs * kVecLanes, quads[i]);
      const uint32_t* const x = rows.x + step * Way::kWords;
      const auto multiply = [&](auto part) {
        constexpr int kPart = decltype(part)::value;
        typename Way::Weights w[kVectors];
#pragma GCC unroll 2
        for (int i = 0; i < kVectors; ++i) w[i] = Way::template weights<kPart>(quads[i]);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
          for (int i = 0; i < kVectors; ++i) acc[m][i] = Way::template dot<kPart>(acc[m][i], x + m * rows.stride, w[i]);
      };
      multiply(std::integral_constant<int, 0>{});
      if constexpr (Way::kParts >= 2) multiply(std::integral_constant<int, 1>{});
      if constexpr (Way::kParts == 4) {
        multiply(std::integral_constant<int, 2>{});
        multiply(std::integral_constant<int, 3>{});
      }
    }
    Vec products[kRows][kVectors];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) products[m][i] = floats_of(acc[m][i]) * rows.scales[m * segments + segment];
    total.add(segment, products, [&](int i) { return part_of(strips->scales, last.scales, segment, i); },
              [&](int i) { return part_of(strips->offsets, last.offsets, segment, i); });
  }
  for (int m = 0; m < kRows; ++m) std::memcpy(sums[m], total.sums()[m], sizeof(f32x16) * kTileStrips);
}

template <class Way, class Lanes, int kRows = Way::kRows>
void multiply_any(const OpenStrip* strips, const RoundedRows& rows, const CodedShape& shape, Ahead& ahead,
                  f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows.count < kRows) return multiply_any<Way, Lanes, kRows - 1>(strips, rows, shape, ahead, sums);
  for (int s = 0; s < kPanelStrips; s += kTileStrips)
    multiply_tile<Way, Lanes, kRows>(strips + s, rows, shape, ahead, from_strip(sums, s));
}

}  // namespace

int integer_tile_rows(int way) {
  int rows = 0;
  with_way(way, [&](auto tag) { rows = decltype(tag)::kRows; });
  return rows;
}

void decode_quads(const OpenStrip& strip, const IntegerDecoding& decoding, const CodedShape& shape, Ahead& ahead,
                  uint32_t* out) {
  const Table4Lanes codes(decoding);
  for (int64_t step = 0; step < shape.steps(); ++step, out += 2 * kStrip) {
    ahead.ask<1>();
    for (int part = 0; part < kVecs; ++part) {
      UintVec quads[2];
      codes.quads(strip.lanes + step * kStrip + part * kVecLanes, quads);
      std::memcpy(out + part * kVecLanes, &quads[0], sizeof(UintVec));
      std::memcpy(out + kStrip + part * kVecLanes, &quads[1], sizeof(UintVec));
    }
  }
}

void multiply_integers(const OpenStrip* strips, bool are_quads, const RoundedRows& tile, const CodedShape& shape,
                       Ahead& ahead, f32x16 (*sums)[kPanelStrips]) {
  with_way(tile.decoding->way, [&](auto tag) {
    using Way = decltype(tag);
    if (are_quads) return multiply_any<Way, QuadLanes>(strips, tile, shape, ahead, sums);
    if (strips->kind == kTable4) return multiply_any<Way, Table4Lanes>(strips, tile, shape, ahead, sums);
    // NOTE: pairs hold no numbers of 8 bits.
    if constexpr (Way::kWay != kPairsWay) multiply_any<Way, Int8Lanes>(strips, tile, shape, ahead, sums);
  });
}

}  // namespace tandem
