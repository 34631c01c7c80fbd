// Rounded rows of x times two strips of integer codes. A segment's products are added as integers, then, times the
// scales of row and output, like those of rows that are not rounded (`coded_tiles.h`).
#pragma once
#include "integer_rows.h"

namespace tandem {

constexpr int kMostTileRows = kMaxRows;

// Rows that a thread multiplies at a time.
int integer_tile_rows(int way);

// A strip of codes of 4 bits as quads of bytes, step after step.
void decode_quads(const OpenStrip& strip, const IntegerDecoding& decoding, const CodedShape& shape, Ahead& ahead,
                  uint32_t* out);

// A tile of rows. `are_quads`: lanes are bytes as `decode_quads` makes them.
void multiply_integers(const OpenStrip* strips, bool are_quads, const RoundedRows& tile, const CodedShape& shape,
                       Ahead& ahead, f32x16 (*sums)[kPanelStrips]);

// See that of rows that are not rounded.
template <class Store>
void multiply_coded_panel(const CodedStrip* panel, RoundedRows rows, const CodedShape& shape, Ahead ahead,
                          const Store& store) {
  thread_local Workspace workspace;
  constexpr int kTilesFromCodes = 2;  // for more, codes are decoded once
  const Decoding decoding{int(panel->weights->kind), rows.decoding->factor};
  OpenStrip strips[kPanelStrips] = {open_strip(panel[0], shape, 0, decoding), open_strip(panel[1], shape, 1, decoding)};
  if (!strips->offsets) rows.segment_sums = nullptr;
  const int64_t tiles = ceil_div(rows.count, integer_tile_rows(rows.decoding->way));
  const bool are_quads = strips->kind == kTable4 && tiles > kTilesFromCodes;
  if (are_quads) {
    const int64_t size = shape.steps() * 2 * kStrip;
    uint32_t* const space = reinterpret_cast<uint32_t*>(workspace.reserve(size_t(kPanelStrips * size)));
    for (int s = 0; s < kPanelStrips; ++s) {
      decode_quads(strips[s], *rows.decoding, shape, ahead, space + s * size);
      strips[s].lanes = space + s * size;
    }
    ahead = Ahead();
  }
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = rows.count * t / tiles, size = rows.count * (t + 1) / tiles - row;
    f32x16 sums[kMostTileRows][kPanelStrips];
    multiply_integers(strips, are_quads, rows.part(row, size, shape), shape, ahead, sums);
    ahead = Ahead();
    store(sums, row, int(size));
  }
}

}  // namespace tandem
