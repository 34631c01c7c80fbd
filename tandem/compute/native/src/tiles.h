// Rows of x times two strips of weights, 16 outputs in a vector. Each output has its own lane, which adds the blocks of
// K in order as in `sums.h`, so its bits do not depend on the number of rows or on its row.
#pragma once
#include "strips.h"
#include "sums.h"

namespace tandem {

template <class T> constexpr bool kIsWidened = sizeof(typename Unit<T>::Type) > sizeof(T) * Unit<T>::kElements;

// Unit u of row m of a tile's kRows. Widened rows lie in tiles: of each unit all rows side by side, so that a walk over K
// has one stream and one pointer.
template <class T, int kRows>
TANDEM_INLINE const typename Unit<T>::Type* unit_at(const typename Unit<T>::Type* x, int64_t ldx, int m, int64_t u) {
  return kIsWidened<T> ? x + u * kRows + m : x + m * ldx + u;
}

// Units of a row, in equal blocks.
struct UnitBlocks {
  int64_t count, size;
};
template <class T> TANDEM_INLINE UnitBlocks blocks_of(int64_t k, int64_t count) { return {count, units<T>(k) / count}; }

// sums[m][s] = x row m . strip s. Asks for `lines` ahead at each fourth unit.
template <class T, int kRows>
TANDEM_INLINE void tile(const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip, UnitBlocks blocks,
                        Ahead& ahead, int lines, f32x16 (*sums)[kPanelStrips]) {
  const StoredVec* first = reinterpret_cast<const StoredVec*>(strip[0]);
  const StoredVec* second = kTileStrips == 2 ? reinterpret_cast<const StoredVec*>(strip[1]) : first + 1;
  Vec acc[kRows][2];
  // NOTE: part after part, so that two vectors of weights are in registers and not four.
  const auto multiply = [&](int64_t u, auto part) {
    constexpr int kPart = decltype(part)::value;
    const Vec w[2] = {Unit<T>::template part<kPart>(first + u * kVecs),
                      Unit<T>::template part<kPart>(second + u * kVecs)};
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i)
        acc[m][i] = Unit<T>::template dot<kPart>(acc[m][i], unit_at<T, kRows>(x, ldx, m, u), w[i]);
  };
  const auto step = [&](int64_t u) {
    multiply(u, std::integral_constant<int, 0>{});
    if constexpr (Unit<T>::kParts == 2) multiply(u, std::integral_constant<int, 1>{});
  };
  SumTree<2 * kRows> tree;
  int64_t u = 0;
  for (int64_t block = 0; block < blocks.count; ++block) {
    const int64_t end = u + blocks.size;
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) acc[m][0] = acc[m][1] = Vec{};
    for (; u + 4 <= end; u += 4) {
      if (lines == 8) ahead.ask<8>();
      else if (lines == 4) ahead.ask<4>();
      else if (lines == 2) ahead.ask<2>();
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) step(u + i);
    }
    for (; u < end; ++u) step(u);
    tree.add(block, block + 1 == blocks.count, acc[0]);
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) reinterpret_cast<StoredVec*>(sums[m])[i] = acc[m][i];
}

// The same sums for a few rows of x, one strip after the other: the hardware prefetcher then streams memory at full
// speed, and there is too little arithmetic for anything else to matter.
template <class T, int kRows>
TANDEM_INLINE void streaming_tile(const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip,
                                  UnitBlocks blocks, f32x16 (*sums)[kPanelStrips]) {
  for (int s = 0; s < kPanelStrips; ++s) {
    const StoredVec* w = reinterpret_cast<const StoredVec*>(strip[s]);
    Vec acc[kRows][kVecs];
    SumTree<kRows * kVecs> tree;
    int64_t u = 0;
    for (int64_t block = 0; block < blocks.count; ++block) {
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
        for (int i = 0; i < kVecs; ++i) acc[m][i] = Vec{};
#pragma GCC unroll 8
      for (const int64_t end = u + blocks.size; u < end; ++u) {
        __builtin_prefetch(w + (u + kUnitsAhead<kRows>) * kVecs, 0, 2);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
          for (int i = 0; i < kVecs; ++i) {
            const StoredVec* at = w + u * kVecs + i;
            const auto* units = unit_at<T, kRows>(x, ldx, m, u);
            acc[m][i] = Unit<T>::template dot<0>(acc[m][i], units, Unit<T>::template part<0>(at));
            if constexpr (Unit<T>::kParts == 2)
              acc[m][i] = Unit<T>::template dot<1>(acc[m][i], units, Unit<T>::template part<1>(at));
          }
      }
      tree.add(block, block + 1 == blocks.count, acc[0]);
    }
    for (int m = 0; m < kRows; ++m)
      for (int i = 0; i < kVecs; ++i) reinterpret_cast<StoredVec*>(&sums[m][s])[i] = acc[m][i];
  }
}

template <class T, int kRows = kStreamingRows>
void any_streaming_tile(int rows, const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip,
                        UnitBlocks blocks, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return any_streaming_tile<T, kRows - 1>(rows, x, ldx, strip, blocks, sums);
  streaming_tile<T, kRows>(x, ldx, strip, blocks, sums);
}

template <class T, int kRows = kMaxRows>
void any_tile(int rows, const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip, UnitBlocks blocks,
              Ahead& ahead, int lines, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return any_tile<T, kRows - 1>(rows, x, ldx, strip, blocks, ahead, lines, sums);
  tile<T, kRows>(x, ldx, strip, blocks, ahead, lines, sums);
}

// One thread's time: weights come from memory once and are multiplied with every row.
template <class T> double cost_ns(int64_t m_size, int64_t n_size, int64_t k_size) {
  const double weights = double(n_size) * double(k_size);
  return weights * double(sizeof(T)) / kBytesPerNs + 2.0 * weights * double(m_size) / kFlopsPerNs;
}

// Rows are cut into tiles of about the same size.
TANDEM_INLINE int64_t num_tiles(int64_t rows) { return ceil_div(rows, kMaxRows); }
TANDEM_INLINE int64_t first_row(int64_t tile, int64_t rows) { return rows * tile / num_tiles(rows); }

// Units of a row that was copied: zeros up to whole vectors.
template <class T> TANDEM_INLINE int64_t copied_units(int64_t k) { return ceil_div(units<T>(k), kLanes) * kLanes; }

// 16 units of a row from element k on; past its end they are zeros.
template <class T> void load_units(const T* row, int64_t k, int64_t k_size, typename Unit<T>::Type* to) {
  constexpr int kVectors = kIsWidened<T> ? Unit<T>::kElements : 1;
  f32x16 v[kVectors];
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = k + i * kLanes, left = k_size - at;
    if constexpr (kIsWidened<T>) v[i] = left > 0 ? load16(row + at, int(min64(left, kLanes))) : f32x16{};
    else v[i] = Unit<T>::load(row + at, int(min64(left, kBlock<T>)));
  }
  std::memcpy(to, v, sizeof v);
}

// Copies the rows of a tile as units, `num_units` of each; `row(m)` is where row m is.
template <class T, class Row>
void copy_tile(const Row& row, int count, int64_t k_size, typename Unit<T>::Type* out, int64_t num_units) {
  for (int64_t u = 0; u < num_units; u += kLanes) {
    typename Unit<T>::Type block[kMaxRows][kLanes];
    for (int m = 0; m < count; ++m) load_units<T>(row(m), u * Unit<T>::kElements, k_size, block[m]);
    for (int i = 0; i < kLanes; ++i)
      for (int m = 0; m < count; ++m) out[kIsWidened<T> ? (u + i) * count + m : m * num_units + u + i] = block[m][i];
  }
}

// Where the strips of a panel are turned round: in the weights, or in the thread's own copy.
template <class T>
void turned(const Strip<T>* strips, int64_t k_size, bool is_packed, const f32x16** units_of, Ahead& ahead) {
  thread_local Workspace workspace;
  const int64_t size = copied_units<T>(k_size);  // vectors
  for (int s = 0; s < kPanelStrips; ++s) {
    units_of[s] = reinterpret_cast<const f32x16*>(strips[s].weight);
    if (is_packed) continue;
    f32x16* out = reinterpret_cast<f32x16*>(workspace.reserve(size_t(kPanelStrips * size * kLanes))) + s * size;
    turn(strips[s], k_size, out, ahead);
    units_of[s] = out;
  }
}

// Rows of x as units, `stride` of them to a row; tiles begin to end of them are multiplied.
template <class T> struct TiledRows {
  const typename Unit<T>::Type* x;
  int64_t stride, count, begin, end;
};

// A panel times rows of x; store(sums, row, rows) gets the sums of rows from `row` on, over so many blocks of K.
template <class T, class Store>
void multiply_panel(const Strip<T>* strips, const TiledRows<T>& rows, int64_t k_size, int64_t sum_blocks, bool is_packed,
                    Ahead ahead, const Store& store) {
  const f32x16* units_of[kPanelStrips];
  turned(strips, k_size, is_packed, units_of, ahead);
  const int64_t passes = (rows.end - rows.begin) * (kPanelStrips / kTileStrips);
  const int lines = passes == 1 ? 8 : passes <= 3 ? 4 : 2;  // in four units: all tiles together ask for the next panel's
  const UnitBlocks blocks = blocks_of<T>(k_size, sum_blocks);
  for (int64_t t = rows.begin; t < rows.end; ++t) {
    const int64_t row = first_row(t, rows.count);
    const int tile_rows = int(first_row(t + 1, rows.count) - row);
    const auto* x = rows.x + row * rows.stride;
    f32x16 sums[kMaxRows][kPanelStrips];
    if (is_packed && rows.count <= kStreamingRows)
      any_streaming_tile<T>(tile_rows, x, rows.stride, units_of, blocks, sums);
    else
      for (int s = 0; s < kPanelStrips; s += kTileStrips)
        any_tile<T>(tile_rows, x, rows.stride, units_of + s, blocks, ahead, lines,
                    reinterpret_cast<f32x16(*)[kPanelStrips]>(&sums[0][s]));
    store(sums, row, tile_rows);
  }
}

// Rows whose units stay in L2, but four tiles where rows are long: weights are read again for each chunk.
// NOTE: not for weights that are not packed. They would be turned round for each.
template <class T> TANDEM_INLINE int64_t chunk_rows(int64_t k_size, bool is_packed) {
  if (!kIsWidened<T> || !is_packed) return kChunkRows;
  const int64_t fitting = kChunkBytes / int64_t(sizeof(typename Unit<T>::Type)) / units<T>(k_size);
  return min64(max64(fitting / kMaxRows, 4) * kMaxRows, kChunkRows);
}

}  // namespace tandem
