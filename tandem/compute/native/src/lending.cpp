// Helper threads on cores that other processes lend (`core_board.py`), for the pool.
#include <sched.h>

#include "calls.h"
#include "pool.h"

using namespace tandem;

// `ok`: 1 = the lender's helpers run.
TANDEM_EXPORT void tandem_borrow_cores(const BorrowCoresArguments* a) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (int64_t i = 0; i < a->num_cpus; ++i)
    if (a->cpus[i] >= 0 && a->cpus[i] < CPU_SETSIZE) CPU_SET(int(a->cpus[i]), &cpus);
  const Lender lender{reinterpret_cast<const std::atomic<int32_t>*>(a->busy), int(a->threads)};
  *a->ok = Pool::borrow(lender, a->num_cpus ? &cpus : nullptr);
}

TANDEM_EXPORT void tandem_borrowed_time(const BorrowedTimeArguments* a) { *a->ns = Pool::borrowed_ns(); }
