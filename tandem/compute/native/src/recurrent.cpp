// Linear recurrences with a state per head, token by token: decay, removal of the key's old value, an added outer
// product of two vectors, a product with the query.
//
// One head of one request is computed by one thread, token after token in one order, so no bit of a token or of a state
// depends on how a prompt is divided, on other requests or on the number of threads.
#include <cmath>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kTogether = 4;       // rows of a state that are carried on side by side
constexpr double kStateNs = 0.15;  // one thread's time for one number of a state and one token
constexpr double kDecayNs = 5.0;   // the same where each number has a decay of its own
constexpr float kMostDecay = 1e4f;  // an infinite one would make 0 * inf of what it multiplies

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// `size` numbers into a row that is padded with zeros to whole vectors.
inline void fill_row(const float* from, int64_t size, int64_t padded, float* row) {
  std::memcpy(row, from, size_t(size) * sizeof(float));
  std::memset(row + size, 0, size_t(padded - size) * sizeof(float));
}

// The state of one head of one request, its rows padded to whole vectors.
class Head {
 public:
  Head(const RecurArguments& arguments, int64_t head, float* scratch)
      : a_(arguments),
        head_(head),
        group_(head / (arguments.num_heads / arguments.num_groups)),
        padded_(ceil_div(arguments.columns, kLanes) * kLanes),
        q_(scratch),
        k_(q_ + padded_),
        decay_(k_ + padded_),
        rates_(decay_ + padded_),
        state_(rates_ + padded_),
        rate_(arguments.has_rates ? 0.0f : std::exp(arguments.a_log[head])) {
    for (int64_t i = 0; i < (a_.has_rates ? a_.columns : 0); ++i) rates_[i] = std::exp(a_.a_log[head * a_.columns + i]);
  }

  static size_t scratch_size(const RecurArguments& a) {
    return size_t((a.rows + 4) * ceil_div(a.columns, kLanes) * kLanes);
  }

  void clear() { std::memset(state_, 0, size_t(a_.rows * padded_) * sizeof(float)); }
  // `pages` are those of a block.
  void read(const int64_t* pages) {
    const float* from = at(pages);
    for (int64_t row = 0; row < a_.rows; ++row) fill_row(from + row * a_.columns, a_.columns, padded_, state_ + row * padded_);
  }
  void write(const int64_t* pages) const {
    float* to = at(pages);
    for (int64_t row = 0; row < a_.rows; ++row)
      std::memcpy(to + row * a_.columns, state_ + row * padded_, size_t(a_.columns) * sizeof(float));
  }

  void take(int64_t token) {
    const int64_t keys = (token * a_.num_groups + group_) * a_.columns, at_head = token * a_.num_heads + head_;
    fill_row(a_.q + keys, a_.columns, padded_, q_);
    fill_row(a_.k + keys, a_.columns, padded_, k_);
    float step = 0.0f;
    if (a_.has_columns) {
      for (int64_t i = 0; i < a_.columns; ++i)
        decay_[i] = decay_of(rate_, softplus(a_.a[at_head * a_.columns + i] + a_.a_bias[head_ * a_.columns + i]));
      for (int64_t i = a_.columns; i < padded_; ++i) decay_[i] = 0.0f;
    } else if (a_.has_rates) {
      step = softplus(a_.a[at_head] + a_.a_bias[head_]);
      for (int64_t i = 0; i < a_.columns; ++i) decay_[i] = decay_of(rates_[i], step);
      for (int64_t i = a_.columns; i < padded_; ++i) decay_[i] = 0.0f;
    } else {
      step = softplus(a_.a[at_head] + a_.a_bias[head_]);
      const f32x16 decay = splat(decay_of(rate_, step));
      for (int64_t i = 0; i < padded_; i += kLanes) store16(decay_ + i, decay);
    }
    const float* v = a_.v + at_head * a_.rows;
    float* out = a_.out + at_head * a_.rows;
    const float beta = a_.b ? sigmoid(a_.b[at_head]) : step;
    if (a_.b) {
      all_rows<true>(v, beta, out);
    } else {
      all_rows<false>(v, beta, out);
    }
  }

 private:
  float* at(const int64_t* pages) const {
    const int64_t number = a_.first_head + head_, page = pages[number / a_.heads_per_page];
    return a_.matrices + page * a_.page_stride + number % a_.heads_per_page * a_.rows * a_.columns;
  }
  static float decay_of(float rate, float step) {
    const float log_decay = -rate * step;
    return std::exp(log_decay < -kMostDecay ? -kMostDecay : log_decay);
  }

  template <bool HasDelta>
  void all_rows(const float* v, float beta, float* out) {
    int64_t row = 0;
    for (; row + kTogether <= a_.rows; row += kTogether) rows<kTogether, HasDelta>(row, v, beta, out);
    for (; row < a_.rows; ++row) rows<1, HasDelta>(row, v, beta, out);
  }

  // `Count` rows from `first` on, each as if alone: together they load keys, queries and decays once.
  template <int Count, bool HasDelta>
  void rows(int64_t first, const float* v, float beta, float* out) {
    float* state = state_ + first * padded_;
    f32x16 value[Count], sum[Count]{};
    if constexpr (HasDelta) {
      f32x16 stood[Count]{};
      for (int64_t i = 0; i < padded_; i += kLanes) {
        const f32x16 decay = load16(decay_ + i), key = load16(k_ + i);
        for (int row = 0; row < Count; ++row) {
          const f32x16 decayed = load16(state + row * padded_ + i) * decay;
          store16(state + row * padded_ + i, decayed);
          stood[row] = fma(decayed, key, stood[row]);
        }
      }
      for (int row = 0; row < Count; ++row) value[row] = splat(beta * (v[first + row] - reduce_add(stood[row])));
    } else {
      for (int row = 0; row < Count; ++row) value[row] = splat(v[first + row] * beta);
    }
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const f32x16 decay = load16(decay_ + i), key = load16(k_ + i), query = load16(q_ + i);
      for (int row = 0; row < Count; ++row) {
        const f32x16 before = load16(state + row * padded_ + i);
        const f32x16 after = fma(value[row], key, HasDelta ? before : before * decay);
        store16(state + row * padded_ + i, after);
        sum[row] = fma(after, query, sum[row]);
      }
    }
    for (int row = 0; row < Count; ++row) out[first + row] = reduce_add(sum[row]);
  }

  const RecurArguments& a_;
  const int64_t head_, group_, padded_;
  float *const q_, *const k_, *const decay_, *const rates_, *const state_;
  const float rate_;
};

void recur(const RecurArguments& a, int64_t request, int64_t index, float* scratch) {
  Head head(a, index, scratch);
  if (a.is_first[request]) {
    head.clear();
  } else {
    head.read(a.read_pages + request * a.num_pages);
  }
  int64_t token = a.query_start[request];
  for (int64_t write = a.first_write[request]; write < a.first_write[request + 1]; ++write) {
    for (; token < a.write_ends[write]; ++token) head.take(token);
    head.write(a.write_pages + write * a.num_pages);
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_recur(const RecurArguments* a) {
  const int64_t items = a->num_requests * a->num_heads;
  const double numbers = double(a->query_start[a->num_requests]) * double(a->num_heads * a->rows * a->columns);
  Pool::run(items, split(items, numbers * (a->has_rates ? kDecayNs : kStateNs), a->threads), [a](int64_t first, int64_t last) {
    static thread_local Workspace workspace;
    float* scratch = workspace.reserve(Head::scratch_size(*a));
    for (int64_t item = first; item < last; ++item) recur(*a, item / a->num_heads, item % a->num_heads, scratch);
  });
}
