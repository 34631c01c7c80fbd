// x @ weight.T straight from row-major weights: dot products along K, nothing packed or copied.
//
// A tile is up to kMaxRows activation rows by a panel of four weight rows. Each output element owns one 16-lane
// accumulator that walks K in order and is folded by one fixed tree, so its bits do not depend on the number of rows or
// on its row. Threads split outputs, never K.
//
// Panels make strips of 16 output columns, strips make groups whose weights stay in L2 while the activations pass, six
// rows at a time, from L1. Meanwhile the next group's weights are asked for: they come from memory once.
#include <type_traits>

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
constexpr int kStrip = kLanes;  // output columns that are rounded and stored together
constexpr int kStripPanels = kStrip / kPanel;
constexpr int64_t kGroupBytes = 96 * 1024;  // weights kept in L2; as many again are on their way
constexpr int64_t kChunkRows = 32 * kMaxRows;  // activation rows of a task
constexpr int64_t kTasksPerThread = 4;
constexpr double kBytesPerNs = 25.0, kFlopsPerNs = 200.0;  // what one thread reads and computes

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
  const T* row[kPanel];  // contiguous, but for a last one that stands in for rows past the end
};

// Asks L2 for `kLines` cache lines at step `k` of a walk over K, in address order. Order is what matters: it keeps DRAM
// pages and the hardware prefetcher happy, where prefetching four rows side by side cost a third of the bandwidth.
template <class T, int kLines> TANDEM_INLINE void prefetch_lines(const T* rows, int64_t k) {
  const char* line = reinterpret_cast<const char*>(rows + k * kLines);
#pragma GCC unroll 4
  for (int i = 0; i < kLines; ++i) __builtin_prefetch(line + i * int64_t(Dot<T>::kStep * sizeof(T)), 0, 2);
}

// sums[m][n] = x row m . panel row n, meanwhile prefetching `kPrefetch` rows' worth of lines from `ahead` on.
template <class T, int kRows, int kPrefetch>
TANDEM_INLINE void tile(const T* x, int64_t ldx, const Panel<T>& panel, const T* ahead, int64_t k_size, float* sums,
                        int64_t ld_sums) {
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
    if (kPrefetch) prefetch_lines<T, kPrefetch>(ahead, k);
    step(k);
  }
  if (k < k_size) step(k, int(k_size - k));
#pragma GCC unroll 8
  for (int m = 0; m < kRows; ++m) fold4(acc[m], sums + m * ld_sums);
}

// The same sums for one or two rows of x, one weight row after the other: the hardware prefetcher then streams memory at
// full speed, and there is too little arithmetic for anything else to matter.
template <class T, int kRows>
TANDEM_INLINE void streaming_tile(const T* x, int64_t ldx, const Panel<T>& panel, int64_t k_size, float* sums,
                                  int64_t ld_sums) {
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
  for (int m = 0; m < kRows; ++m) fold4(acc[m], sums + m * ld_sums);
}

template <class T, int kRows>
void tile_of(const T* x, int64_t ldx, const Panel<T>& panel, const T* ahead, int lines, int64_t k_size, float* sums,
             int64_t ld_sums) {
  switch (lines) {
    case 4: return tile<T, kRows, 4>(x, ldx, panel, ahead, k_size, sums, ld_sums);
    case 2: return tile<T, kRows, 2>(x, ldx, panel, ahead, k_size, sums, ld_sums);
    case 1: return tile<T, kRows, 1>(x, ldx, panel, ahead, k_size, sums, ld_sums);
    default: return tile<T, kRows, 0>(x, ldx, panel, ahead, k_size, sums, ld_sums);
  }
}

template <class T>
void any_tile(int rows, const T* x, int64_t ldx, const Panel<T>& panel, const T* ahead, int lines, int64_t k_size,
              float* sums, int64_t ld_sums) {
  switch (rows) {
    case 1: return tile_of<T, 1>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
#if defined(__AVX512F__)
    case 2: return tile_of<T, 2>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
    case 3: return tile_of<T, 3>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
    case 4: return tile_of<T, 4>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
    case 5: return tile_of<T, 5>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
    default: return tile_of<T, 6>(x, ldx, panel, ahead, lines, k_size, sums, ld_sums);
#endif
  }
}

// One thread's time: weights come from memory once and are multiplied with every row.
template <class T> double cost_ns(int64_t m_size, int64_t n_size, int64_t k_size) {
  const double weights = double(n_size) * double(k_size);
  return weights * double(sizeof(T)) / kBytesPerNs + 2.0 * weights * double(m_size) / kFlopsPerNs;
}

// What is multiplied with the rows of x. `Source::kPanels` panels make a strip; `panel(strip, i)` names the weight rows
// of one, `store(sums, row, rows, strip)` gets the sums [rows][kPanels * kPanel] of rows of x from `row` on.
template <class T, class Source> class Product {
 public:
  Product(const T* x, int64_t ldx, int64_t m_size, int64_t k_size, int64_t strips, const Source& source)
      : x_(x), ldx_(ldx), m_size_(m_size), k_size_(k_size), strips_(strips), source_(source) {}

  void run(int num_threads) {
    chunks_ = ceil_div(m_size_, kChunkRows);
    const int64_t fitting = kGroupBytes / max64(1, kColumns * k_size_ * int64_t(sizeof(T)));
    const int64_t even = ceil_div(strips_, kTasksPerThread * num_threads);
    group_ = m_size_ <= kMaxRows ? 1 : max64(1, min64(fitting, even));
    const int64_t tasks = ceil_div(strips_, group_) * chunks_;
    const double cost = cost_ns<T>(m_size_, strips_ * kColumns, k_size_);
    Pool::run(tasks, split(tasks, cost, num_threads), [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) group_times_chunk(task / chunks_ * group_, task % chunks_);
    });
  }

 private:
  static constexpr int kColumns = Source::kPanels * kPanel;

  void group_times_chunk(int64_t strip, int64_t chunk) const {
    const int64_t first_row = m_size_ * chunk / chunks_, rows = m_size_ * (chunk + 1) / chunks_ - first_row;
    const int64_t tiles = ceil_div(rows, kMaxRows), end = min64(strip + group_, strips_);
    const int lines = chunk + 1 < chunks_ ? 0 : tiles == 1 ? 4 : tiles < 4 ? 2 : 1;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles;
      const int count = int(rows * (t + 1) / tiles - begin), prefetched = int(min64(t * lines, kPanel));
      for (int64_t s = strip; s < end; ++s)
        strip_times_tile(s, first_row + begin, count, prefetched, min64(lines, kPanel - prefetched));
    }
  }

  // `lines` of the next group's weights are asked for at each step, where `prefetched` rows of a panel already were.
  void strip_times_tile(int64_t strip, int64_t row, int count, int prefetched, int64_t lines) const {
    alignas(64) float sums[kMaxRows][kColumns];
    const T* x = x_ + row * ldx_;
    const bool streams = m_size_ <= 2;
    const int64_t next = min64(strip + group_, strips_ - 1);
    for (int i = 0; i < Source::kPanels; ++i) {
      const Panel<T> panel = source_.panel(strip, i);
      if (streams && count == 1) {
        streaming_tile<T, 1>(x, ldx_, panel, k_size_, sums[0] + i * kPanel, kColumns);
      } else if (streams && kMaxRows > 1) {
        streaming_tile<T, 2>(x, ldx_, panel, k_size_, sums[0] + i * kPanel, kColumns);
      } else {
        const T* ahead = lines ? source_.panel(next, i).row[0] + prefetched * k_size_ : nullptr;
        any_tile<T>(count, x, ldx_, panel, ahead, int(lines), k_size_, sums[0] + i * kPanel, kColumns);
      }
    }
    source_.store(sums, row, count, strip);
  }

  const T* x_;
  int64_t ldx_, m_size_, k_size_, strips_;
  const Source& source_;
  int64_t chunks_ = 1, group_ = 1;
};

// Weights whose products lie side by side in the output. All parts but the last have whole panels.
template <class T> struct Part {
  const T *weight, *bias;
  int64_t rows;
  int64_t panels() const { return ceil_div(rows, kPanel); }
};

template <class T, class Out> struct Linear {
  static constexpr int kPanels = kStripPanels;
  Part<T> part[3];
  Out* out;
  int64_t ldo, k_size;

  int64_t columns() const { return part[0].rows + part[1].rows + part[2].rows; }
  int64_t strips() const { return ceil_div(columns(), kStrip); }

  // The part that holds a panel, whose index comes out counted within it; past the end it is the last one's last.
  const Part<T>& holding(int64_t& index) const {
    const Part<T>* p = part;
    while (index >= p->panels() && p < part + 2 && p[1].rows) index -= p++->panels();
    return *p;
  }

  Panel<T> panel(int64_t strip, int i) const {
    int64_t index = strip * kPanels + i;
    const Part<T>& p = holding(index);
    Panel<T> panel;
    for (int n = 0; n < kPanel; ++n) panel.row[n] = p.weight + min64(index * kPanel + n, p.rows - 1) * k_size;
    return panel;
  }

  f32x16 bias(int64_t strip) const {
    f32x16 shift{};
    for (int i = 0; i < kPanels; ++i) {
      int64_t index = strip * kPanels + i;
      const Part<T>& p = holding(index);
      for (int n = 0; p.bias && n < kPanel; ++n)
        shift[i * kPanel + n] = to_float(p.bias[min64(index * kPanel + n, p.rows - 1)]);
    }
    return shift;
  }

  void store(const float (*sums)[kStrip], int64_t row, int rows, int64_t strip) const {
    const f32x16 shift = part[0].bias || part[1].bias || part[2].bias ? bias(strip) : f32x16{};
    const int count = int(min64(kStrip, columns() - strip * kStrip));
    for (int m = 0; m < rows; ++m)
      store16(out + (row + m) * ldo + strip * kStrip, load16(sums[m]) + shift, count);
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    Product<T, Linear>(x, ldx, m_size, k_size, strips(), *this).run(num_threads);
  }
};

enum Activation : int { kSilu = 0, kGeluTanh = 1 };

TANDEM_INLINE f32x16 activate(int activation, f32x16 v) {
  if (activation == kSilu) return v * sigmoid_16(v);
  const f32x16 inner = splat(0.7978845608028654f) * fma(splat(0.044715f) * v * v, v, v);
  return v * sigmoid_16(inner + inner);  // 0.5 (1 + tanh u) = sigmoid(2u)
}

// A strip is 16 gate rows and the 16 up rows beside them.
template <class T> struct GatedLinear {
  static constexpr int kPanels = 2 * kStripPanels;
  const T *gate, *up;
  T* out;
  int64_t ldo, n_size, k_size;
  int activation;

  Panel<T> panel(int64_t strip, int i) const {
    const T* weight = i < kStripPanels ? gate : up;
    const int64_t first = strip * kStrip + i % kStripPanels * kPanel;
    Panel<T> panel;
    for (int n = 0; n < kPanel; ++n) panel.row[n] = weight + min64(first + n, n_size - 1) * k_size;
    return panel;
  }

  void store(const float (*sums)[2 * kStrip], int64_t row, int rows, int64_t strip) const {
    const int count = int(min64(kStrip, n_size - strip * kStrip));
    for (int m = 0; m < rows; ++m)
      store16(out + (row + m) * ldo + strip * kStrip,
              activate(activation, load16(sums[m])) * load16(sums[m] + kStrip), count);
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    Product<T, GatedLinear>(x, ldx, m_size, k_size, ceil_div(n_size, kStrip), *this).run(num_threads);
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
      const Linear<T, Out> linear{{whole}, out, a->out_stride, a->k};
      linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
    };
    if (a->out_dtype == kFloat32) return into(static_cast<float*>(a->out));
    into(static_cast<T*>(a->out));
  });
}

void tandem_joined_linear(const JoinedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    Linear<T, T> linear{{}, static_cast<T*>(a->out), a->out_stride, a->k};
    for (int i = 0; i < 3; ++i)
      linear.part[i] = {static_cast<const T*>(a->parts[i].weight), static_cast<const T*>(a->parts[i].bias),
                        a->parts[i].rows};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}

TANDEM_EXPORT void tandem_gated_linear(const GatedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const GatedLinear<T> linear{static_cast<const T*>(a->gate), static_cast<const T*>(a->up), static_cast<T*>(a->out),
                                a->out_stride, a->n, a->k, int(a->activation)};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}
