// Causal attention over a paged KV cache: online softmax over tiles of keys at fixed absolute positions.
//
// A query row is computed with the same key tiles and the same arithmetic whether it comes alone, in a chunk or in a
// batch: keys it may not see contribute exact zeros, and tiles begin at multiples of kTile. So its bits never depend on
// other rows. Threads divide (request, KV head, run of query tokens), never the keys. All heads of a group share one
// pass over K and V, unless there is less work than threads; so do requests that decode after the same prefix, for the
// length of that prefix.
#include <algorithm>
#include <limits>
#include <vector>

#include "attention_direct.h"
#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr int kTaskTileRows = 192;  // query rows (token, head) that share one pass over the keys
constexpr int kLeastHeads = 4;  // of a task whose heads are divided: with fewer, memory is the limit
constexpr int kMaxHeadDim = 576;
constexpr double kElementNs = 0.03;  // one thread's time per query row, key and dimension
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

template <class T> struct Call {
  const T *q, *k_cache, *v_cache;
  T* out;
  const int32_t *block_tables, *query_start, *seq_lens;
  int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride, k_block_stride, v_block_stride,
      table_stride;
  int num_requests, num_heads, num_kv_heads, head_dim, block_size, window;
  float scale, softcap;
  const float* sinks;

  int group() const { return num_heads / num_kv_heads; }
  int words() const { return head_dim / Words<T>::kPair; }
  int padded_dim() const { return int(ceil_div(head_dim, kLanes)) * kLanes; }
};

// Some of one request's query tokens; or, with `members`, one token each of requests whose first `shared` keys lie in the
// same blocks. Of these tokens the heads [first_head, first_head + num_heads), which have one KV head.
struct Task {
  const int32_t* members;
  int request, first_token, num_tokens;  // tokens counted within the request's queries
  int first_position;
  int64_t shared, cost;
  int kv_head, first_head, num_heads;
};

// Rows [row, row + rows) meet the keys [low, high), which lie where `request` has them.
struct Span {
  int row, rows, request;
  int64_t low, high;
};

template <class T> struct TileRows {
  const T *k[kTile], *v[kTile];
};

alignas(64) constexpr char kZeros[kMaxHeadDim * sizeof(float)] = {};

// Where the K and V of a tile's keys are; keys outside of the span are zeros and their blocks are never looked up.
template <class T>
void locate(const Call<T>& call, const Span& span, int kv_head, int64_t start, TileRows<T>& rows) {
  const int32_t* entry = call.block_tables + span.request * call.table_stride + start / call.block_size;
  const int64_t head = int64_t(kv_head) * call.block_size * call.head_dim, low = span.low, high = span.high;
  const T* const nothing = reinterpret_cast<const T*>(kZeros);
  const int64_t size = call.block_size, dim = call.head_dim;
  int64_t slot = start % size;
  for (int64_t j = 0; j < kTile; ++entry, slot = 0) {
    const int64_t first = start + j, last = min64(first + size - slot, start + kTile);  // keys of one block
    const bool seen = last > low && first < high;
    const T* k = seen ? call.k_cache + *entry * call.k_block_stride + head + slot * dim : nothing;
    const T* v = seen ? call.v_cache + *entry * call.v_block_stride + head + slot * dim : nothing;
    for (int64_t key = first; key < last; ++key, ++j, k += seen ? dim : 0, v += seen ? dim : 0) {
      const bool visible = key >= low && key < high;
      rows.k[j] = visible ? k : nothing, rows.v[j] = visible ? v : nothing;
    }
  }
}

// Masks scores to keys [low, high) of the tile; with a soft cap they become logits in base 2. Returns their maximum.
template <class T> float mask(const Call<T>& call, int64_t low, int64_t high, int vectors, float* scores) {
  const bool whole = low <= 0 && high >= int64_t(vectors) * kLanes;
  const i32x16 first = splat(int32_t(max64(low, 0))), last = splat(int32_t(min64(high, kTile)));
  f32x16 best = splat(kNegativeInfinity);
  if (whole && call.softcap <= 0.0f) {
    for (int v = 0; v < vectors; ++v) best = vmax(load16(scores + v * kLanes), best);
    return reduce_max(best);
  }
  for (int v = 0; v < vectors; ++v) {
    f32x16 x = load16(scores + v * kLanes);
    if (call.softcap > 0.0f) x = tanh_16(x * splat(call.scale / call.softcap)) * splat(call.softcap * kLog2E);
    const i32x16 key = lane_numbers() + splat(int32_t(v * kLanes));
    if (!whole) x = select((key >= first) & (key < last), x, splat(kNegativeInfinity));
    best = vmax(x, best);
    store16(scores + v * kLanes, x);
  }
  return reduce_max(best);
}

// Scores -> probability words: 2 to the power of score * factor - maximum; returns their sum, by lane. `scores` is
// readable to a multiple of 32.
template <class T>
f32x16 exponentiate(float factor, float maximum, int vectors, const float* scores, float* probabilities) {
  const auto weight = [=](int v) { return exp2_16(fma(load16(scores + v * kLanes), splat(factor), splat(-maximum))); };
  f32x16 sum{};
  for (int v = 0; v < vectors; v += 2) {
    const f32x16 a = weight(v), b = v + 1 < vectors ? weight(v + 1) : f32x16{};
    Words<T>::store_probabilities(probabilities + v * kLanes / Words<T>::kPair, a, b);
    sum = (sum + a) + b;
  }
  return sum;
}

// One thread's state while it works on one task.
template <class T> struct Attention {
  static constexpr int kPair = Words<T>::kPair;
  const Call<T>& call;
  const Task& task;
  int rows, words, dim;
  float *q, *keys, *values, *sums, *maxima, *totals;  // sums: unnormalised output [rows][dim]; totals: by lane
  int32_t* positions;

  Attention(const Call<T>& c, const Task& t)
      : call(c), task(t), rows(t.num_tokens * t.num_heads), words(c.words()), dim(c.padded_dim()) {}
  Attention(const Call<T>& c, const Task& t, Workspace& workspace) : Attention(c, t) {
    const size_t sizes[] = {size_t(rows) * words, size_t(words) * kTile, size_t(kTile / kPair) * dim,
                            size_t(rows) * dim, size_t(rows), size_t(rows) * kLanes, size_t(rows)};
    float* places;
    float** const parts[] = {&q, &keys, &values, &sums, &maxima, &totals, &places};
    size_t total = 0;
    for (size_t size : sizes) total += ceil_div(size, kLanes) * kLanes;
    float* base = workspace.reserve(total);
    for (int i = 0; i < 7; ++i) *parts[i] = base, base += ceil_div(sizes[i], kLanes) * kLanes;
    positions = reinterpret_cast<int32_t*>(places);
    for (int row = 0; row < rows; ++row) positions[row] = int32_t(position(row));
  }

  int64_t position(int row) const {
    const int token = row / task.num_heads;
    return task.members ? call.seq_lens[task.members[token]] - 1 : task.first_position + token;
  }
  int64_t first_visible(int64_t at) const { return call.window > 0 ? max64(0, at - call.window + 1) : 0; }
  int64_t query_token(int row) const {
    const int token = row / task.num_heads;
    return task.members ? call.query_start[task.members[token]]
                        : call.query_start[task.request] + task.first_token + token;
  }

  void load_queries() {
    for (int row = 0; row < rows; ++row) {
      const int head = task.first_head + row % task.num_heads;
      const T* from = call.q + query_token(row) * call.q_token_stride + head * call.q_head_stride;
      for (int w = 0; w < words; w += kLanes) {
        const int count = int(min64(kLanes, words - w));
        store16(q + row * words + w, Words<T>::load(from + w * kPair, count), count);
      }
    }
    std::fill(sums, sums + int64_t(rows) * dim, 0.0f);
    std::fill(totals, totals + rows * kLanes, 0.0f);
    std::fill(maxima, maxima + rows, kNegativeInfinity);
  }

  // All that some row may see, in order: for members what they share, then what each has for itself.
  int num_spans() const { return task.members ? 1 + task.num_tokens : 1; }
  Span span(int index) const {
    if (!task.members) return {0, rows, task.request, first_visible(position(0)), position(rows - 1) + 1};
    if (index == 0) return {0, rows, task.members[0], 0, task.shared};
    const int row = (index - 1) * task.num_heads;
    return {row, task.num_heads, task.members[index - 1], task.shared, position(row) + 1};
  }
  static int64_t first_tile(const Span& span) { return span.low / kTile * kTile; }

  // `next`: the task that this thread will probably have next; its first tile is prefetched during the last one here.
  void run(const Task* next) {
    load_queries();
    TileRows<T> tiles[2];
    Span now = span(0);
    int64_t start = first_tile(now);
    locate(call, now, task.kv_head, start, tiles[0]);
    for (int i = 0, index = 0; i < num_spans(); index ^= 1) {
      const bool is_last = start + kTile >= now.high;
      i += is_last;
      const bool is_end = i == num_spans();
      const Span following = !is_last ? now : !is_end ? span(i) : next ? Attention(call, *next).span(0) : now;
      const int64_t following_start = is_last ? first_tile(following) : start + kTile;
      const TileRows<T>* ahead = nullptr;
      if (!is_end || next) {
        locate(call, following, is_end ? next->kv_head : task.kv_head, following_start, tiles[index ^ 1]);
        ahead = &tiles[index ^ 1];
      }
      meet(now, tiles[index], ahead, start);
      now = following, start = following_start;
    }
    store();
  }

  void meet(const Span& span, const TileRows<T>& tile, const TileRows<T>* ahead, int64_t start) {
    if (has_harmful_values(span, tile, start)) return meet_one_by_one(span, start);
    if (kReadsDirectly<T> && span.rows <= kDirectRows && call.head_dim % kChunk == 0) {
      attend_directly(span, tile, ahead, start);
      return;
    }
    pack(tile, ahead, int(min64(kTile, span.high - start)));
    for (int done = 0; done < span.rows; done += kTileRows)
      attend(span.row + done, int(min64(kTileRows, span.rows - done)), start);
  }

  // Whether a value is not finite and belongs to a key that some rows see and others do not: zero times it is a NaN.
  bool has_harmful_values(const Span& span, const TileRows<T>& tile, int64_t start) const {
    const int64_t first = positions[span.row], last = positions[span.row + span.rows - 1];
    if (task.members || first == last) return false;  // all rows of such a span see the same keys
    for (int64_t j = 0, key = start; j < kTile; ++j, ++key) {
      const bool is_later = key > first && key <= last;
      const bool is_left = key >= first_visible(first) && key < first_visible(last);
      if ((is_later || is_left) && !is_finite(tile.v[j])) return true;
    }
    return false;
  }

  bool is_finite(const T* value) const {
    f32x16 zeros{};
    for (int d = 0; d < call.head_dim; d += kLanes)
      zeros += load16(value + d, int(min64(kLanes, call.head_dim - d))) * f32x16{};
    return reduce_add(zeros) == 0.0f;
  }

  // Each row with the keys that it sees and zeros for all others, as if it were alone.
  void meet_one_by_one(const Span& span, int64_t start) {
    for (int row = span.row; row < span.row + span.rows; ++row) {
      const Span alone{row, 1, span.request, first_visible(positions[row]), positions[row] + 1};
      if (alone.high <= start || alone.low >= start + kTile) continue;
      TileRows<T> tile;
      locate(call, alone, task.kv_head, start, tile);
      pack(tile, nullptr, int(min64(kTile, alone.high - start)));
      attend(row, 1, start);
    }
  }

  void pack(const TileRows<T>& tile, const TileRows<T>* next, int used) {
    for (int j = 0; j < used; j += kLanes) {
      pack_keys(tile.k + j, next ? next->k + j : nullptr, call.head_dim, keys + j);
      pack_values(tile.v + j, next ? next->v + j : nullptr, call.head_dim, dim, values + j / kPair * dim);
    }
  }

  // What becomes of a tile's scores: probability words, and what the sums so far are to be scaled with.
  struct Tile {
    static constexpr int kRows = std::max(kTileRows, kDirectRows);
    alignas(64) float scores[kRows][kTile], probabilities[kRows][kTile / kPair], scale[kRows];
  };

  // Rows [row, row + count) meet the packed tile.
  void attend(int row, int count, int64_t start) {
    const int64_t used = min64(kTile, positions[row + count - 1] + 1 - start);
    if (used <= 0 || first_visible(positions[row]) >= start + kTile) return;
    const int vectors = int(ceil_div(used, kLanes));
    Tile tile;
    multiply_add_rows<T>(count, vectors, q + row * words, words, keys, kTile, words, nullptr, tile.scores[0], kTile);
    weigh(row, count, start, vectors, tile);
    multiply_add_rows<T>(count, dim / kLanes, tile.probabilities[0], kTile / kPair, values, dim,
                         int(ceil_div(used, kPair)), tile.scale, sums + int64_t(row) * dim, dim);
  }

  void weigh(int row, int count, int64_t start, int vectors, Tile& tile) {
    alignas(64) float before[kLanes] = {}, base[kLanes] = {};
    const float factor = call.softcap > 0.0f ? 1.0f : call.scale * kLog2E;
    for (int r = 0; r < count; ++r) {
      const int64_t at = positions[row + r];
      const float best = factor * mask(call, first_visible(at) - start, at + 1 - start, vectors, tile.scores[r]);
      const float maximum = std::max(maxima[row + r], best);
      before[r] = maxima[row + r];
      base[r] = maximum == kNegativeInfinity ? 0.0f : maximum;
      maxima[row + r] = maximum;
    }
    alignas(64) float rescale[kLanes];
    store16(rescale, exp2_16(load16(before) - load16(base)));
    for (int r = 0; r < count; ++r) {
      tile.scale[r] = rescale[r];
      float* total = totals + (row + r) * kLanes;
      store16(total, load16(total) * splat(rescale[r]) +
                        exponentiate<T>(factor, base[r], vectors, tile.scores[r], tile.probabilities[r]));
    }
  }

  // A span's rows meet a tile where it lies.
  void attend_directly(const Span& span, const TileRows<T>& at, const TileRows<T>* next, int64_t start) {
    switch (span.rows) {
      case 1: return attend_directly<1>(span, at, next, start);
      case 2: return attend_directly<2>(span, at, next, start);
      case 3: return attend_directly<3>(span, at, next, start);
      case 4: return attend_directly<4>(span, at, next, start);
      case 5: return attend_directly<5>(span, at, next, start);
      case 6: return attend_directly<6>(span, at, next, start);
      case 7: return attend_directly<7>(span, at, next, start);
      default: return attend_directly<8>(span, at, next, start);
    }
  }

  template <int kRows>
  void attend_directly(const Span& span, const TileRows<T>& at, const TileRows<T>* next, int64_t start) {
    if constexpr (kReadsDirectly<T> && kRows <= kDirectRows) {
      const int64_t used = min64(kTile, span.high - start);
      const int vectors = int(ceil_div(used, kLanes));
      Tile tile;
      direct_scores<kRows>(q + span.row * words, words, at.k, next ? next->k : nullptr, vectors * kLanes, tile.scores);
      weigh(span.row, kRows, start, vectors, tile);
      direct_values<kRows>(tile.probabilities, at.v, next ? next->v : nullptr, int(ceil_div(used, kPair)),
                           call.head_dim, tile.scale, sums + int64_t(span.row) * dim);
    }
  }

  // Part of a row's total that belongs to no key.
  float sink(int row, int head) const {
    return call.sinks ? exp2_16(splat(call.sinks[head] * kLog2E - maxima[row]))[0] : 0.0f;
  }

  void store() const {
    for (int row = 0; row < rows; ++row) {
      const int head = task.first_head + row % task.num_heads;
      T* to = call.out + query_token(row) * call.out_token_stride + head * call.out_head_stride;
      const float total = reduce_add(load16(totals + row * kLanes)) + sink(row, head);
      const f32x16 inverse = splat(1.0f / total);
      for (int d = 0; d < call.head_dim; d += kLanes)
        store16(to + d, load16(sums + int64_t(row) * dim + d) * inverse, int(min64(kLanes, call.head_dim - d)));
    }
  }
};

// All work, longest first, so that a dynamic schedule ends evenly.
template <class T> struct Plan {
  const Call<T>& call;
  std::vector<Task> tasks;
  std::vector<int32_t> members;  // of the tasks

  Plan(const Call<T>& c, int num_threads) : call(c) {
    for (int r = 0; r < call.num_requests; ++r)
      if (call.window > 0 || length(r) != 1 || call.seq_lens[r] <= kTile) add_request(r);
      else members.push_back(r);
    share(num_threads);
    divide_heads(num_threads);
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) { return a.cost > b.cost; });
  }

  int length(int request) const { return call.query_start[request + 1] - call.query_start[request]; }
  const int32_t* table(int request) const { return call.block_tables + request * call.table_stride; }
  int64_t cost_of(int64_t keys, int num_tokens) const { return keys * (num_tokens * call.group() + 8); }

  void add(Task task) {
    task.num_heads = call.group();
    for (task.kv_head = 0; task.kv_head < call.num_kv_heads; ++task.kv_head) {
      task.first_head = task.kv_head * call.group();
      tasks.push_back(task);
    }
  }

  // Where there are fewer tasks than threads (latents have one KV head), divides each task's heads.
  void divide_heads(int num_threads) {
    const int64_t wanted = ceil_div(num_threads, max64(1, int64_t(tasks.size())));
    const int parts = int(min64(wanted, call.group() / kLeastHeads));
    if (parts < 2) return;
    std::vector<Task> divided;
    for (const Task& task : tasks)
      for (int i = 0; i < parts; ++i) {
        const int first = task.num_heads * i / parts, last = task.num_heads * (i + 1) / parts;
        divided.push_back(task);
        Task& part = divided.back();
        part.first_head += first, part.num_heads = last - first;
        part.cost = task.cost * (last - first) / task.num_heads;
      }
    tasks = std::move(divided);
  }

  void add_request(int r) {
    const int tokens = std::max(1, kTaskTileRows / call.group());
    for (int first = 0; first < length(r); first += tokens) {
      const int count = std::min(tokens, length(r) - first), position = call.seq_lens[r] - length(r) + first;
      const int64_t keys = call.window > 0 ? std::min(position, call.window) + count : position + count;
      add({nullptr, r, first, count, position, 0, cost_of(keys, count)});
    }
  }

  // Adds tasks for `members`, requests that decode: repeatedly groups those that save most by sharing keys. A group
  // shares at least a tile.
  void share(int num_threads) {
    const auto before = [this, blocks = ceil_div(kTile, call.block_size)](int32_t a, int32_t b) {
      return std::lexicographical_compare(table(a), table(a) + blocks, table(b), table(b) + blocks);
    };
    std::stable_sort(members.begin(), members.end(), before);
    for (auto begin = members.begin(); begin != members.end();) {
      const auto end = std::upper_bound(begin, members.end(), *begin, before);
      const auto [last, shared] = together(begin, end);
      if (last - begin == 1) add_request(*begin);
      else add_members(&*begin, int(last - begin), shared, num_threads);
      begin = last;
    }
  }

  // Moves the requests that are best grouped with the first one to the front. Returns (their end, number of keys
  // shared).
  template <class It> std::pair<It, int64_t> together(It begin, It end) const {
    std::vector<std::pair<int64_t, int32_t>> found;  // (keys shared with the first, request)
    for (It it = begin; it != end; ++it) found.push_back({shared_keys(*begin, *it), *it});
    std::stable_sort(found.begin() + 1, found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    size_t best = 1;
    for (size_t n = 2; n <= found.size(); ++n)
      if (int64_t(n - 1) * found[n - 1].first > int64_t(best - 1) * found[best - 1].first) best = n;
    std::transform(found.begin(), found.end(), begin, [](const auto& one) { return one.second; });
    return {begin + int64_t(best), found[best - 1].first};
  }

  // Whole tiles of keys that lie in the same blocks, before both's last key.
  int64_t shared_keys(int a, int b) const {
    const int64_t keys = min64(call.seq_lens[a], call.seq_lens[b]) - 1, blocks = ceil_div(keys, call.block_size);
    const int32_t* const first = table(a);
    return min64(keys, (std::mismatch(first, first + blocks, table(b)).first - first) * call.block_size) / kTile * kTile;
  }

  void add_members(const int32_t* from, int count, int64_t shared, int num_threads) {
    constexpr int kLeast = 4;  // in a part, for the keys' sake
    const int64_t most = std::max(1, kTaskTileRows / call.group());
    const int64_t wanted = min64(count / kLeast, ceil_div(2 * num_threads, call.num_kv_heads));
    const int64_t parts = max64(ceil_div(count, most), wanted);
    for (int64_t i = 0; i < parts; ++i) {
      const int64_t first = count * i / parts, last = count * (i + 1) / parts;
      Task task{from + first, 0, 0, int(last - first), 0, shared, cost_of(shared, int(last - first))};
      for (int64_t m = first; m < last; ++m) task.cost += cost_of(call.seq_lens[from[m]] - shared, 1);
      add(task);
    }
  }
};

template <class T> void paged_attention(const Call<T>& call, int num_threads) {
  const Plan<T> plan(call, num_threads);
  const std::vector<Task>& tasks = plan.tasks;
  double cost = 0.0;
  for (const Task& task : tasks) cost += double(task.cost) * call.head_dim * kElementNs;
  Split dealt = split(int64_t(tasks.size()), cost, num_threads);
  dealt.ordered = true, dealt.grain = 1;
  Pool::run(int64_t(tasks.size()), dealt, [&](int64_t first, int64_t last) {
    static thread_local Workspace workspace;
    for (int64_t i = first; i < last; ++i) {
      const size_t next = size_t(i + dealt.threads);
      Attention<T>(call, tasks[size_t(i)], workspace).run(next < tasks.size() ? &tasks[next] : nullptr);
    }
  });
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_paged_attention(const PagedAttentionArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const Call<T> call{static_cast<const T*>(a->q),
                       static_cast<const T*>(a->k_cache),
                       static_cast<const T*>(a->v_cache),
                       static_cast<T*>(a->out),
                       a->block_tables, a->query_start, a->seq_lens,
                       a->q_token_stride, a->q_head_stride, a->out_token_stride, a->out_head_stride,
                       a->k_block_stride, a->v_block_stride, a->table_stride,
                       int(a->num_requests), int(a->num_heads), int(a->num_kv_heads), int(a->head_dim),
                       int(a->block_size), int(a->window), float(a->scale), float(a->softcap), a->sinks};
    paged_attention(call, int(a->threads));
  });
}
