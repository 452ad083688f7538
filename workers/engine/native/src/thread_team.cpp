#include "thread_team.h"

#include <immintrin.h>

#include <algorithm>

namespace mesh {
namespace {

// ticket: | loop 24 bits | tasks 20 bits | next 20 bits |
constexpr int kTaskBits = 20;
constexpr uint64_t kTaskMask = (uint64_t{1} << kTaskBits) - 1;
constexpr int64_t kMostTasks = int64_t{1} << (kTaskBits - 1);  // room for calls that come too late

// About 30 us: longer than the single-threaded parts of a decode step (rows of one norm), shorter
// than what the operating system takes to notice.
constexpr int kSpins = 1000;

uint64_t make_ticket(uint32_t loop, int64_t num_tasks) {
  return uint64_t{loop} << (2 * kTaskBits) | static_cast<uint64_t>(num_tasks) << kTaskBits;
}

// Returns when `word` differs from `old`.
void wait_while(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadTeam::ThreadTeam(int num_threads) {
  for (int number = 1; number < num_threads; ++number)
    threads_.emplace_back([this] { work(); });
}

ThreadTeam::~ThreadTeam() {
  stopping_.store(true, std::memory_order_release);
  loop_.fetch_add(1, std::memory_order_acq_rel);
  loop_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadTeam::share(int64_t num_tasks, const void* context, Call call) {
  for (int64_t first = 0; first < num_tasks; first += kMostTasks) {
    first_task_ = first;
    share_part(std::min(kMostTasks, num_tasks - first), context, call);
  }
}

void ThreadTeam::share_part(int64_t num_tasks, const void* context, Call call) {
  call_ = call;
  context_ = context;
  num_done_.store(0, std::memory_order_relaxed);
  const uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  ticket_.store(make_ticket(loop, num_tasks), std::memory_order_release);
  loop_.store(loop, std::memory_order_release);
  loop_.notify_all();
  take_tasks(ticket_.fetch_add(1, std::memory_order_acq_rel));
  for (uint32_t done; (done = num_done_.load(std::memory_order_acquire)) != num_tasks;)
    wait_while(num_done_, done);
}

void ThreadTeam::take_tasks(uint64_t ticket) {
  while ((ticket & kTaskMask) < (ticket >> kTaskBits & kTaskMask)) {
    const uint64_t num_tasks = ticket >> kTaskBits & kTaskMask;
    call_(context_, first_task_ + static_cast<int64_t>(ticket & kTaskMask));
    if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_tasks) num_done_.notify_one();
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
  }
}

void ThreadTeam::work() {
  for (uint32_t seen = 0;;) {
    wait_while(loop_, seen);
    if (stopping_.load(std::memory_order_acquire)) return;
    seen = loop_.load(std::memory_order_acquire);
    take_tasks(ticket_.fetch_add(1, std::memory_order_acq_rel));
  }
}

}  // namespace mesh
