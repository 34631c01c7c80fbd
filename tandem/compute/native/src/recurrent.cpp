// Linear recurrences with a state per head, token by token: decay, removal of the key's old value, an added outer
// product of two vectors, a product with the query.
//
// One head of one request is computed by one thread, token after token in one order, so no bit of a token or of a state
// depends on how a prompt is divided, on other requests or on the number of threads.
#include <algorithm>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kTogether = 4;       // rows of a state that are carried on side by side
constexpr double kStateNs = 0.15;  // one thread's time for one number of a state and one token
constexpr double kDecayNs = 1.0;   // the same where each number has a decay of its own

// What a token brings to all rows of a head's state. `decay` is that of all columns, unless each has its own: `decays`.
struct Token {
  const float *q, *k, *decays, *v;
  float decay, beta;
  float* out;
};

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
        of_tokens_(scratch),
        rates_(of_tokens_ + 3 * kLanes * padded_),
        state_(rates_ + padded_),
        rate_(arguments.has_rates ? f32x16{} : accurate_exp_16(splat(arguments.a_log[head]))) {
    if (a_.has_rates)
      by_columns([&](int64_t i, int count) {
        store16(rates_ + i, accurate_exp_16(load16(a_.a_log + head_ * a_.columns + i, count)));
      });
  }

  static size_t scratch_size(const RecurArguments& a) {
    return size_t((a.rows + 1 + 3 * kLanes) * ceil_div(a.columns, kLanes) * kLanes);
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

  // Tokens `first` to `end - 1`, as many at a time as a vector has lanes: meanwhile a few rows stay in the first cache.
  void take(int64_t first, int64_t end) {
    for (; first < end; first += kLanes) {
      Token tokens[kLanes];
      const int count = int(min64(kLanes, end - first));
      prepare(first, count, tokens);
      const bool has_columns = a_.has_columns || a_.has_rates;
      if (a_.b) {
        has_columns ? all_rows<true, true>(tokens, count) : all_rows<true, false>(tokens, count);
      } else {
        has_columns ? all_rows<false, true>(tokens, count) : all_rows<false, false>(tokens, count);
      }
    }
  }

 private:
  float* at(const int64_t* pages) const {
    const int64_t number = a_.first_head + head_, page = pages[number / a_.heads_per_page];
    return a_.matrices + page * a_.page_stride + number % a_.heads_per_page * a_.rows * a_.columns;
  }
  template <class Body> void by_columns(const Body& body) const {
    for (int64_t i = 0; i < a_.columns; i += kLanes) body(i, int(min64(kLanes, a_.columns - i)));
  }
  // The row itself if its columns are whole vectors, else padded in `room`.
  const float* whole_vectors(const float* row, float* room) const {
    if (padded_ == a_.columns) return row;
    fill_row(row, a_.columns, padded_, room);
    return room;
  }
  static f32x16 decay_of(f32x16 rate, f32x16 step) { return accurate_exp_16(-(rate * step)); }

  // NOTE: numbers of a token each are computed in a lane each, and every lane takes the same way, so where a token
  // stands changes no bit.
  void prepare(int64_t first, int count, Token* tokens) const {
    alignas(64) float a[kLanes]{}, b[kLanes]{};
    for (int lane = 0; lane < count; ++lane) {
      const int64_t at_head = (first + lane) * a_.num_heads + head_;
      if (!a_.has_columns) a[lane] = a_.a[at_head] + a_.a_bias[head_];
      if (a_.b) b[lane] = a_.b[at_head];
    }
    const f32x16 step = softplus_16(load16(a)), decay = decay_of(rate_, step);
    const f32x16 beta = a_.b ? splat(1.0f) / (splat(1.0f) + accurate_exp_16(-load16(b))) : step;
    for (int lane = 0; lane < count; ++lane) {
      const int64_t token = first + lane, at_head = token * a_.num_heads + head_;
      const int64_t keys = (token * a_.num_groups + group_) * a_.columns;
      float *const room = of_tokens_ + 3 * lane * padded_, *const decays = room + 2 * padded_;
      const float *const q = whole_vectors(a_.q + keys, room), *const k = whole_vectors(a_.k + keys, room + padded_);
      if (a_.has_columns) {
        by_columns([&](int64_t i, int some) {
          const f32x16 of_token = load16(a_.a + at_head * a_.columns + i, some);
          const f32x16 bias = load16(a_.a_bias + head_ * a_.columns + i, some);
          store16(decays + i, decay_of(rate_, softplus_16(of_token + bias)));
        });
      } else if (a_.has_rates) {
        by_columns([&](int64_t i, int) { store16(decays + i, decay_of(load16(rates_ + i), splat(step[lane]))); });
      }
      tokens[lane] = {q, k, decays, a_.v + at_head * a_.rows, decay[lane], beta[lane], a_.out + at_head * a_.rows};
    }
  }

  template <bool HasDelta, bool HasColumns> void all_rows(const Token* tokens, int count) {
    int64_t row = 0;
    for (; row + kTogether <= a_.rows; row += kTogether)
      for (int i = 0; i < count; ++i) take_token<kTogether, HasDelta, HasColumns>(row, tokens[i]);
    for (; row < a_.rows; ++row)
      for (int i = 0; i < count; ++i) take_token<1, HasDelta, HasColumns>(row, tokens[i]);
  }

  // `Count` rows from `first` on, each as if alone: together they load keys, queries and decays once.
  template <int Count, bool HasDelta, bool HasColumns> void take_token(int64_t first, const Token& token) {
    float* state = state_ + first * padded_;
    const f32x16 of_all = splat(token.decay);
    f32x16 value[Count], sum[Count]{};
    if constexpr (HasDelta) {
      f32x16 stood[Count]{};
      for (int64_t i = 0; i < padded_; i += kLanes) {
        const f32x16 decay = HasColumns ? load16(token.decays + i) : of_all, key = load16(token.k + i);
        for (int row = 0; row < Count; ++row) {
          const f32x16 decayed = load16(state + row * padded_ + i) * decay;
          store16(state + row * padded_ + i, decayed);
          stood[row] = fma(decayed, key, stood[row]);
        }
      }
      for (int row = 0; row < Count; ++row)
        value[row] = splat(token.beta * (token.v[first + row] - reduce_add(stood[row])));
    } else {
      for (int row = 0; row < Count; ++row) value[row] = splat(token.v[first + row] * token.beta);
    }
    for (int64_t i = 0; i < padded_; i += kLanes) {
      const f32x16 decay = HasColumns ? load16(token.decays + i) : of_all;
      const f32x16 key = load16(token.k + i), query = load16(token.q + i);
      for (int row = 0; row < Count; ++row) {
        const f32x16 before = load16(state + row * padded_ + i);
        const f32x16 after = fma(value[row], key, HasDelta ? before : before * decay);
        store16(state + row * padded_ + i, after);
        sum[row] = fma(after, query, sum[row]);
      }
    }
    for (int row = 0; row < Count; ++row) token.out[first + row] = reduce_add(sum[row]);
  }

  const RecurArguments& a_;
  const int64_t head_, group_, padded_;
  float *const of_tokens_, *const rates_, *const state_;
  const f32x16 rate_;
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
    head.take(token, a.write_ends[write]);
    token = a.write_ends[write];
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
