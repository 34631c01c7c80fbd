// Exchanges between the ranks of one host, through memory that all of them map.
//
// Each rank has a counter of its exchanges and two buffers that it alone writes. In exchange k it fills buffer k % 2,
// sets its counter to k and waits until the others' counters are k: then their buffers can be read. A rank at k has
// read all buffers of k - 1, so a buffer is filled again only when nobody reads it.
//
// A waiting rank spins, then yields its core, then sleeps; it gives up when its deadline has passed or the group has
// ended. From then on nothing is exchanged, and results of calls are meaningless: the caller must check `failure`.
//
// Ranks of other hosts have buffers and counters here too, which a mirror fills with what those ranks wrote on theirs.
// It sends the data that ranks of this host publish. A rank publishes k + 2 only when all others are at k + 1, so all
// have its k: a buffer is not filled again before the mirror has sent it. The same holds for a pipe, whose reader has
// taken k by then.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "calls.h"
#include "pool.h"
#include "strips.h"

namespace tandem {

enum RankFailure : int64_t { kNoFailure = 0, kLate = 1, kEnded = 2 };

constexpr int64_t kMaxRanks = 16;  // of a group: `MAX_GROUP_RANKS`; the page of counters has room for 31

class Exchange {
 public:
  explicit Exchange(RankGroup* group) : g(*group) {}

  // Sums rows of `n` floats over the ranks in a tree over neighbours (one without a neighbour is its own sum), adds
  // `bias` and rounds once.
  template <class T>
  void add(const float* node, const T* bias, T* out, int64_t out_stride, int64_t m, int64_t n, int threads) {
    const int64_t at_once = g.buffer_bytes / int64_t(n * sizeof(float));
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t rows = min64(at_once, m - first);
      if (!swap(node + first * n, rows * n * int64_t(sizeof(float)))) return;
      const float* nodes[kMaxRanks];
      for (int64_t r = 0; r < g.num_ranks; ++r) nodes[r] = buffer(r);
      const double cost = double(rows * n * g.num_ranks) * sizeof(float) / kBytesPerNs;
      Pool::run(rows, split(rows, cost, threads), [=](int64_t row, int64_t last) {
        for (; row < last; ++row) add_row(nodes, row * n, bias, out + (first + row) * out_stride, n);
      });
    }
  }

  // Rows of all ranks side by side, at rank 0: columns bounds[r] to bounds[r + 1] are those of rank r.
  void join(const float* part, const int64_t* bounds, float* out, int64_t m) {
    int64_t widest = 0;
    for (int64_t r = 0; r < g.num_ranks; ++r) widest = max64(widest, bounds[r + 1] - bounds[r]);
    const int64_t at_once = g.buffer_bytes / int64_t(widest * sizeof(float));
    const int64_t own = bounds[g.rank + 1] - bounds[g.rank], all = bounds[g.num_ranks];
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t rows = min64(at_once, m - first);
      if (!swap(part + first * own, rows * own * int64_t(sizeof(float)))) return;
      for (int64_t r = 0; r < g.num_ranks && g.rank == 0; ++r) {
        const int64_t width = bounds[r + 1] - bounds[r];
        for (int64_t i = 0; i < rows; ++i)
          std::memcpy(out + (first + i) * all + bounds[r], buffer(r) + i * width, width * sizeof(float));
      }
    }
  }

  // Rows of `row_bytes` of all ranks side by side, at every rank.
  void gather(const char* part, char* out, int64_t m, int64_t row_bytes) {
    const int64_t at_once = g.buffer_bytes / row_bytes, stride = g.num_ranks * row_bytes;
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t rows = min64(at_once, m - first);
      if (!swap(part + first * row_bytes, rows * row_bytes)) return;
      for (int64_t r = 0; r < g.num_ranks; ++r)
        for (int64_t i = 0; i < rows; ++i)
          std::memcpy(out + (first + i) * stride + r * row_bytes,
                      reinterpret_cast<const char*>(buffer(r)) + i * row_bytes, size_t(row_bytes));
    }
  }

  // Sums the `k` terms of each token in their order, from zero. Each is a row of `n` floats of the rank that owns it,
  // whose rows are in the order of tokens and terms.
  template <class T>
  void collect(const float* own, const int64_t* owners, T* out, int64_t m, int64_t k, int64_t n, int threads) {
    const int64_t at_once = g.buffer_bytes / int64_t(k * n * sizeof(float));
    std::vector<const float*> terms;
    int64_t sums[kMaxRanks] = {};
    for (int64_t first = 0; first < m; first += at_once) {
      const int64_t tokens = min64(at_once, m - first);
      const int64_t* const owner = owners + first * k;
      int64_t counts[kMaxRanks] = {};
      for (int64_t i = 0; i < tokens * k; ++i) ++counts[owner[i]];
      if (!swap(own, counts[g.rank] * n * int64_t(sizeof(float)))) return;
      own += counts[g.rank] * n;
      for (int64_t r = 0; r < g.num_ranks; ++r) sums[r] += counts[r];
      const float* next[kMaxRanks];
      for (int64_t r = 0; r < g.num_ranks; ++r) next[r] = buffer(r);
      terms.resize(size_t(tokens * k));
      for (int64_t i = 0; i < tokens * k; ++i) {
        terms[size_t(i)] = next[owner[i]];
        next[owner[i]] += n;
      }
      const double cost = double(tokens * k * n) * sizeof(float) / kBytesPerNs;
      Pool::run(tokens, split(tokens, cost, threads), [&](int64_t token, int64_t last) {
        for (; token < last; ++token) add_terms(&terms[size_t(token * k)], k, out + (first + token) * n, n);
      });
    }
    for (int64_t r = 0; r < g.num_ranks; ++r) g.rows[r] += sums[r];
    g.rows[g.num_ranks] += *std::max_element(sums, sums + g.num_ranks);
  }

  // One way from rank 0 of two to rank 1, which counts the pieces that it has taken. Two of them may wait for it.
  void send(const char* data, int64_t size) {
    for (int64_t sent = 0; sent < size && !g.failure; sent += g.buffer_bytes) {
      const uint32_t now = uint32_t(++g.count);
      if (!wait_for(1, now - 2)) return;
      const int64_t bytes = min64(g.buffer_bytes, size - sent);
      std::memcpy(buffer(0), data + sent, size_t(bytes));
      counter_of(0).sizes[now & 1].store(bytes);
      publish(now);
    }
  }

  void receive(char* data, int64_t size) {
    for (int64_t taken = 0; taken < size && !g.failure; taken += g.buffer_bytes) {
      const uint32_t now = uint32_t(++g.count);
      if (!wait_for(0, now)) return;
      std::memcpy(data + taken, buffer(0), size_t(min64(g.buffer_bytes, size - taken)));
      publish(now);
    }
  }

  // Waits for what `g.rank` publishes after what was awaited last; returns its size, -1: the group has ended.
  int64_t await_own() {
    const uint32_t now = uint32_t(++g.count);
    return wait_for(g.rank, now) ? counter_of(g.rank).sizes[now & 1].load() : -1;
  }

  // Publishes for `g.rank`, of another host, `size` bytes that its next buffer was filled with.
  void publish_own(int64_t size) {
    const uint32_t now = uint32_t(++g.count);
    counter_of(g.rank).sizes[now & 1].store(size);
    publish(now);
  }

 private:
  static constexpr int64_t kHeaderBytes = 4096, kLineBytes = 64;
  static constexpr int64_t kSpinNs = 3'000, kYieldNs = 100'000, kSleepNs = 50'000'000;

  struct Counter {
    std::atomic<uint32_t> count, sleepers;
    std::atomic<int64_t> sizes[2];  // of what is in the buffers
  };

  // Publishes `size` bytes and waits for those of the others. False: they will not come.
  bool swap(const void* own, int64_t size) {
    if (g.failure) return false;
    const uint32_t before = uint32_t(g.count++), now = before + 1;
    if (!wait_for_all(before)) return false;
    std::memcpy(buffer(g.rank), own, size_t(size));
    counter_of(g.rank).sizes[now & 1].store(size);
    publish(now);
    return wait_for_all(now);
  }

  template <class T>
  void add_row(const float* const* nodes, int64_t offset, const T* bias, T* out, int64_t n) const {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int size = int(min64(kLanes, n - i));
      f32x16 sums[kMaxRanks];
      for (int64_t r = 0; r < g.num_ranks; ++r) sums[r] = load16(nodes[r] + offset + i, size);
      for (int64_t step = 1; step < g.num_ranks; step *= 2)
        for (int64_t r = 0; r + step < g.num_ranks; r += 2 * step) sums[r] = sums[r] + sums[r + step];
      const f32x16 shift = bias ? load16(bias + i, size) : f32x16{};
      store16(out + i, sums[0] + shift, size);
    }
  }

  template <class T> static void add_terms(const float* const* terms, int64_t k, T* out, int64_t n) {
    for (int64_t i = 0; i < n; i += kLanes) {
      const int size = int(min64(kLanes, n - i));
      f32x16 total{};
      for (int64_t term = 0; term < k; ++term) total += load16(terms[term] + i, size);
      store16(out + i, total, size);
    }
  }

  bool wait_for_all(uint32_t wanted) {
    for (int64_t r = 0; r < g.num_ranks; ++r)
      if (r != g.rank && !wait_for(r, wanted)) return false;
    return true;
  }

  bool wait_for(int64_t peer, uint32_t wanted) {
    Counter& counter = counter_of(peer);
    const auto is_there = [&] { return int32_t(counter.count.load() - wanted) >= 0; };
    if (is_there()) return true;
    for (const int64_t start = now_ns();;) {
      for (int i = 0; i < 16; ++i) {
        if (is_there()) return true;
        relax();
      }
      const int64_t waited = now_ns() - start;
      if (waited < kSpinNs) continue;
      if (reinterpret_cast<std::atomic<uint32_t>*>(g.memory)->load()) return fail(kEnded, peer);
      if (waited >= g.deadline_ns) return fail(kLate, peer);
      if (waited < kYieldNs) sched_yield();
      else sleep(counter, wanted, min64(kSleepNs, g.deadline_ns - waited));
    }
  }

  bool fail(RankFailure failure, int64_t peer) {
    g.failure = failure, g.peer = peer;
    return false;
  }

  // NOTE: the futexes are not private, since other processes wait.
  static void sleep(Counter& counter, uint32_t wanted, int64_t ns) {
    const timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
    counter.sleepers.fetch_add(1);
    const uint32_t seen = counter.count.load();
    if (int32_t(seen - wanted) < 0) syscall(SYS_futex, &counter.count, FUTEX_WAIT, seen, &limit, nullptr, 0);
    counter.sleepers.fetch_sub(1);
  }

  void publish(uint32_t count) {
    Counter& own = counter_of(g.rank);
    own.count.store(count);
    if (own.sleepers.load()) syscall(SYS_futex, &own.count, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
  }

  Counter& counter_of(int64_t rank) const {
    return *reinterpret_cast<Counter*>(g.memory + (1 + rank) * kLineBytes);
  }
  // That of the newest exchange.
  float* buffer(int64_t rank) const {
    return reinterpret_cast<float*>(g.memory + kHeaderBytes + (2 * rank + (g.count & 1)) * g.buffer_bytes);
  }

  static int64_t now_ns() {
    return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  RankGroup& g;
};

}  // namespace tandem
