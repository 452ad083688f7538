// A few threads that share the tasks of one loop after the other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace mesh {

// The calling thread is one of the team. Idle threads spin for some microseconds, as the next loop
// of a step follows at once, and then sleep until woken: between steps a team takes no time.
//
// A decode step is hundreds of loops of some microseconds, and a word that two cores write goes
// back and forth between them in a fifth of one. So the first tasks belong to one thread each,
// which begins without asking anybody; only the others are taken from a common counter. Who makes
// the first ones as large as they may be has the least to share.
//
// One thread calls `run` and `wake` at a time.
class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  // Lets threads that sleep spin again: waking takes them as long as a layer of a small model, and
  // who knows that `run` comes next need not wait for it then.
  void wake();

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

  // What runs, all in one line of the cache. What is no atomic is fixed while a task is open.
  struct alignas(64) Loop {
    std::atomic<uint64_t> word{0};  // | number | num_owned |: changes when there is something to do
    std::atomic<bool> stopping{false};
    uint64_t number = 0;
    Call call = nullptr;
    const void* context = nullptr;
    int64_t first_task = 0;
  };

  // A thread's own line: others only read it, unless they take its task from it.
  struct alignas(64) Member {
    std::atomic<uint64_t> begun{0};  // the last loop whose own task was begun, by whomever
    std::atomic<uint64_t> done{0};   // | loop | how many tasks of it this thread has done |
  };

  void share(int64_t num_tasks, const void* context, Call call);
  void share_part(int64_t num_tasks, const void* context, Call call);
  uint64_t open(int64_t num_tasks, uint64_t num_owned);
  void work(size_t number);
  static bool begin_own(Member& of, uint64_t loop);
  void do_task(Member& by, uint64_t loop, uint64_t task);
  void take_common(Member& by);
  void await_all(uint64_t loop, int64_t num_tasks) const;
  int64_t num_done(uint64_t loop) const;  // of its tasks, by all threads

  // One word says which loop runs, how many tasks it has and which is next, so that a thread that
  // wakes late can't take a number of one loop for a task of another.
  alignas(64) std::atomic<uint64_t> ticket_{0};
  Loop loop_;
  std::unique_ptr<Member[]> members_;  // the calling thread's is the first
  std::vector<std::thread> threads_;
};

}  // namespace mesh
