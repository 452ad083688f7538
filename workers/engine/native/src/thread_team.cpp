#include "thread_team.h"

#include <immintrin.h>

#include <algorithm>

namespace mesh {
namespace {

// Numbers of loops: 44 bits last for years. A word of one is | loop 44 bits | small 20 bits |.
constexpr int kSmallBits = 20;
constexpr uint64_t kSmallMask = (uint64_t{1} << kSmallBits) - 1;
constexpr int64_t kMostTasks = int64_t{1} << (kSmallBits - 1);  // room for calls that come too late

// About 30 us: longer than the single-threaded parts of a decode step (rows of one norm), shorter
// than what the operating system takes to notice.
constexpr int kSpins = 1000;

uint64_t make_word(uint64_t loop, uint64_t small) { return loop << kSmallBits | small; }
uint64_t loop_of(uint64_t word) { return word >> kSmallBits; }
uint64_t small_of(uint64_t word) { return word & kSmallMask; }

// | the lowest 24 bits of the loop's number | tasks 20 bits | next 20 bits |
uint64_t make_ticket(uint64_t loop, int64_t num_tasks, uint64_t next) {
  return make_word(make_word(loop, static_cast<uint64_t>(num_tasks)), next);
}
uint64_t next_of(uint64_t ticket) { return small_of(ticket); }
bool is_used_up(uint64_t ticket) { return small_of(ticket) >= small_of(loop_of(ticket)); }

// Returns when `word` differs from `old`.
void wait_while(const std::atomic<uint64_t>& word, uint64_t old) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != old) return;
    _mm_pause();
  }
  while (word.load(std::memory_order_acquire) == old) word.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadTeam::ThreadTeam(int num_threads)
    : members_(new Member[static_cast<size_t>(std::max(num_threads, 1))]) {
  for (int number = 1; number < num_threads; ++number)
    threads_.emplace_back([this, number] { work(static_cast<size_t>(number)); });
}

ThreadTeam::~ThreadTeam() {
  loop_.stopping.store(true, std::memory_order_release);
  loop_.word.fetch_add(make_word(1, 0), std::memory_order_acq_rel);
  loop_.word.notify_all();
  for (auto& thread : threads_) thread.join();
}

void ThreadTeam::wake() {
  if (!threads_.empty()) open(0, 0);  // a loop without tasks
}

void ThreadTeam::share(int64_t num_tasks, const void* context, Call call) {
  for (int64_t first = 0; first < num_tasks; first += kMostTasks) {
    loop_.first_task = first;
    share_part(std::min(kMostTasks, num_tasks - first), context, call);
  }
}

void ThreadTeam::share_part(int64_t num_tasks, const void* context, Call call) {
  loop_.call = call;
  loop_.context = context;
  const auto num_owned = static_cast<uint64_t>(std::min<int64_t>(num_tasks, size()));
  const uint64_t loop = open(num_tasks, num_owned);
  Member& own = members_[0];
  if (begin_own(own, loop)) do_task(own, loop, 0);
  take_common(own);
  for (uint64_t number = 1; number < num_owned; ++number)  // of those that have not come so far
    if (begin_own(members_[number], loop)) do_task(own, loop, number);
  await_all(loop, num_tasks);
}

// Makes the next loop visible; returns its number.
uint64_t ThreadTeam::open(int64_t num_tasks, uint64_t num_owned) {
  const uint64_t loop = ++loop_.number;
  ticket_.store(make_ticket(loop, num_tasks, num_owned), std::memory_order_release);
  loop_.word.store(make_word(loop, num_owned), std::memory_order_release);
  loop_.word.notify_all();
  return loop;
}

bool ThreadTeam::begin_own(Member& of, uint64_t loop) {
  uint64_t begun = of.begun.load(std::memory_order_acquire);
  return begun < loop && of.begun.compare_exchange_strong(begun, loop, std::memory_order_acq_rel);
}

void ThreadTeam::do_task(Member& by, uint64_t loop, uint64_t task) {
  loop_.call(loop_.context, loop_.first_task + static_cast<int64_t>(task));
  const uint64_t before = by.done.load(std::memory_order_relaxed);
  const uint64_t count = loop_of(before) == loop ? small_of(before) + 1 : 1;
  by.done.store(make_word(loop, count), std::memory_order_release);
}

void ThreadTeam::take_common(Member& by) {
  while (!is_used_up(ticket_.load(std::memory_order_acquire))) {
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (is_used_up(ticket)) return;
    do_task(by, loop_.number, next_of(ticket));
  }
}

int64_t ThreadTeam::num_done(uint64_t loop) const {
  int64_t total = 0;
  for (size_t number = 0; number <= threads_.size(); ++number) {
    const uint64_t done = members_[number].done.load(std::memory_order_acquire);
    if (loop_of(done) == loop) total += static_cast<int64_t>(small_of(done));
  }
  return total;
}

// What is waited for takes some microseconds, or as long as the system lets another have its core.
void ThreadTeam::await_all(uint64_t loop, int64_t num_tasks) const {
  for (int spin = 0; num_done(loop) != num_tasks; ++spin) {
    if (spin < kSpins)
      _mm_pause();
    else
      std::this_thread::yield();
  }
}

void ThreadTeam::work(size_t number) {
  Member& own = members_[number];
  for (uint64_t seen = 0;;) {
    wait_while(loop_.word, seen);
    if (loop_.stopping.load(std::memory_order_acquire)) return;
    seen = loop_.word.load(std::memory_order_acquire);
    const uint64_t loop = loop_of(seen);
    if (number < small_of(seen) && begin_own(own, loop)) do_task(own, loop, number);
    take_common(own);
  }
}

}  // namespace mesh
