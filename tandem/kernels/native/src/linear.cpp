// x @ weight.T straight from row-major weights: dot products along K, nothing packed or copied.
//
// A tile is up to kMaxRows activation rows by four weight rows. Each output element owns one 16-lane accumulator that
// walks K in order and is folded by one fixed tree, so its bits do not depend on the number of rows or on its row.
// Threads split outputs, never K. Weights stream from memory once per block of activation rows (kept in L2).
#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kPanel = 4;  // weight rows in a tile
#if defined(__AVX512F__)
constexpr int kMaxRows = 6;  // 24 accumulators of 32 registers
#else
constexpr int kMaxRows = 1;
#endif
constexpr int kSumRows = 8;  // kMaxRows, rounded up to whole vectors of four rows
constexpr double kBytesPerNs = 25.0, kFlopsPerNs = 150.0;  // what one thread reads and computes
constexpr int64_t kBlockBytes = 512 * 1024;  // activation rows kept in L2 while the weights pass

// How a dtype is multiplied: `dot` adds the products of kStep elements into 16 lanes.
template <class T> struct Dot {
  using Vector = f32x16;
  static constexpr int kStep = kLanes;
  static Vector load(const T* p) { return load16(p); }
  static Vector load(const T* p, int count) { return load16(p, count); }
  TANDEM_INLINE f32x16 dot(f32x16 acc, Vector a, Vector b) { return fma(a, b, acc); }
};
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
template <> struct Dot<bf16> {
  using Vector = __m512bh;
  static constexpr int kStep = 2 * kLanes;
  static Vector load(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vector load(const bf16* p, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t(1) << count) - 1u), p);
  }
  TANDEM_INLINE f32x16 dot(f32x16 acc, Vector a, Vector b) { return _mm512_dpbf16_ps(acc, a, b); }
};
#endif

// Folds four accumulators into four sums; the tree is reduce_add's.
TANDEM_INLINE void fold4(const f32x16* acc, float* out) {
#if defined(__AVX512F__)
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(acc[0], acc[1]), _mm512_unpackhi_ps(acc[0], acc[1]));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(acc[2], acc[3]), _mm512_unpackhi_ps(acc[2], acc[3]));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 lanes = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(lanes), upper);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
  for (int i = 0; i < kPanel; ++i) out[i] = reduce_add(acc[i]);
#endif
}

template <class T> struct Panel {
  const T* row[kPanel];
  const T* next[2];  // the following panel's first and second pair of rows (each pair contiguous), to prefetch
};

// Asks L2 for `kLines` cache lines at step `k` of a walk over K, in address order. Order is what matters: it keeps DRAM
// pages and the hardware prefetcher happy, where prefetching four rows side by side cost a third of the bandwidth.
template <class T, int kLines> TANDEM_INLINE void prefetch_lines(const T* rows, int64_t k) {
  const char* line = reinterpret_cast<const char*>(rows + k * kLines);
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + i * int64_t(Dot<T>::kStep * sizeof(T)), 0, 2);
}

// sums[m][n] = x row m . panel row n, meanwhile prefetching `kPrefetch` rows of the next panel from `first` on.
template <class T, int kRows, int kPrefetch>
TANDEM_INLINE void tile(const T* x, int64_t ldx, const Panel<T>& panel, int first, int64_t k_size,
                        float (*sums)[kPanel]) {
  using D = Dot<T>;
  f32x16 acc[kRows][kPanel] = {};
  const auto step = [&](int64_t k, auto... count) {
    typename D::Vector w[kPanel];
#pragma GCC unroll 8
    for (int n = 0; n < kPanel; ++n) w[n] = D::load(panel.row[n] + k, count...);
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) {
      const typename D::Vector a = D::load(x + m * ldx + k, count...);
#pragma GCC unroll 8
      for (int n = 0; n < kPanel; ++n) acc[m][n] = D::dot(acc[m][n], a, w[n]);
    }
  };
  int64_t k = 0;
  for (; k + D::kStep <= k_size; k += D::kStep) {
    if (kPrefetch == 4) prefetch_lines<T, 2>(panel.next[0], k), prefetch_lines<T, 2>(panel.next[1], k);
    if (kPrefetch == 2) prefetch_lines<T, 2>(panel.next[first / 2], k);
    if (kPrefetch == 1) prefetch_lines<T, 1>(panel.next[first / 2] + first % 2 * k_size, k);
    step(k);
  }
  if (k < k_size) step(k, int(k_size - k));
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) fold4(acc[m], sums[m]);
}

// The same sums for one or two rows of x, one weight row after the other: the hardware prefetcher then streams memory at
// full speed, and there is too little arithmetic for anything else to matter.
template <class T, int kRows>
TANDEM_INLINE void streaming_tile(const T* x, int64_t ldx, const Panel<T>& panel, int64_t k_size,
                                  float (*sums)[kPanel]) {
  using D = Dot<T>;
  f32x16 acc[kRows][kPanel] = {};
  for (int n = 0; n < kPanel; ++n) {
    f32x16 row[kRows] = {};
    const auto step = [&](int64_t k, auto... count) {
      const typename D::Vector w = D::load(panel.row[n] + k, count...);
      for (int m = 0; m < kRows; ++m) row[m] = D::dot(row[m], D::load(x + m * ldx + k, count...), w);
    };
    int64_t k = 0;
    for (; k + D::kStep <= k_size; k += D::kStep) step(k);
    if (k < k_size) step(k, int(k_size - k));
    for (int m = 0; m < kRows; ++m) acc[m][n] = row[m];
  }
  for (int m = 0; m < kRows; ++m) fold4(acc[m], sums[m]);
}

template <class T, int kRows>
void tile_of(const T* x, int64_t ldx, const Panel<T>& panel, int first, int prefetch, int64_t k_size,
             float (*sums)[kPanel]) {
  switch (prefetch) {
    case 4: return tile<T, kRows, 4>(x, ldx, panel, first, k_size, sums);
    case 2: return tile<T, kRows, 2>(x, ldx, panel, first, k_size, sums);
    case 1: return tile<T, kRows, 1>(x, ldx, panel, first, k_size, sums);
    default: return tile<T, kRows, 0>(x, ldx, panel, first, k_size, sums);
  }
}

template <class T>
void any_tile(int rows, const T* x, int64_t ldx, const Panel<T>& panel, int first, int prefetch, int64_t k_size,
              float (*sums)[kPanel]) {
  if (prefetch == kPanel && rows == 1) return streaming_tile<T, 1>(x, ldx, panel, k_size, sums);
  if (prefetch == kPanel && rows == 2) return streaming_tile<T, 2>(x, ldx, panel, k_size, sums);
  switch (rows) {
    case 1: return tile_of<T, 1>(x, ldx, panel, first, prefetch, k_size, sums);
#if defined(__AVX512F__)
    case 2: return tile_of<T, 2>(x, ldx, panel, first, prefetch, k_size, sums);
    case 3: return tile_of<T, 3>(x, ldx, panel, first, prefetch, k_size, sums);
    case 4: return tile_of<T, 4>(x, ldx, panel, first, prefetch, k_size, sums);
    case 5: return tile_of<T, 5>(x, ldx, panel, first, prefetch, k_size, sums);
    default: return tile_of<T, 6>(x, ldx, panel, first, prefetch, k_size, sums);
#endif
  }
}

// One weight panel against a block of activation rows; the next panel's prefetch is spread over the tiles.
template <class T, class Epilogue>
void panel_times_block(const T* x, int64_t ldx, int64_t first_row, int64_t rows, int64_t k_size,
                       const Panel<T>& panel, int64_t index, const Epilogue& epilogue) {
  const int64_t tiles = ceil_div(rows, kMaxRows);
  const int per_tile = tiles == 1 ? 4 : tiles < 4 ? 2 : 1;  // prefetched rows
  alignas(64) float sums[kSumRows][kPanel] = {};
  int prefetched = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t begin = first_row + rows * t / tiles, end = first_row + rows * (t + 1) / tiles;
    const int prefetch = prefetched < kPanel ? per_tile : 0;
    any_tile<T>(int(end - begin), x + begin * ldx, ldx, panel, prefetched, prefetch, k_size, sums);
    prefetched += prefetch;
    epilogue(sums, begin, int(end - begin), index);
  }
}

// One thread's time: weights come from memory once per block of activation rows, and are multiplied with every row.
template <class T> double cost_ns(int64_t m_size, int64_t n_size, int64_t k_size, int64_t blocks) {
  const double weights = double(n_size) * double(k_size);
  return weights * double(sizeof(T)) * double(blocks) / kBytesPerNs + 2.0 * weights * double(m_size) / kFlopsPerNs;
}

// Splits panels and activation blocks over threads. `panel_at(index)` names the weight rows of a panel.
template <class T, class PanelAt, class Epilogue>
void multiply(const T* x, int64_t ldx, int64_t m_size, int64_t k_size, int64_t num_panels, int num_threads,
              const PanelAt& panel_at, const Epilogue& epilogue) {
  const int64_t fitting = kBlockBytes / max64(1, k_size * int64_t(sizeof(T)));
  const int64_t blocks = ceil_div(m_size, max64(kMaxRows, min64(fitting, 32 * kMaxRows)));
  const double cost = cost_ns<T>(m_size, num_panels * kPanel, k_size, blocks);
  Pool::run(blocks * num_panels, split(blocks * num_panels, cost, num_threads), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t b = task / num_panels, index = task % num_panels;
      const int64_t first_row = m_size * b / blocks, rows = m_size * (b + 1) / blocks - first_row;
      panel_times_block<T>(x, ldx, first_row, rows, k_size, panel_at(index), index, epilogue);
    }
  });
}

template <class Out> TANDEM_INLINE void copy_row(Out* to, const Out* from, int columns) {
  if (columns == kPanel) {
    std::memcpy(to, from, kPanel * sizeof(Out));
  } else {
    for (int n = 0; n < columns; ++n) to[n] = from[n];
  }
}

// Weights whose products lie side by side in the output. All parts but the last have whole panels.
template <class T> struct Part {
  const T *weight, *bias;
  int64_t rows;
  int64_t panels() const { return ceil_div(rows, kPanel); }
};
template <class T> struct Parts {
  Part<T> part[3];
  int64_t panels() const { return part[0].panels() + part[1].panels() + part[2].panels(); }
  // The part that holds a panel, whose index comes out counted within it.
  const Part<T>& holding(int64_t& index) const {
    const Part<T>* p = part;
    while (index >= p->panels()) index -= p++->panels();
    return *p;
  }
};

template <class T, class Out>
void linear(const T* x, int64_t ldx, const Parts<T>& parts, Out* out, int64_t ldo, int64_t m_size, int64_t k_size,
            int num_threads) {
  const auto panel_at = [=](int64_t index) {
    const Part<T>& part = parts.holding(index);
    Panel<T> panel;
    for (int i = 0; i < kPanel; ++i) panel.row[i] = part.weight + min64(index * kPanel + i, part.rows - 1) * k_size;
    panel.next[0] = part.weight + (index + 1) * kPanel * k_size;
    panel.next[1] = panel.next[0] + 2 * k_size;
    return panel;
  };
  const auto epilogue = [=](float(*sums)[kPanel], int64_t row, int rows, int64_t index) {
    const int64_t column = index * kPanel;
    const Part<T>& part = parts.holding(index);
    const int columns = int(min64(kPanel, part.rows - index * kPanel));
    f32x16 shift{};
    for (int i = 0; part.bias && i < kLanes; ++i)
      shift[i] = i % kPanel < columns ? to_float(part.bias[index * kPanel + i % kPanel]) : 0;
    for (int m = 0; m < rows; m += 4) {
      Out rounded[kLanes];
      store16(rounded, load16(sums[m]) + shift);
      for (int i = m; i < min64(m + 4, rows); ++i)
        copy_row(out + (row + i) * ldo + column, rounded + (i - m) * kPanel, columns);
    }
  };
  multiply<T>(x, ldx, m_size, k_size, parts.panels(), num_threads, panel_at, epilogue);
}

enum Activation : int { kSilu = 0, kGeluTanh = 1 };

TANDEM_INLINE f32x16 activate(int activation, f32x16 v) {
  if (activation == kSilu) return v * sigmoid_16(v);
  const f32x16 inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * v * v, v, v);
  return v * sigmoid_16(inner + inner);  // 0.5 (1 + tanh u) = sigmoid(2u)
}

template <class T>
void gated_linear(const T* x, int64_t ldx, const T* gate, const T* up, T* out, int64_t ldo, int64_t m_size,
                  int64_t n_size, int64_t k_size, int activation, int num_threads) {
  constexpr int kPairs = kPanel / 2;  // a panel is two gate rows and the two up rows beside them
  const auto panel_at = [=](int64_t index) {
    Panel<T> panel;
    for (int i = 0; i < kPairs; ++i) {
      const int64_t row = min64(index * kPairs + i, n_size - 1) * k_size;
      panel.row[i] = gate + row, panel.row[kPairs + i] = up + row;
    }
    panel.next[0] = gate + (index + 1) * kPairs * k_size;
    panel.next[1] = up + (index + 1) * kPairs * k_size;
    return panel;
  };
  const auto epilogue = [=](float(*sums)[kPanel], int64_t row, int rows, int64_t index) {
    f32x16 g{}, u{};
    for (int m = 0; m < rows; ++m)
      for (int n = 0; n < kPairs; ++n) g[m * kPairs + n] = sums[m][n], u[m * kPairs + n] = sums[m][kPairs + n];
    T rounded[kLanes];
    store16(rounded, activate(activation, g) * u);
    const int64_t column = index * kPairs;
    const int columns = int(min64(kPairs, n_size - column));
    for (int m = 0; m < rows; ++m)
      for (int n = 0; n < columns; ++n)
        out[(row + m) * ldo + column + n] = rounded[m * kPairs + n];
  };
  multiply<T>(x, ldx, m_size, k_size, ceil_div(n_size, kPairs), num_threads, panel_at, epilogue);
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_linear(const LinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const Parts<T> parts{{{static_cast<const T*>(a->weight), static_cast<const T*>(a->bias), a->n}}};
    const auto into = [&](auto* out) {
      linear(static_cast<const T*>(a->x), a->x_stride, parts, out, a->out_stride, a->m, a->k, int(a->threads));
    };
    if (a->out_dtype == kFloat32) return into(static_cast<float*>(a->out));
    into(static_cast<T*>(a->out));
  });
}

void tandem_joined_linear(const JoinedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    Parts<T> parts{};
    for (int i = 0; i < 3; ++i)
      parts.part[i] = {static_cast<const T*>(a->parts[i].weight), static_cast<const T*>(a->parts[i].bias),
                       a->parts[i].rows};
    linear(static_cast<const T*>(a->x), a->x_stride, parts, static_cast<T*>(a->out), a->out_stride, a->m, a->k,
           int(a->threads));
  });
}

TANDEM_EXPORT void tandem_gated_linear(const GatedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    gated_linear(static_cast<const T*>(a->x), a->x_stride, static_cast<const T*>(a->gate),
                 static_cast<const T*>(a->up), static_cast<T*>(a->out), a->out_stride, a->m, a->n, a->k,
                 int(a->activation), int(a->threads));
  });
}
