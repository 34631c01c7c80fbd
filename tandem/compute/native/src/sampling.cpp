// Sampling of tokens: greedy, or temperature, top-k, top-p, min-p and one draw, each row by one thread in one order.
//
// A draw walks all tokens by token id. With top-p it is repeated while it hits a token that top-p excludes: one before
// which tokens, by descending logit with ties by token id, hold probability p or more. After some tries, and for top-k,
// it walks that order instead. Rows are not sorted for it: logits are counted into buckets, the bucket in which the sum
// reaches its target is counted into finer ones, and once few tokens are left, those are sorted. Sums are in double.
#include <cfloat>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"

namespace tandem {
namespace {

constexpr double kScanNs = 0.4, kDrawNs = 2.0, kWalkNs = 8.0;  // one thread's time per element
constexpr int64_t kBlock = 128;  // elements behind one maximum
constexpr int kTries = 4;  // as in tandem.engine.sampler
constexpr int kBuckets = 256;
constexpr int64_t kFew = 512;      // candidates that are put in order without counting them into finer buckets
constexpr float kBucketed = 12.0f;  // in temperatures below the peak; what is further down is the last bucket
constexpr float kNoWeight = 105.0f;  // likewise: e^-105 is 0 in float
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TANDEM_INLINE f32x16 where(i32x16 mask, f32x16 v) { return float_of(bits_of(v) & mask); }
template <class Body> TANDEM_INLINE void for_each_set(i32x16 mask, const Body& body) {
  for (uint32_t bits = bits_set(mask); bits != 0; bits &= bits - 1) body(__builtin_ctz(bits));
}
template <class Vector> TANDEM_INLINE double sum_of(const Vector& v) {
  double sum = 0.0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// As in tandem.core.randomness.
double following(double number) {
  uint64_t mixed = uint64_t(number * 0x1p53) + 0x9E3779B97F4A7C15;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return double((mixed ^ (mixed >> 31)) >> 11) * 0x1p-53;
}

struct Options {  // of one row, as they are packed
  const float* logits;
  int64_t top_k;  // 0 = off
  double temperature, top_p, min_p, uniform;  // temperature 0 = greedy
  double ns_per_element() const { return temperature == 0.0 ? kScanNs : top_k > 0 ? kWalkNs : kDrawNs; }
};

struct Candidate {
  float logit;
  int32_t token_id;
  bool precedes(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && token_id < other.token_id);
  }
};
inline bool first_of(const Candidate& a, const Candidate& b) { return a.precedes(b); }

struct Mass {
  double weight = 0.0;
  int64_t count = 0;
  Mass operator+(const Mass& other) const { return {weight + other.weight, count + other.count}; }
};

// The logits in [low, high), and what lies above them.
struct Bracket {
  float low, high;
  Mass above, within;
};

// A bracket's logits by their distance from its upper end.
struct Buckets {
  Bracket whole;
  Mass mass[kBuckets] = {};
  float lowest[kBuckets] = {};

  Mass total() const {
    Mass sum = whole.above;
    for (const Mass& each : mass) sum = sum + each;
    return sum;
  }

  // The bucket where the sum from above is first `reached`; the last that is not empty if it never is.
  template <class Reached> Bracket find(const Reached& reached) const {
    Bracket found = whole;
    Mass sum = whole.above;
    float high = whole.high;
    for (int i = 0; i < kBuckets; ++i) {
      if (mass[i].count == 0) continue;
      found = {lowest[i], high, sum, mass[i]};
      sum = sum + mass[i];
      if (reached(sum)) break;
      high = lowest[i];
    }
    return found;
  }
};

class Row {
 public:
  Row(const float* logits, int64_t size) : logits_(logits), size_(size), maxima_(size_t(ceil_div(size, kBlock))) {}

  // Finds the maxima. The peak of a row with a NaN is NaN.
  float scan() {
    i32x16 broken{};
    peak_ = -kInfinity;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      f32x16 best = splat(-kInfinity);
      for_each(block, [&](int64_t, f32x16 v) {
        broken |= v != v;
        best = vmax(best, v);
      });
      maxima_[block] = reduce_max(best);
      peak_ = std::max(peak_, maxima_[block]);
    }
    return bits_set(broken) != 0 ? std::numeric_limits<float>::quiet_NaN() : peak_;
  }

  int64_t draw(const Options& options) {
    if (options.temperature == 0.0) return first_peak();
    temperature_ = std::max(float(options.temperature), 1e-30f);
    scale_ = kLog2E / temperature_;
    if (has_top_k(options)) return walk_in_order(options, options.uniform);
    if (options.top_p < 1.0) return draw_top_p(options);
    floor_ = float(options.min_p);
    return draw_by_token_id(options.uniform);
  }

 private:
  int64_t first_peak() const {
    size_t block = 0;
    while (maxima_[block] != peak_) ++block;
    int64_t i = int64_t(block) * kBlock;
    while (logits_[i] != peak_) ++i;
    return i;
  }

  // Relative to the likeliest token's; 0 below the floor.
  f32x16 weights(f32x16 v) const {
    const f32x16 w = exp2_16((v - splat(peak_)) * splat(scale_));
    return where(w >= splat(floor_), w);
  }
  float weight(float logit) const { return weights(splat(logit))[0]; }

  int64_t draw_by_token_id(double uniform) const {
    const Sums all = sums();
    return walk(all, uniform * all.total);
  }

  struct Sums {
    std::vector<double> of;  // [block]
    double total = 0.0;
  };

  Sums sums() const {
    Sums found{std::vector<double>(maxima_.size())};
    for (size_t block = 0; block < maxima_.size(); ++block) {
      f64x16 lanes{};
      for_each(block, [&](int64_t, f32x16 v) { lanes += to_double(weights(v)); });
      found.total += found.of[block] = sum_of(lanes);
    }
    return found;
  }

  // By token id: the first token where the sum exceeds `target`.
  int64_t walk(const Sums& all, double target) const {
    double sum = 0.0;
    size_t block = 0;
    while (block + 1 < all.of.size() && !(sum + all.of[block] > target)) sum += all.of[block++];
    int64_t picked = first_peak();
    for (int64_t i = int64_t(block) * kBlock; i < size_ && !(sum > target); ++i) {
      const float w = weight(logits_[i]);
      sum += w;
      if (w > 0.0f) picked = i;
    }
    return picked;
  }

  // Top-p over all tokens, then min-p.
  int64_t draw_top_p(const Options& options) {
    const Sums all = sums();
    double number = options.uniform;
    for (int i = 0; i < kTries; ++i) {
      const int64_t token_id = walk(all, number * all.total);
      number = following(number);
      if (weight(logits_[token_id]) >= float(options.min_p) && before(token_id) < options.top_p * all.total) {
        return token_id;
      }
    }
    return walk_in_order(options, number);
  }

  // The weight of all tokens that precede one.
  double before(int64_t token_id) const {
    const f32x16 at = splat(logits_[token_id]);
    const i32x16 end = splat(int32_t(token_id));
    f64x16 sum{};
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (maxima_[block] < at[0]) continue;
      for_each(block, [&](int64_t first, f32x16 v) {
        const i32x16 precedes = (v > at) | ((v == at) & (lane_numbers() + splat(int32_t(first)) < end));
        sum += to_double(where(precedes, weights(v)));
      });
    }
    return sum_of(sum);
  }

  bool has_top_k(const Options& options) const { return options.top_k > 0 && options.top_k < size_; }

  // Top-k, top-p of what that leaves, and min-p of that.
  int64_t walk_in_order(const Options& options, double uniform) {
    Buckets all = buckets();
    Cut cut{{-kInfinity, int32_t(size_)}, all.total()};
    if (has_top_k(options)) cut = cut_at(all, [&](const Mass& mass) { return mass.count >= options.top_k; });
    if (options.top_p < 1.0) {
      const double wanted = options.top_p * cut.kept.weight;
      const Cut at_p = cut_at(all, [&](const Mass& mass) { return mass.weight >= wanted; });
      if (at_p.last.precedes(cut.last)) cut = at_p;
    }
    double kept = cut.kept.weight;
    floor_ = float(options.min_p);
    if (floor_ > 0.0f) {
      all = buckets();
      if (weight(cut.last.logit) == 0.0f) kept = all.total().weight;  // all that has a weight comes before the cut
    }
    return pick(all, cut.last, uniform * kept);
  }

  // The last token that is kept, and all that are. Tokens without a weight may be missing at the end.
  struct Cut {
    Candidate last;
    Mass kept;
  };

  // Where the sum in order is first `reached`.
  template <class Reached> Cut cut_at(const Buckets& all, const Reached& reached) const {
    const Bracket bracket = narrow(all.find(reached), reached);
    Cut cut{{-kInfinity, int32_t(size_)}, bracket.above};
    for (const Candidate& candidate : ordered(bracket)) {
      cut = {candidate, cut.kept + Mass{weight(candidate.logit), 1}};
      if (reached(cut.kept)) break;
    }
    return cut;
  }

  // The first token, not after `cut`, where the sum exceeds `target`.
  int64_t pick(const Buckets& all, const Candidate& cut, double target) const {
    const auto exceeds = [&](const Mass& mass) { return mass.weight > target; };
    const Bracket bracket = narrow(all.find(exceeds), exceeds);
    int64_t picked = weight(cut.logit) > 0.0f ? cut.token_id : first_peak();
    double sum = bracket.above.weight;
    for (const Candidate& candidate : ordered(bracket)) {
      if (cut.precedes(candidate)) break;
      const float w = weight(candidate.logit);
      sum += w;
      if (w > 0.0f) picked = candidate.token_id;
      if (sum > target) break;
    }
    return picked;
  }

  // All logits, finely for those that matter mostly.
  Buckets buckets() const {
    Buckets all{{-kInfinity, std::nextafter(peak_, kInfinity), {}, {}}};
    count_into(all, peak_, (kBuckets - 1) / kBucketed / temperature_);
    return all;
  }

  // Fills the buckets of `into.whole`. What is beyond the last but one goes into the last, by vectors.
  void count_into(Buckets& into, float origin, float scale) const {
    const f32x16 low = splat(into.whole.low), high = splat(into.whole.high), last = splat(kBuckets - 1.0f);
    f64x16 rest{};
    i32x16 rest_counts{};
    f32x16 rest_lowest = high;
    for (int i = 0; i < kBuckets; ++i) into.lowest[i] = into.whole.high;
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (!(maxima_[block] >= into.whole.low)) continue;
      for_each(block, [&](int64_t, f32x16 v) {
        const i32x16 within = (v >= low) & (v < high);
        const f32x16 w = weights(v), place = (splat(origin) - v) * splat(scale);
        const i32x16 near = within & (place < last), far = within & ~(place < last);
        rest += to_double(where(far, w));
        rest_counts -= far;
        rest_lowest = select(far & (v < rest_lowest), v, rest_lowest);
        const i32x16 index = to_int(where(near, place));
        for_each_set(near, [&](int lane) {
          Mass& mass = into.mass[index[lane]];
          mass.weight += w[lane];
          mass.count += 1;
          into.lowest[index[lane]] = std::min(into.lowest[index[lane]], v[lane]);
        });
      });
    }
    into.mass[kBuckets - 1] = {sum_of(rest), int64_t(sum_of(rest_counts))};
    into.lowest[kBuckets - 1] = -reduce_max(-rest_lowest);
  }

  // Until few are left, or all alike. Leaves out what has no weight: that needs no order.
  template <class Reached> Bracket narrow(Bracket found, const Reached& reached) const {
    while (found.within.count > kFew) {
      const float low = std::max({found.low, peak_ - kNoWeight * temperature_, -FLT_MAX});
      if (!(low < found.high)) return {found.high, found.high, found.above, {}};
      Buckets finer{{low, found.high, found.above, {}}};
      count_into(finer, found.high, (kBuckets - 1) / (found.high - low));
      const Bracket next = finer.find(reached);
      if (next.low == found.low && next.high == found.high) break;
      found = next;
    }
    return found;
  }

  std::vector<Candidate> ordered(const Bracket& bracket) const {
    std::vector<Candidate> found = between(bracket.low, bracket.high, bracket.within.count);
    if (!std::is_sorted(found.begin(), found.end(), first_of)) std::sort(found.begin(), found.end(), first_of);
    return found;
  }

  // In order of token id; `count` is how many there are.
  std::vector<Candidate> between(float low, float high, int64_t count) const {
    std::vector<Candidate> found;
    found.reserve(size_t(count));
    for (size_t block = 0; block < maxima_.size(); ++block) {
      if (!(maxima_[block] >= low)) continue;
      for_each(block, [&](int64_t first, f32x16 v) {
        for_each_set((v >= splat(low)) & (v < splat(high)), [&](int lane) { found.push_back({v[lane], int32_t(first) + lane}); });
      });
    }
    return found;
  }

  // Vectors of a block; lanes past the row's end are -infinity.
  template <class Body> void for_each(size_t block, const Body& body) const {
    int64_t i = int64_t(block) * kBlock;
    const int64_t end = min64(i + kBlock, size_);
    for (; i + kLanes <= end; i += kLanes) body(i, load16(logits_ + i));
    const int left = int(end - i);
    if (left > 0) body(i, select(lane_numbers() < splat(int32_t(left)), load16(logits_ + i, left), splat(-kInfinity)));
  }

  const float* logits_;
  int64_t size_;
  std::vector<float> maxima_;
  float peak_ = 0.0f, temperature_ = 1.0f, scale_ = 1.0f, floor_ = 0.0f;
};

struct DrawArgs {
  const Options* options;  // [num_rows]
  int64_t* token_ids;      // [num_rows]; 0 where the peak is not finite
  float* peaks;            // [num_rows]
  int64_t num_rows, size, threads;
};

}  // namespace
}  // namespace tandem

TANDEM_EXPORT void tandem_draw(const tandem::DrawArgs* a) {
  using namespace tandem;
  double cost = 0.0;
  for (int64_t i = 0; i < a->num_rows; ++i) cost += a->options[i].ns_per_element() * double(a->size);
  Pool::run(a->num_rows, split(a->num_rows, cost, a->threads), [a](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Row row(a->options[i].logits, a->size);
      a->peaks[i] = row.scan();
      a->token_ids[i] = std::isfinite(a->peaks[i]) ? row.draw(a->options[i]) : 0;
    }
  });
}
