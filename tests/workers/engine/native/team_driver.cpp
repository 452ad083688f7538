// Loops of all sizes by teams of all sizes, for the thread sanitizer: what each task writes without
// a lock is read by whoever runs the next loop, so a task that is done twice, late or not at all
// is a race or a wrong sum.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "thread_team.h"

namespace {

constexpr int kLoops = 3000;
constexpr int kMostTasks = 9;

bool runs_each_task_once(int num_threads) {
  mesh::ThreadTeam team(num_threads);
  std::vector<int> counts(kMostTasks);
  for (int loop = 0; loop < kLoops; ++loop) {
    const int num_tasks = loop % (kMostTasks + 1);
    if (loop % 500 == 499)  // long enough for idle threads to fall asleep
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (loop % 4 == 3) team.wake();
    team.run(num_tasks, [&](int64_t task) { ++counts[static_cast<size_t>(task)]; });
    for (int task = 0; task < num_tasks; ++task) {
      if (counts[static_cast<size_t>(task)] != 1) return false;
      counts[static_cast<size_t>(task)] = 0;
    }
  }
  return true;
}

bool runs_more_tasks_than_fit_in_a_word() {
  mesh::ThreadTeam team(2);
  const int64_t num_tasks = (int64_t{1} << 19) + 12345;
  std::vector<uint8_t> counts(static_cast<size_t>(num_tasks));
  team.run(num_tasks, [&](int64_t task) { ++counts[static_cast<size_t>(task)]; });
  for (const uint8_t count : counts)
    if (count != 1) return false;
  return true;
}

}  // namespace

int main() {
  for (int num_threads = 1; num_threads <= 5; ++num_threads)
    if (!runs_each_task_once(num_threads)) {
      std::printf("%d threads: a task was not done once\n", num_threads);
      return 1;
    }
  std::puts(runs_more_tasks_than_fit_in_a_word() ? "ok" : "many tasks: one was not done once");
  return 0;
}
