// x @ weight.T: threads divide outputs and rows, never K (`tiles.h`).
#include "calls.h"
#include "gating.h"
#include "pool.h"
#include "tiles.h"

namespace tandem {
namespace {

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
  Product(int64_t k_size, int64_t sum_blocks, bool is_packed, const Source& source, int num_threads)
      : k_size_(k_size), sum_blocks_(sum_blocks), is_packed_(is_packed), source_(source), num_threads_(num_threads) {}

  // Units are where elements lie, or copied: then a chunk for each thread at a time, for a copy that stays small.
  void run(const T* x, int64_t stride, int64_t count) const {
    if (!kIsWidened<T> && k_size_ % kElements == 0 && stride % kElements == 0)
      return multiply({reinterpret_cast<const X*>(x), stride / kElements, 0, count, kChunkRows});
    const int64_t in_chunk = chunk_rows<T>(k_size_, is_packed_);
    const int64_t parts = ceil_div(count, in_chunk * (num_threads_ + Pool::lent()));
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = count * i / parts, last = count * (i + 1) / parts;
      multiply(copy(x + first * stride, stride, {nullptr, 0, first, last - first, in_chunk}));
    }
  }

 private:
  struct Rows {
    const X* x;
    int64_t stride, first, count, in_chunk;  // `first` in the whole product
    int64_t chunks() const { return ceil_div(count, in_chunk); }
  };

  Rows copy(const T* x, int64_t stride, Rows rows) const {
    rows.stride = copied_units<T>(k_size_);
    X* const out = reinterpret_cast<X*>(copied_rows(rows.count * rows.stride * kFloats));
    const double cost = double(rows.count * k_size_) * (sizeof(T) + sizeof(float)) / kBytesPerNs;
    const int64_t tiles = num_tiles(rows.count);
    Pool::run(tiles, split(tiles, cost, num_threads_), [=](int64_t tile, int64_t last) {
      for (; tile < last; ++tile) {
        const int64_t row = first_row(tile, rows.count);
        copy_tile<T>([=](int m) { return x + (row + m) * stride; }, int(first_row(tile + 1, rows.count) - row),
                     k_size_, out + row * rows.stride, rows.stride);
      }
    });
    rows.x = out;
    return rows;
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
    const int64_t tiles = num_tiles(rows.count), chunks = rows.chunks();
    Strip<T> strips[kPanelStrips], next[kPanelStrips];
    const bool has_next = is_next_another && index + 1 < source_.panels();
    source_.panel(index, strips);
    source_.panel(has_next ? index + 1 : index, next);
    const TiledRows<T> tiled{rows.x, rows.stride, rows.count, tiles * chunk / chunks, tiles * (chunk + 1) / chunks};
    multiply_panel(strips, tiled, k_size_, sum_blocks_, is_packed_, has_next ? Ahead(next, k_size_) : Ahead(),
                   [&](const f32x16 (*sums)[kPanelStrips], int64_t row, int count) {
      source_.store(sums, rows.first + row, count, strips);
    });
  }

  int64_t k_size_, sum_blocks_;
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
  int64_t ldo, k_size, sum_blocks;
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
    Product<T, Linear>(k_size, sum_blocks, is_packed, *this, num_threads).run(x, ldx, m_size);
  }
};

// A panel is a strip of gate rows and the up rows beside them.
template <class T> struct GatedLinear {
  const T *gate, *up, *gate_bias, *up_bias;
  T* out;
  int64_t ldo, n_size, k_size;
  bool is_packed;
  Gating gating;

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
      store16(out + (row + m) * ldo + strips->column, gating(sums[m][0] + gate_shift, sums[m][1] + up_shift),
              strips->rows);
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    Product<T, GatedLinear>(k_size, 1, is_packed, *this, num_threads).run(x, ldx, m_size);
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
      const Linear<T, Out> linear{{whole}, out, a->out_stride, a->k, a->sum_blocks, a->is_packed != 0};
      linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
    };
    if (a->out_dtype == kFloat32) return into(static_cast<float*>(a->out));
    into(static_cast<T*>(a->out));
  });
}

// Threads divide heads.
TANDEM_EXPORT void tandem_linear_by_head(const LinearByHeadArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const double cost = double(a->heads) * cost_ns<T>(a->m, a->n, a->k);
    Pool::run(a->heads, split(a->heads, cost, int(a->threads)), [a](int64_t head, int64_t last) {
      for (; head < last; ++head) {
        const Part<T> part{static_cast<const T*>(a->weight) + head * a->n * a->k, nullptr, a->n};
        T* const out = static_cast<T*>(a->out) + head * a->n;
        Linear<T, T>{{part}, out, a->out_stride, a->k, 1, a->is_packed != 0}.run(
            static_cast<const T*>(a->x) + head * a->x_head_stride, a->x_stride, a->m, 1);
      }
    });
  });
}

void tandem_joined_linear(const JoinedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    Linear<T, T> linear{{}, static_cast<T*>(a->out), a->out_stride, a->k, 1, a->is_packed != 0};
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
                                Gating{int(a->activation)}};
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
