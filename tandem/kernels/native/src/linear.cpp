// x @ weight.T, 16 outputs to a vector. Each owns one lane that walks K in order, so its bits do not depend on the
// number of rows or on its row. Threads split outputs and rows, never K.
//
// Weights come in strips of 16 rows. A strip turned round has, unit after unit of K, that unit of all 16 rows: what the
// walk wants, as one stream from memory. Strips that are stored as rows are turned round into a panel that stays in L2
// while all rows of x pass. Meanwhile the next panel is asked for: weights come from memory once.
#include <type_traits>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kStrip = kLanes;
constexpr int kPanelStrips = 2;  // strips whose products are stored together

// A tile multiplies two vectors: as many sums as there are registers for.
#if defined(__AVX512F__)
constexpr int kTileStrips = 2, kMaxRows = 12;  // 24 of 32
#else
constexpr int kTileStrips = 1, kMaxRows = 6;  // 12 of 16
#endif
static_assert(kTileStrips * kVecs == 2, "a tile multiplies two vectors");
constexpr int kStreamingRows = kMaxRows < 4 ? kMaxRows : 4;
constexpr int kUnitsAhead = 40;  // that a streaming walk asks for
constexpr int64_t kChunkRows = 384;         // rows of x in a task, at most
constexpr int64_t kChunkBytes = 256 << 10;  // that they take, widened, to stay in L2
constexpr double kBytesPerNs = 25.0, kFlopsPerNs = 200.0;  // what one thread reads and computes
constexpr int kLineBytes = 64;

// What one multiplication adds to a lane: one element as a float or, of bfloat16, two. `Type` is that of x, whose
// elements are floats where the processor multiplies nothing else: then x is widened once and not at each strip.
template <class T> struct Unit {
  using Type = float;
  static constexpr int kElements = 1;
  static constexpr int kParts = 1;  // multiplications
  static constexpr bool kIsStored = std::is_same<T, float>::value;  // memory has units
  TANDEM_INLINE f32x16 load(const T* p, int count) { return load16(p, count); }
  template <int> TANDEM_INLINE Vec part(const StoredVec* w) { return *w; }
  template <int> TANDEM_INLINE Vec dot(Vec acc, const float* x, Vec w) { return *x * w + acc; }
};
template <> struct Unit<bf16> {
#if defined(__AVX512BF16__)
  using Type = uint32_t;
#else
  struct Type { float first, second; };
#endif
  static constexpr int kElements = 2;
  static constexpr bool kIsStored = true;
  TANDEM_INLINE f32x16 load(const bf16* p, int count) {
    f32x16 units{};
    std::memcpy(&units, p, size_t(count) * sizeof(bf16));
    return units;
  }
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;
  template <int> TANDEM_INLINE Vec part(const StoredVec* w) { return *w; }
  template <int> TANDEM_INLINE Vec dot(Vec acc, const Type* x, Vec w) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(int(*x)), (__m512bh)w);
  }
#else
  static constexpr int kParts = 2;
  template <int kPart> TANDEM_INLINE Vec part(const StoredVec* w) {
    const IntVec pairs = reinterpret_cast<IntVec>(Vec(*w));
    return reinterpret_cast<Vec>(kPart ? pairs & int32_t(0xffff0000u) : pairs << 16);
  }
  template <int kPart> TANDEM_INLINE Vec dot(Vec acc, const Type* x, Vec w) {
    return (kPart ? x->second : x->first) * w + acc;
  }
#endif
};
template <class T> constexpr int kBlock = kLanes * Unit<T>::kElements;  // elements of K that are turned round at once
template <class T> TANDEM_INLINE int64_t units(int64_t k) {
  return (k + Unit<T>::kElements - 1) / Unit<T>::kElements;
}

// Turns four units of 16 rows round, from unit u on: out[i] has unit u + i of every row.
TANDEM_INLINE void turn4(const float* const* row, int64_t u, f32x16* out) {
#if defined(__AVX512F__)
  __m512 v[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // NOTE: a masked load is no shuffle, of which there is but one a cycle
    v[i] = _mm512_broadcast_f32x4(_mm_loadu_ps(row[i] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_loadu_ps(row[i + 4] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_loadu_ps(row[i + 8] + u));
    v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_loadu_ps(row[i + 12] + u));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
#elif defined(__AVX2__)
  float* to = reinterpret_cast<float*>(out);
#pragma GCC unroll 4
  for (int i = 0; i < kLanes; i += 4) {
    __m128 a = _mm_loadu_ps(row[i] + u), b = _mm_loadu_ps(row[i + 1] + u);
    __m128 c = _mm_loadu_ps(row[i + 2] + u), d = _mm_loadu_ps(row[i + 3] + u);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_store_ps(to + i, a), _mm_store_ps(to + kLanes + i, b);
    _mm_store_ps(to + 2 * kLanes + i, c), _mm_store_ps(to + 3 * kLanes + i, d);
  }
#else
  float* to = reinterpret_cast<float*>(out);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) std::memcpy(to + j * kLanes + i, row[i] + u + j, sizeof *to);
#endif
}

// 16 weight rows or fewer: the first of them or, turned round, their units. Their products begin at `column`.
template <class T> struct Strip {
  const T *weight, *bias;
  int64_t column;
  int rows;
};
template <class T> TANDEM_INLINE f32x16 bias_of(const Strip<T>& strip) {
  return strip.bias ? load16(strip.bias, strip.rows) : f32x16{};
}

// Asks L2 for two strips, in address order: that keeps DRAM pages and the hardware prefetcher happy.
class Ahead {
 public:
  Ahead() = default;
  template <class T> Ahead(const Strip<T>* strips, int64_t k_size) : bytes_(kStrip * k_size * int64_t(sizeof(T))) {
    for (int s = 0; s < kPanelStrips; ++s) strip_[s] = reinterpret_cast<const char*>(strips[s].weight);
  }

  template <int kLines> inline __attribute__((always_inline)) void ask() {
    if (at_ >= bytes_) return;
#pragma GCC unroll 16
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(strip_[0] + at_ + i * kLineBytes, 0, 2);
    if ((at_ += kLines * kLineBytes) < bytes_ || strip_[0] == strip_[1]) return;
    at_ = 0;
    strip_[0] = strip_[1];
  }

 private:
  const char* strip_[kPanelStrips] = {};
  int64_t at_ = 0, bytes_ = 0;
};

// Where the units of 16 rows are: in the weights, or in `copy` where they are the last ones or not stored as such.
template <class T>
TANDEM_INLINE void block_of(const Strip<T>& strip, int64_t k, int64_t k_size, float (*copy)[kLanes], const float** at) {
  const bool is_there = Unit<T>::kIsStored && k + kBlock<T> <= k_size;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    const T* row = strip.weight + min64(i, strip.rows - 1) * k_size + k;
    at[i] = is_there ? reinterpret_cast<const float*>(row) : copy[i];
    if (!is_there) store16(copy[i], Unit<T>::load(row, int(min64(kBlock<T>, k_size - k))));
  }
}

// A strip turned round: [unit][row], zeros up to a whole block. Rows that it lacks repeat its last.
template <class T> void turn(const Strip<T>& strip, int64_t k_size, f32x16* out, Ahead& ahead) {
  for (int64_t k = 0; k < k_size; k += kBlock<T>, out += kLanes) {
    alignas(64) float copy[kLanes][kLanes];
    const float* at[kLanes];
    block_of(strip, k, k_size, copy, at);
#pragma GCC unroll 4
    for (int u = 0; u < kLanes; u += 4) turn4(at, u, out + u);
    ahead.ask<8>();
  }
}

template <class T> constexpr bool kIsWidened = sizeof(typename Unit<T>::Type) > sizeof(T) * Unit<T>::kElements;

// Unit u of row m of a tile's kRows. Widened rows lie in tiles: of each unit all rows side by side, so that a walk over K
// has one stream and one pointer.
template <class T, int kRows>
TANDEM_INLINE const typename Unit<T>::Type* unit_at(const typename Unit<T>::Type* x, int64_t ldx, int m, int64_t u) {
  return kIsWidened<T> ? x + u * kRows + m : x + m * ldx + u;
}

// sums[m][s] = x row m . strip s. Asks for `lines` ahead at each fourth unit.
template <class T, int kRows>
TANDEM_INLINE void tile(const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip, int64_t num_units,
                        Ahead& ahead, int lines, f32x16 (*sums)[kPanelStrips]) {
  const StoredVec* first = reinterpret_cast<const StoredVec*>(strip[0]);
  const StoredVec* second = kTileStrips == 2 ? reinterpret_cast<const StoredVec*>(strip[1]) : first + 1;
  Vec acc[kRows][2] = {};
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
  int64_t u = 0;
  for (; u + 4 <= num_units; u += 4) {
    if (lines == 8) ahead.ask<8>();
    else if (lines == 4) ahead.ask<4>();
    else if (lines == 2) ahead.ask<2>();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) step(u + i);
  }
  for (; u < num_units; ++u) step(u);
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) reinterpret_cast<StoredVec*>(sums[m])[i] = acc[m][i];
}

// The same sums for a few rows of x, one strip after the other: the hardware prefetcher then streams memory at full
// speed, and there is too little arithmetic for anything else to matter.
template <class T, int kRows>
TANDEM_INLINE void streaming_tile(const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip,
                                  int64_t num_units, f32x16 (*sums)[kPanelStrips]) {
  for (int s = 0; s < kPanelStrips; ++s) {
    const StoredVec* w = reinterpret_cast<const StoredVec*>(strip[s]);
    Vec acc[kRows][kVecs] = {};
#pragma GCC unroll 8
    for (int64_t u = 0; u < num_units; ++u) {
      __builtin_prefetch(w + (u + kUnitsAhead) * kVecs, 0, 2);
#pragma GCC unroll 4
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
    for (int m = 0; m < kRows; ++m)
      for (int i = 0; i < kVecs; ++i) reinterpret_cast<StoredVec*>(&sums[m][s])[i] = acc[m][i];
  }
}

template <class T, int kRows = kStreamingRows>
void any_streaming_tile(int rows, const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip,
                        int64_t num_units, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return any_streaming_tile<T, kRows - 1>(rows, x, ldx, strip, num_units, sums);
  streaming_tile<T, kRows>(x, ldx, strip, num_units, sums);
}

template <class T, int kRows = kMaxRows>
void any_tile(int rows, const typename Unit<T>::Type* x, int64_t ldx, const f32x16* const* strip, int64_t num_units,
              Ahead& ahead, int lines, f32x16 (*sums)[kPanelStrips]) {
  if constexpr (kRows > 1)
    if (rows < kRows) return any_tile<T, kRows - 1>(rows, x, ldx, strip, num_units, ahead, lines, sums);
  tile<T, kRows>(x, ldx, strip, num_units, ahead, lines, sums);
}

// One thread's time: weights come from memory once and are multiplied with every row.
template <class T> double cost_ns(int64_t m_size, int64_t n_size, int64_t k_size) {
  const double weights = double(n_size) * double(k_size);
  return weights * double(sizeof(T)) / kBytesPerNs + 2.0 * weights * double(m_size) / kFlopsPerNs;
}

// Rows of x as units, those of the caller's last product that copied them.
inline float* copied_rows(int64_t floats) {
  thread_local Workspace workspace;
  return workspace.reserve(size_t(floats));
}

// What is multiplied with the rows of x: `panel(i, strips)` names two strips, `store(sums, row, rows, strips)` gets the
// sums of rows of x from `row` on.
template <class T, class Source> class Product {
  using X = typename Unit<T>::Type;
  static constexpr int kElements = Unit<T>::kElements, kFloats = sizeof(X) / sizeof(float);

 public:
  Product(int64_t k_size, bool is_packed, const Source& source, int num_threads)
      : k_size_(k_size), is_packed_(is_packed), source_(source), num_threads_(num_threads) {}

  // Units are where elements lie, or copied: then a chunk for each thread at a time, for a copy that stays small.
  void run(const T* x, int64_t stride, int64_t count) const {
    if (!kIsWidened<T> && k_size_ % kElements == 0 && stride % kElements == 0)
      return multiply({reinterpret_cast<const X*>(x), stride / kElements, 0, count, kChunkRows});
    const int64_t chunk_rows = kIsWidened<T> && is_packed_ ? fitting_rows() : kChunkRows;
    const int64_t parts = ceil_div(count, chunk_rows * (num_threads_ + Pool::lent()));
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = count * i / parts, last = count * (i + 1) / parts;
      multiply(copy(x + first * stride, stride, {nullptr, 0, first, last - first, chunk_rows}));
    }
  }

 private:
  // Rows whose units stay in L2, but four tiles where rows are long: weights are read again for each chunk.
  // NOTE: not for weights that are not packed. They would be turned round for each.
  int64_t fitting_rows() const {
    const int64_t fitting = kChunkBytes / int64_t(sizeof(X)) / units<T>(k_size_);
    return min64(max64(fitting / kMaxRows, 4) * kMaxRows, kChunkRows);
  }

  struct Rows {
    const X* x;
    int64_t stride, first, count, chunk_rows;  // `first` in the whole product
    int64_t chunks() const { return ceil_div(count, chunk_rows); }
    int64_t tiles() const { return ceil_div(count, kMaxRows); }
    int64_t tile(int64_t index) const { return count * index / tiles(); }  // its first row
  };

  Rows copy(const T* x, int64_t stride, Rows rows) const {
    rows.stride = ceil_div(units<T>(k_size_), kLanes) * kLanes;
    X* const out = reinterpret_cast<X*>(copied_rows(rows.count * rows.stride * kFloats));
    const double cost = double(rows.count * k_size_) * (sizeof(T) + sizeof(float)) / kBytesPerNs;
    Pool::run(rows.tiles(), split(rows.tiles(), cost, num_threads_), [=](int64_t tile, int64_t last) {
      for (; tile < last; ++tile) {
        const int64_t row = rows.tile(tile);
        copy_tile(x + row * stride, stride, int(rows.tile(tile + 1) - row), out + row * rows.stride, rows.stride);
      }
    });
    rows.x = out;
    return rows;
  }

  void copy_tile(const T* x, int64_t stride, int count, X* out, int64_t num_units) const {
    for (int64_t u = 0; u < num_units; u += kLanes) {
      X block[kMaxRows][kLanes];
      for (int m = 0; m < count; ++m) load_units(x + m * stride, u * kElements, block[m]);
      for (int i = 0; i < kLanes; ++i)
        for (int m = 0; m < count; ++m)
          out[kIsWidened<T> ? (u + i) * count + m : m * num_units + u + i] = block[m][i];
    }
  }

  // 16 units of a row from element k on; past its end they are zeros.
  void load_units(const T* row, int64_t k, X* to) const {
    constexpr int kVectors = kIsWidened<T> ? kElements : 1;
    f32x16 v[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const int64_t at = k + i * kLanes, left = k_size_ - at;
      if constexpr (kIsWidened<T>) v[i] = left > 0 ? load16(row + at, int(min64(left, kLanes))) : f32x16{};
      else v[i] = Unit<T>::load(row + at, int(min64(left, kBlock<T>)));
    }
    std::memcpy(to, v, sizeof v);
  }

  // Widened rows of a chunk stay in L2 while all panels pass; otherwise a panel does while all rows pass.
  void multiply(const Rows& rows) const {
    const int64_t panels = source_.panels(), chunks = rows.chunks(), tasks = panels * chunks;
    const double cost = cost_ns<T>(rows.count, panels * kPanelStrips * kStrip, k_size_);
    Pool::run(tasks, split(tasks, cost, num_threads_), [&](int64_t task, int64_t last) {
      for (; task < last; ++task)
        if (kIsWidened<T>) panel_times_chunk(rows, task % panels, task / panels, true);
        else panel_times_chunk(rows, task / chunks, task % chunks, task % chunks + 1 == chunks);
    });
  }

  void panel_times_chunk(const Rows& rows, int64_t index, int64_t chunk, bool is_next_another) const {
    const int64_t begin = rows.tiles() * chunk / rows.chunks(), end = rows.tiles() * (chunk + 1) / rows.chunks();
    Strip<T> strips[kPanelStrips], next[kPanelStrips];
    const bool has_next = is_next_another && index + 1 < source_.panels();
    source_.panel(index, strips);
    source_.panel(has_next ? index + 1 : index, next);
    Ahead ahead = has_next ? Ahead(next, k_size_) : Ahead();
    const f32x16* units_of[kPanelStrips];
    pack(strips, units_of, ahead);
    const int64_t passes = (end - begin) * (kPanelStrips / kTileStrips);
    const int lines = passes == 1 ? 8 : passes <= 3 ? 4 : 2;  // in four units: all tiles together ask for the next panel's
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = rows.tile(t);
      const int tile_rows = int(rows.tile(t + 1) - row);
      const X* x = rows.x + row * rows.stride;
      f32x16 sums[kMaxRows][kPanelStrips];
      if (is_packed_ && rows.count <= kStreamingRows)
        any_streaming_tile<T>(tile_rows, x, rows.stride, units_of, units<T>(k_size_), sums);
      else
        for (int s = 0; s < kPanelStrips; s += kTileStrips)
          any_tile<T>(tile_rows, x, rows.stride, units_of + s, units<T>(k_size_), ahead, lines,
                      reinterpret_cast<f32x16(*)[kPanelStrips]>(&sums[0][s]));
      source_.store(sums, rows.first + row, tile_rows, strips);
    }
  }

  void pack(const Strip<T>* strips, const f32x16** units_of, Ahead& ahead) const {
    thread_local Workspace workspace;
    const int64_t size = ceil_div(units<T>(k_size_), kLanes) * kLanes;  // vectors
    for (int s = 0; s < kPanelStrips; ++s) {
      units_of[s] = reinterpret_cast<const f32x16*>(strips[s].weight);
      if (is_packed_) continue;
      f32x16* out = reinterpret_cast<f32x16*>(workspace.reserve(size_t(kPanelStrips * size * kLanes))) + s * size;
      turn(strips[s], k_size_, out, ahead);
      units_of[s] = out;
    }
  }

  int64_t k_size_;
  bool is_packed_;
  const Source& source_;
  int num_threads_;
};

// Weights whose products lie side by side in the output.
template <class T> struct Part {
  const T *weight, *bias;
  int64_t rows;
  int64_t strips() const { return ceil_div(rows, kStrip); }
};

template <class T, class Out> struct Linear {
  Part<T> part[3];
  Out* out;
  int64_t ldo, k_size;
  bool is_packed;

  int64_t panels() const { return ceil_div(part[0].strips() + part[1].strips() + part[2].strips(), kPanelStrips); }

  void panel(int64_t index, Strip<T>* strips) const {
    for (int s = 0; s < kPanelStrips; ++s) strips[s] = strip(index * kPanelStrips + s);
  }

  // NOTE: past the end it is the last one again, whose sums are then stored twice.
  Strip<T> strip(int64_t index) const {
    const Part<T>* p = part;
    int64_t column = 0;
    while (index >= p->strips() && p < part + 2 && p[1].rows) {
      index -= p->strips();
      column += p++->rows;
    }
    const int64_t row = min64(index, p->strips() - 1) * kStrip;
    const T* bias = p->bias ? p->bias + row : nullptr;
    return {p->weight + row * k_size, bias, column + row, int(min64(kStrip, p->rows - row))};
  }

  void store(const f32x16 (*sums)[kPanelStrips], int64_t row, int rows, const Strip<T>* strips) const {
    for (int s = 0; s < kPanelStrips; ++s) {
      const Strip<T>& strip = strips[s];
      const f32x16 shift = bias_of(strip);
      for (int m = 0; m < rows; ++m)
        store16(out + (row + m) * ldo + strip.column, sums[m][s] + shift, strip.rows);
    }
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    Product<T, Linear>(k_size, is_packed, *this, num_threads).run(x, ldx, m_size);
  }
};

// A panel is a strip of gate rows and the up rows beside them.
template <class T> struct GatedLinear {
  const T *gate, *up, *gate_bias, *up_bias;
  T* out;
  int64_t ldo, n_size, k_size;
  bool is_packed;
  int activation;

  int64_t panels() const { return ceil_div(n_size, kStrip); }

  void panel(int64_t index, Strip<T>* strips) const {
    const int64_t row = index * kStrip;
    const int rows = int(min64(kStrip, n_size - row));
    strips[0] = {gate + row * k_size, gate_bias ? gate_bias + row : nullptr, row, rows};
    strips[1] = {up + row * k_size, up_bias ? up_bias + row : nullptr, row, rows};
  }

  void store(const f32x16 (*sums)[kPanelStrips], int64_t row, int rows, const Strip<T>* strips) const {
    const f32x16 gate_shift = bias_of(strips[0]), up_shift = bias_of(strips[1]);
    for (int m = 0; m < rows; ++m)
      store16(out + (row + m) * ldo + strips->column,
              activate(activation, sums[m][0] + gate_shift) * (sums[m][1] + up_shift), strips->rows);
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    Product<T, GatedLinear>(k_size, is_packed, *this, num_threads).run(x, ldx, m_size);
  }
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_linear(const LinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const Part<T> whole{static_cast<const T*>(a->weight), static_cast<const T*>(a->bias), a->n};
    const auto into = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      const Linear<T, Out> linear{{whole}, out, a->out_stride, a->k, a->is_packed != 0};
      linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
    };
    if (a->out_dtype == kFloat32) return into(static_cast<float*>(a->out));
    into(static_cast<T*>(a->out));
  });
}

void tandem_joined_linear(const JoinedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    Linear<T, T> linear{{}, static_cast<T*>(a->out), a->out_stride, a->k, a->is_packed != 0};
    for (int i = 0; i < 3; ++i)
      linear.part[i] = {static_cast<const T*>(a->parts[i].weight), static_cast<const T*>(a->parts[i].bias),
                        a->parts[i].rows};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}

TANDEM_EXPORT void tandem_gated_linear(const GatedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const GatedLinear<T> linear{static_cast<const T*>(a->gate), static_cast<const T*>(a->up),
                                static_cast<const T*>(a->gate_bias), static_cast<const T*>(a->up_bias),
                                static_cast<T*>(a->out), a->out_stride, a->n, a->k, a->is_packed != 0,
                                int(a->activation)};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}

// Turned round a weight takes as many bytes as before, where memory has units and none is cut.
TANDEM_EXPORT void tandem_pack(const PackArguments* a) {
  *a->ok = 0;
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    if (!Unit<T>::kIsStored || a->n % kStrip || a->k % kBlock<T>) return;
    const int64_t strips = a->n / kStrip, size = kStrip * a->k;
    const double cost = double(a->n * a->k * int64_t(sizeof(T))) / kBytesPerNs;
    if (a->out) Pool::run(strips, split(strips, cost, int(a->threads)), [a, size](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        Ahead nothing;
        const Strip<T> strip{static_cast<const T*>(a->weight) + i * size, nullptr, 0, kStrip};
        turn(strip, a->k, reinterpret_cast<f32x16*>(static_cast<T*>(a->out) + i * size), nothing);
      }
    });
    *a->ok = 1;
  });
}
