// Sparse attention's choice of the tokens, or entries of several tokens each, that a query attends to: a score of every
// index key, and the best of them.
//
// A score is summed over the heads in order, with the arithmetic of attention's scores, and of equal scores the lowest
// position is chosen. So a query's choice does not depend on how its prompt is divided or what shares its step. A NaN
// product counts as zero, a NaN score as the lowest.
#include <algorithm>
#include <cfloat>
#include <functional>
#include <vector>

#include "attention_tile.h"
#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kVectors = kTile / kLanes;
constexpr int kQueriesAtOnce = 8, kTilesAtOnce = 8;  // of one request, scored by one thread
constexpr int kMaxDim = 1024;
constexpr int64_t kMostScores = int64_t(1) << 24;  // kept at a time
constexpr double kElementNs = 0.03, kPickNs = 4.0;  // one thread's time for a product, and to pick from among one key

alignas(64) constexpr char kNoKey[kMaxDim * sizeof(float)] = {};

// A query that has more keys to choose from than it may. Its scores begin at `scores` and are whole tiles.
struct Chooser {
  int64_t row, num_keys;
  int request;
  float* scores;

  int64_t padded() const { return ceil_div(num_keys, kTile) * kTile; }
};

// Queries `[first, last)` of one request meet tiles `[tile, end)`.
struct Run {
  size_t first, last;
  int64_t tile, end;
};

template <class T> class Scorer {
 public:
  explicit Scorer(const ChooseByIndexArguments& arguments)
      : a_(arguments), words_(int(a_.dim / Words<T>::kPair)), scale_(float(a_.scale)) {}

  void score(const std::vector<Chooser>& choosers, const Run& run) const {
    static thread_local Workspace workspace;
    const size_t per_query = size_t(a_.num_heads) * size_t(words_);
    float* const keys = workspace.reserve(size_t(words_) * kTile + (run.last - run.first) * per_query);
    float* const queries = keys + words_ * kTile;
    for (size_t i = run.first; i < run.last; ++i) load(choosers[i].row, queries + (i - run.first) * per_query);
    for (int64_t tile = run.tile; tile < run.end; ++tile) {
      pack(choosers[run.last - 1], tile, keys);
      for (size_t i = run.first; i < run.last; ++i)
        if (tile * kTile < choosers[i].num_keys)
          meet(choosers[i], queries + (i - run.first) * per_query, keys, tile * kTile);
    }
  }

 private:
  void load(int64_t row, float* to) const {
    const T* from = static_cast<const T*>(a_.q) + row * a_.num_heads * a_.dim;
    for (int64_t head = 0; head < a_.num_heads; ++head)
      for (int w = 0; w < words_; w += kLanes) {
        const int count = int(min64(kLanes, words_ - w));
        store16(to + head * words_ + w, Words<T>::load(from + head * a_.dim + w * Words<T>::kPair, count), count);
      }
  }

  // The tile's keys that `last` has; the others are zeros and their blocks are never looked up. A key lies in the block
  // of the last of its `span` tokens.
  void pack(const Chooser& last, int64_t tile, float* packed) const {
    const int32_t* table = a_.block_tables + last.request * a_.table_stride;
    const T* rows[kTile];
    for (int i = 0; i < kTile; ++i) {
      const int64_t key = tile * kTile + i;
      const int64_t token = (key + 1) * a_.span - 1;
      rows[i] = key >= last.num_keys
                    ? reinterpret_cast<const T*>(kNoKey)
                    : static_cast<const T*>(a_.keys) + table[token / a_.block_size] * a_.key_block_stride +
                          token % a_.block_size / a_.span * a_.dim;
    }
    for (int i = 0; i < kTile; i += kLanes) pack_keys<T>(rows + i, nullptr, int(a_.dim), packed + i);
  }

  void meet(const Chooser& chooser, const float* queries, const float* keys, int64_t first_key) const {
    alignas(64) float products[kTileRows][kTile];
    f32x16 sums[kVectors] = {};
    for (int64_t head = 0; head < a_.num_heads; head += kTileRows) {
      const int count = int(min64(kTileRows, a_.num_heads - head));
      multiply_add_rows<T>(count, kVectors, queries + head * words_, words_, keys, kTile, words_, nullptr, products[0],
                           kTile);
      for (int r = 0; r < count; ++r) {
        add(products[r], a_.weights[chooser.row * a_.num_heads + head + r] * scale_, sums);
      }
    }
    for (int v = 0; v < kVectors; ++v)
      store16(chooser.scores + first_key + v * kLanes, vmax(sums[v], splat(-FLT_MAX)));
  }

  static void add(const float* products, float weight, f32x16* sums) {
    for (int v = 0; v < kVectors; ++v)
      sums[v] = fma(splat(weight), vmax(load16(products + v * kLanes), f32x16{}), sums[v]);
  }

  const ChooseByIndexArguments& a_;
  const int words_;
  const float scale_;
};

// The places of the `most` highest of `count` scores, ascending. `sorted` has room for as many.
void take_best(const float* scores, int64_t count, int64_t most, float* sorted, int32_t* chosen) {
  std::copy(scores, scores + count, sorted);
  std::nth_element(sorted, sorted + most - 1, sorted + count, std::greater<float>());
  const float least = sorted[most - 1];
  int64_t num_equal = most - std::count_if(sorted, sorted + most, [least](float score) { return score > least; });
  for (int64_t i = 0; i < count; ++i)
    if (scores[i] > least || (scores[i] == least && num_equal-- > 0)) *chosen++ = int32_t(i);
}

class Choice {
 public:
  explicit Choice(const ChooseByIndexArguments& arguments) : a_(arguments) {}

  void run() {
    for (int request = 0; request < a_.num_requests; ++request) {
      const int64_t first = a_.query_start[request], last = a_.query_start[request + 1];
      for (int64_t row = first; row < last; ++row)
        add(request, row, (a_.seq_lens[request] - last + row + 1) / a_.span);
    }
    finish();
  }

 private:
  int32_t* chosen(int64_t row) const { return a_.chosen + row * a_.most; }

  void add(int request, int64_t row, int64_t num_keys) {
    if (num_keys <= a_.most) {  // all that there are
      for (int64_t i = 0; i < a_.most; ++i) chosen(row)[i] = i < num_keys ? int32_t(i) : -1;
      return;
    }
    const Chooser chooser{row, num_keys, request, nullptr};
    if (!choosers_.empty() && num_scores_ + chooser.padded() > kMostScores) finish();
    choosers_.push_back(chooser);
    num_scores_ += chooser.padded();
  }

  void pick(const Chooser& chooser) const {
    static thread_local Workspace workspace;
    float* const sorted = workspace.reserve(size_t(chooser.num_keys));
    take_best(chooser.scores, chooser.num_keys, a_.most, sorted, chosen(chooser.row));
  }

  // Scores and picks for the queries added so far.
  void finish() {
    if (choosers_.empty()) return;
    float* next = scores_.reserve(size_t(num_scores_));
    for (Chooser& chooser : choosers_) chooser.scores = next, next += chooser.padded();
    const std::vector<Run> all = runs();
    const double products = double(num_scores_) * double(a_.num_heads * a_.dim);
    const int64_t num_runs = int64_t(all.size()), num_choosers = int64_t(choosers_.size());
    with_dtype(a_.dtype, [&](auto tag) {
      const Scorer<decltype(tag)> scorer(a_);
      Pool::run(num_runs, split(num_runs, products * kElementNs, a_.threads), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) scorer.score(choosers_, all[size_t(i)]);
      });
    });
    const double picking = double(num_scores_) * kPickNs;
    Pool::run(num_choosers, split(num_choosers, picking, a_.threads), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) pick(choosers_[size_t(i)]);
    });
    choosers_.clear(), num_scores_ = 0;
  }

  std::vector<Run> runs() const {
    std::vector<Run> found;
    for (size_t first = 0, last; first < choosers_.size(); first = last) {
      for (last = first + 1; last < choosers_.size() && last - first < kQueriesAtOnce; ++last)
        if (choosers_[last].request != choosers_[first].request) break;
      const int64_t tiles = choosers_[last - 1].padded() / kTile;
      for (int64_t tile = 0; tile < tiles; tile += kTilesAtOnce)
        found.push_back({first, last, tile, min64(tile + kTilesAtOnce, tiles)});
    }
    return found;
  }

  const ChooseByIndexArguments& a_;
  std::vector<Chooser> choosers_;
  int64_t num_scores_ = 0;
  Workspace scores_;
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_choose_by_index(const ChooseByIndexArguments* a) { Choice(*a).run(); }
