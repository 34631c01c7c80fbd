// Thread pool whose helpers join a call if they are free; no call waits for one that is not.
//
// Items are divided into units, and units into a contiguous lane for each participant, which takes units from the front
// of its own lane and then from the ends of the others'. The caller takes part, computes all units that no helper took,
// and only waits for units that a helper has begun. It is random which thread computes a unit, so a body must give the
// same bits on any thread.
//
// One call at a time has helpers; others meanwhile compute alone. Idle helpers sleep. The pool is never freed and its
// threads are detached, so that the process may exit at any time; a forked child begins without a pool.
//
// A few helpers are kept off the caller's core. One that wakes up while every core is taken would otherwise queue
// behind the caller, and stay there while another core falls idle: the kernel moves no thread that has just run.
//
// Other processes may lend their cores: for each such core there is one more helper, which sleeps while the lender is
// busy, and stops after its current unit when the lender becomes busy.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>

#include "common.h"

namespace tandem {

// How many threads a call is worth, and how its items are dealt out.
struct Split {
  int64_t grain;  // items in a unit
  int threads;
  bool ordered = false;  // one lane for all: units are started in order, a free participant takes the next
  int lent = 0;  // of the threads, on cores of others
};

// Another process's cores; it sets `busy` in memory that both map.
struct Lender {
  const std::atomic<int32_t>* busy;
  int threads;
};

constexpr double kWorthyNs = 25e3;  // below this, a second thread costs more than it takes off
constexpr double kShareNs = 12e3;   // the least work worth another thread
constexpr double kMinUnitNs = 4e3, kMaxUnitNs = 40e3;
constexpr int kUnitsPerThread = 16;

class Pool {
 public:
  // Calls body(first, last) for disjoint ranges that cover [0, items); all have returned when this does.
  template <class Body> static void run(int64_t items, Split split, const Body& body) {
    if (items <= 0) return;
    Pool* pool = split.threads > 1 ? claim() : nullptr;
    if (!pool) return body(0, items);
    const Job job{[](const void* b, int64_t first, int64_t last) { (*static_cast<const Body*>(b))(first, last); },
                  &body, items, max64(split.grain, ceil_div(items, kMaxUnits))};
    pool->run(job, int(min64(split.threads, kMaxThreads)), split.lent, split.ordered);
    pool->busy_.store(false, std::memory_order_release);
  }

  // Threads that run on cores of others and may be used now.
  static int lent() {
    const Pool* pool = current().load(std::memory_order_acquire);
    int found = 0;
    for (int i = pool ? pool->num_lenders_.load(std::memory_order_acquire) : 0; i-- > 0;)
      if (pool->lenders_[i].is_idle()) found += pool->lenders_[i].lender.threads;
    return found;
  }

  // What lent threads have worked for this process so far, each for itself.
  static int64_t borrowed_ns() {
    const Pool* pool = current().load(std::memory_order_acquire);
    return pool ? pool->borrowed_ns_.load(std::memory_order_relaxed) : 0;
  }

  // Starts a lender's helpers on its cores (none: wherever the kernel puts them). False: some could not be started.
  static bool borrow(const Lender& lender, const cpu_set_t* cpus) {
    Pool* pool = current().load(std::memory_order_acquire);
    if (!pool) pool = create();
    const int index = pool ? pool->num_lenders_.load() : kMaxLenders;
    if (index == kMaxLenders) return false;
    pool->lenders_[index].lender = lender;
    for (int i = 0; i < lender.threads; ++i)
      if (pthread_t ignored; !start_thread({pool, &pool->lenders_[index]}, cpus, &ignored)) return false;
    pool->num_lenders_.store(index + 1, std::memory_order_release);
    return true;
  }

 private:
  static constexpr int kMaxLenders = 64;
  static constexpr int kMaxThreads = 256;
  static constexpr int kMaxKeptOff = 7;  // helpers; each costs a system call, and matters the less the more there are
  static constexpr int64_t kMaxUnits = 0xffff;
  static constexpr int64_t kSpinNs = 50'000;  // a decode step calls again within this, mostly

  struct Job {
    void (*body)(const void*, int64_t, int64_t);
    const void* context;
    int64_t items, grain;
  };

  // What is left to claim: a lane's units, or the seats for participants. It carries the number of its call, so that a
  // helper that comes too late claims nothing; what it reads of a call after a claim is therefore that call's.
  struct Range {
    uint32_t call;
    uint16_t begin, end;
  };
  struct alignas(64) Lane {
    std::atomic<Range> units{Range{}};
  };

  // Where helpers wait for a call.
  struct alignas(64) Door {
    std::atomic<uint32_t> call{0};  // number of the newest one
    std::atomic<int> sleepers{0};
    void open(uint32_t newest) {
      call.store(newest);
      if (sleepers.load() > 0) wake(call, kMaxThreads);
    }
  };

  struct Borrowed {
    Lender lender{};
    Door door;
    bool is_idle() const { return !lender.busy->load(std::memory_order_relaxed); }
  };

  // The process's pool if nobody is using it; otherwise nullptr, and the caller computes alone.
  static Pool* claim() {
    Pool* pool = current().load(std::memory_order_acquire);
    if (!pool) pool = create();
    return pool && !pool->busy_.exchange(true, std::memory_order_acquire) ? pool : nullptr;
  }

  static std::atomic<Pool*>& current() {
    static std::atomic<Pool*> pool{nullptr};
    return pool;
  }

  static Pool* create() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); });
    Pool *fresh = registered == 0 ? new (std::nothrow) Pool : nullptr, *present = nullptr;
    if (fresh && current().compare_exchange_strong(present, fresh)) return fresh;
    delete fresh;
    return present;
  }

  void run(const Job& job, int threads, int lent, bool ordered) {
    const int own = threads - 1 - lent;
    if (!hire(own) && !lent) return job.body(job.context, 0, job.items);
    if (const int cpu = sched_getcpu(); cpu != kept_off_ && num_helpers_ <= kMaxKeptOff) keep_helpers_off(cpu);
    const int64_t units = ceil_div(job.items, job.grain);
    const uint32_t call = publish(job, units, threads, ordered ? 1 : threads);
    const int sleeping = own_.sleepers.load(), awake = num_helpers_ - sleeping;
    if (sleeping > 0 && awake < own) wake(own_.call, own - awake);
    for (int i = lent > 0 ? num_lenders_.load() : 0; i-- > 0;)
      if (lenders_[i].is_idle()) lenders_[i].door.open(call);
    work(call, 0, nullptr);
    if (pending_.load(std::memory_order_acquire) != 0) wait();
  }

  uint32_t publish(const Job& job, int64_t units, int threads, int lanes) {
    const uint32_t call = own_.call.load(std::memory_order_relaxed) + 1;
    job_ = job;
    num_lanes_.store(lanes, std::memory_order_relaxed);
    pending_.store(uint32_t(units), std::memory_order_relaxed);
    for (int i = 0; i < lanes; ++i)
      lanes_[i].units.store({call, uint16_t(units * i / lanes), uint16_t(units * (i + 1) / lanes)});
    seats_.store({call, 1, uint16_t(threads)});
    own_.call.store(call);
    return call;
  }

  // Lets own helpers run wherever the caller may but on `cpu`, if that leaves a core for each.
  void keep_helpers_off(int cpu) {
    kept_off_ = cpu;
    cpu_set_t cpus;
    if (cpu < 0 || cpu >= CPU_SETSIZE || sched_getaffinity(0, sizeof cpus, &cpus) != 0) return;
    CPU_CLR(cpu, &cpus);
    if (CPU_COUNT(&cpus) < num_helpers_) return;
    for (int i = 0; i < num_helpers_; ++i) pthread_setaffinity_np(own_threads_[i], sizeof cpus, &cpus);
  }

  // Waits for the units that helpers are computing.
  void wait() {
    const int64_t start = now_ns();
    while (uint32_t left = pending_.load()) {
      if (now_ns() - start < kSpinNs) {
        relax();
      } else {  // leaves the core to the helper
        caller_sleeps_.store(true);
        sleep(pending_, left);
        caller_sleeps_.store(false);
      }
    }
  }

  // Computes what can be claimed of `call`, which is over when nothing can, or until the lender wants its core back.
  void work(uint32_t call, int seat, const Borrowed* lender) {
    const int lanes = num_lanes_.load(std::memory_order_relaxed);
    for (int i = 0; i < lanes; ++i) {
      std::atomic<Range>& lane = lanes_[(seat + i) % lanes].units;
      for (;;) {
        if (lender && !lender->is_idle()) return;
        const int64_t unit = take(lane, call, i == 0);
        if (unit < 0) break;
        const int64_t first = unit * job_.grain;
        job_.body(job_.context, first, min64(first + job_.grain, job_.items));
        if (pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) wake(pending_, 1);
      }
    }
  }

  static int64_t take(std::atomic<Range>& from, uint32_t call, bool front) {
    Range seen = from.load();
    while (seen.call == call && seen.begin < seen.end) {
      Range left = seen;
      const int64_t taken = front ? left.begin++ : --left.end;
      if (from.compare_exchange_weak(seen, left)) return taken;
    }
    return -1;
  }

  void help(Borrowed* lender) {
    Door& door = lender ? lender->door : own_;
    for (uint32_t call = 0;;) {
      call = await_call(door, call);
      const int64_t seat = take(seats_, call, true);
      if (seat < 0) continue;
      const int64_t start = lender ? now_ns() : 0;
      work(call, int(seat), lender);
      if (lender) borrowed_ns_.fetch_add(now_ns() - start, std::memory_order_relaxed);
    }
  }

  static uint32_t await_call(Door& door, uint32_t last) {
    const int64_t start = now_ns();
    for (;;) {
      for (int i = 0; i < 16; ++i) {
        const uint32_t call = door.call.load(std::memory_order_acquire);
        if (call != last) return call;
        relax();
      }
      if (now_ns() - start < kSpinNs) continue;
      door.sleepers.fetch_add(1);
      while (door.call.load() == last) sleep(door.call, last);
      door.sleepers.fetch_sub(1);
    }
  }

  // Starts helpers until there are `wanted`, or no more can be had; returns whether there are any.
  bool hire(int wanted) {
    while (num_helpers_ < wanted && start_thread({this, nullptr}, nullptr, &own_threads_[num_helpers_])) {
      ++num_helpers_;
      kept_off_ = -1;
    }
    return num_helpers_ > 0;
  }

  struct Post {
    Pool* pool;
    Borrowed* lender;
  };

  static bool start_thread(Post post, const cpu_set_t* cpus, pthread_t* thread) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    sigset_t all, before;  // signals belong to the threads that the process knows of
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto main = [](void* given) -> void* {
      const Post taken = *static_cast<Post*>(given);
      delete static_cast<Post*>(given);
      return taken.pool->help(taken.lender), nullptr;
    };
    Post* const given = new (std::nothrow) Post(post);
    const bool started = given && (!cpus || pthread_attr_setaffinity_np(&attributes, sizeof *cpus, cpus) == 0) &&
                         pthread_create(thread, &attributes, main, given) == 0;
    if (started) pthread_detach(*thread);
    else delete given;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    return started;
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
  static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  }

  std::atomic<bool> busy_{false};
  Door own_;
  std::atomic<Range> seats_{Range{}};
  alignas(64) std::atomic<uint32_t> pending_{0};  // units of this call that are not done
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) Job job_{};
  std::atomic<int> num_lanes_{1};
  Lane lanes_[kMaxThreads];
  std::atomic<int> num_lenders_{0};
  Borrowed lenders_[kMaxLenders];
  std::atomic<int64_t> borrowed_ns_{0};
  int num_helpers_ = 0;  // from here on: accessed by the thread that holds busy_
  int kept_off_ = -1;  // where the caller was when own helpers were last told
  pthread_t own_threads_[kMaxThreads]{};
};

// `cost_ns`: what all `items` together would take one thread.
inline Split split(int64_t items, double cost_ns, int64_t own_threads) {
  const double most = cost_ns < kWorthyNs ? 1.0 : cost_ns / kShareNs;
  const int64_t max_threads = own_threads + (most > double(own_threads) ? Pool::lent() : 0);
  const int threads = int(std::max(1.0, std::min(most, double(std::min(items, max_threads)))));
  const double unit_ns = std::min(std::max(cost_ns / (threads * kUnitsPerThread), kMinUnitNs), kMaxUnitNs);
  const int64_t grain = int64_t(double(items) * std::min(1.0, unit_ns / std::max(cost_ns, 1.0)));
  return {std::max<int64_t>(1, grain), threads, false, int(std::max<int64_t>(0, threads - own_threads))};
}

}  // namespace tandem
