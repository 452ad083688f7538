// A few threads that share the tasks of one loop after the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace mesh {

// The calling thread is one of the team. Idle threads spin for some microseconds, as the next loop
// of a step follows at once, and then sleep until woken: between steps a team takes no time.
//
// One thread calls `run` at a time.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(task) once for each task in [0, num_tasks), by any thread, in any order, and
  // returns when all are done. What a task does must not depend on who does it.
  template <class Body>
  void run(int64_t num_tasks, const Body& body) {
    if (num_tasks <= 1 || threads_.empty()) {
      for (int64_t task = 0; task < num_tasks; ++task) body(task);
      return;
    }
    share(num_tasks, &body, [](const void* context, int64_t task) {
      (*static_cast<const Body*>(context))(task);
    });
  }

 private:
  using Call = void (*)(const void* context, int64_t task);

  void share(int64_t num_tasks, const void* context, Call call);
  void share_part(int64_t num_tasks, const void* context, Call call);
  void work();
  void take_tasks(uint64_t ticket);

  // One word says which loop runs, how many tasks it has and which is next, so that a thread that
  // wakes late can't take a number of one loop for a task of another.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> num_done_{0};
  alignas(64) std::atomic<uint32_t> loop_{0};  // changes when there is something to do
  std::atomic<bool> stopping_{false};
  Call call_ = nullptr;              // of the loop that runs; fixed while a task is open
  const void* context_ = nullptr;
  int64_t first_task_ = 0;
  std::vector<std::thread> threads_;
};

}  // namespace mesh
