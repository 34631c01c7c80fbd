// Products of rows with quantised weights: rows are prepared once, then threads divide outputs and rows, never K.
#pragma once
#include "integer_tiles.h"

namespace tandem {

constexpr double kNsPerCode = 0.03;  // that one thread takes to decode it

// Rows of x as a product of codes reads them: where they are, or a copy that is permuted, widened or filled up.
template <class T> class PreparedRows {
  using P = Multiplied<T>;
  using X = typename Unit<P>::Type;
  static constexpr int kElements = Unit<P>::kElements;

 public:
  PreparedRows(const CodedShape& shape, bool has_offsets, int num_threads)
      : shape_(shape), has_offsets_(has_offsets), num_threads_(num_threads) {}

  // row(i): row i of x, a `RowOf`. They are valid until the calling thread asks for others.
  template <class Row> CodedRows<P> gathered(const Row& row, int64_t count) const { return prepared(row, count, true); }

  // Rows of x, `stride` apart.
  CodedRows<P> placed(const T* x, int64_t stride, const int64_t* permutation, int64_t count) const {
    const auto row = [=](int64_t i) { return RowOf<T>{x + i * stride, permutation}; };
    if (permutation || !are_there(stride)) return gathered(row, count);
    CodedRows<P> rows = prepared(row, count, false);
    rows.x = reinterpret_cast<const X*>(x);
    rows.stride = stride / kElements;
    return rows;
  }

 private:
  template <class Row> CodedRows<P> prepared(const Row& row, int64_t count, bool is_copied) const {
    thread_local Workspace copies, sums;
    const int64_t width = shape_.steps() * kStepInputs;
    X* const out = is_copied ? reinterpret_cast<X*>(copies.reserve(size_t(count * width / kElements))) : nullptr;
    float* const segment_sums = has_offsets_ ? sums.reserve(size_t(count * shape_.segments())) : nullptr;
    const double cost = double(count * shape_.k) * double(is_copied + has_offsets_) * (sizeof(T) + sizeof(X)) / kBytesPerNs;
    if (is_copied || has_offsets_) Pool::run(count, split(count, cost, num_threads_), [=](int64_t i, int64_t last) {
      for (; i < last; ++i) {
        const T* const x = in_order(row(i), shape_.k);
        if (out) copy(x, out + i * width / kElements);
        if (segment_sums) add(x, segment_sums + i * shape_.segments());
      }
    });
    return {out, width / kElements, count, segment_sums};
  }

  // Whether rows of that stride, in their own order, can be read where they are.
  bool are_there(int64_t stride) const {
    return !kIsWidened<T> && std::is_same<T, P>::value && shape_.k % kStepInputs == 0 && stride % kElements == 0;
  }

  void copy(const T* x, X* out) const {
    P* const to = reinterpret_cast<P*>(out);
    for (int64_t i = 0; i < shape_.steps() * kStepInputs; i += kLanes) {
      const int room = int(min64(kLanes, shape_.steps() * kStepInputs - i));
      const int64_t left = min64(room, shape_.k - i);
      store16(to + i, load16(x + i, int(left)), room);
    }
  }

  void add(const T* x, float* sums) const {
    for (int64_t i = 0; i < shape_.segments(); ++i) {
      const int64_t end = min64((i + 1) * shape_.segment, shape_.k);
      f32x16 lanes{};
      for (int64_t at = i * shape_.segment; at < end; at += kLanes) lanes += load16(x + at, int(min64(kLanes, end - at)));
      sums[i] = reduce_add(lanes);
    }
  }

  const CodedShape shape_;
  const bool has_offsets_;
  const int num_threads_;
};

// The time of one thread.
inline double coded_cost_ns(int64_t kind, int64_t m_size, int64_t n_size, int64_t k_size) {
  const double codes = double(n_size) * double(k_size), bytes = kind == kTable4 ? 0.5 : 1.0;
  return codes * (bytes / kBytesPerNs + kNsPerCode + 2.0 * double(m_size) / kFlopsPerNs);
}

// `Source`: panels() of two strips; panel(i, codes, strips) names them, store(sums, row, rows, strips) gets the sums of
// rows of x from `row` on.
template <class T, class Source> class CodedProduct {
 public:
  CodedProduct(const CodedWeights& first, bool has_offsets, const Source& source, int num_threads)
      : first_(first), shape_{first.k, segment_of(first)}, source_(source), has_offsets_(has_offsets),
        num_threads_(num_threads) {}

  void run(const T* x, int64_t stride, int64_t count) const {
    if (first_.rounds_rows) return run(RowRounding<T>(first_, shape_, has_offsets_, num_threads_), x, stride, count);
    run(PreparedRows<T>(shape_, has_offsets_, num_threads_), x, stride, count);
  }

 private:
  template <class Prepared> void run(const Prepared& prepared, const T* x, int64_t stride, int64_t count) const {
    const int64_t most = kChunkRows * (num_threads_ + Pool::lent());  // a chunk for each thread, for copies that stay small
    const int64_t parts = ceil_div(count, most);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = count * i / parts, last = count * (i + 1) / parts;
      multiply(prepared.placed(x + first * stride, stride, first_.permutation, last - first), first);
    }
  }

  // A panel stays in L2 while all rows of a chunk pass.
  template <class Rows> void multiply(const Rows& rows, int64_t first) const {
    const int64_t panels = source_.panels(), chunks = ceil_div(rows.count, kChunkRows), tasks = panels * chunks;
    const double cost = coded_cost_ns(first_.kind, rows.count, panels * kPanelStrips * kStrip, first_.k);
    Pool::run(tasks, split(tasks, cost, num_threads_), [&](int64_t task, int64_t last) {
      for (int64_t end; task < last; task = end) {  // chunks of a panel side by side: it is decoded once for them
        const int64_t index = task / chunks, chunk = task % chunks;
        end = min64(last, (index + 1) * chunks);
        const int64_t row = rows.count * chunk / chunks, count = rows.count * (chunk + end - task) / chunks - row;
        CodedStrip codes[kPanelStrips], next[kPanelStrips];
        Strip<T> strips[kPanelStrips];
        source_.panel(index, codes, strips);
        const bool has_next = end % chunks == 0 && index + 1 < panels;
        if (has_next) source_.panel(index + 1, next, nullptr);
        multiply_coded_panel(codes, rows.part(row, count, shape_), shape_, has_next ? codes_ahead(next) : Ahead(),
                             [&](const f32x16 (*sums)[kPanelStrips], int64_t at, int size) {
          source_.store(sums, first + row + at, size, strips);
        });
      }
    });
  }

  const CodedWeights& first_;
  const CodedShape shape_;
  const Source& source_;
  const bool has_offsets_;
  const int num_threads_;
};

}  // namespace tandem
