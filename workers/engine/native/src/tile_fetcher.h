// Memory of keys and values, fetched into the cache while others are computed with.
#pragma once

#include <algorithm>
#include <optional>

#include "kv_blocks.h"

namespace mesh {

// Fetches a head's tokens a few lines at a time, between other work: they lie in blocks all over
// the pool, where no processor guesses ahead, and asking for all at once would stop it until most
// have come.
template <class Item>
class TileFetcher {
 public:
  explicit TileFetcher(int head_dim) : token_bytes_(head_dim * static_cast<int>(sizeof(Item))) {}

  // Lines of one token's keys.
  int token_lines() const { return std::max(1, token_bytes_ / kLine); }

  // Aims at positions [first, end) of a head.
  void aim(const KvHead<Item>& head, int first, int end) {
    head_.emplace(head);
    position_ = first;
    end_ = end;
    bytes_left_ = 0;
  }

  // Fetches the next `count` lines of keys, and as many of values, or all that are left.
  void fetch(int count) {
    for (; count > 0; --count) {
      if (bytes_left_ <= 0 && !enter_next_run()) return;
      __builtin_prefetch(keys_);
      __builtin_prefetch(values_);
      keys_ += kLine;
      values_ += kLine;
      bytes_left_ -= kLine;
    }
  }

 private:
  static constexpr int kLine = 64;

  bool enter_next_run() {
    if (position_ >= end_) return false;
    const KvRun<Item> run = head_->run(position_);
    const int count = std::min(run.count, end_ - position_);
    keys_ = reinterpret_cast<const char*>(run.keys);
    values_ = reinterpret_cast<const char*>(run.values);
    bytes_left_ = count * token_bytes_;
    position_ += count;
    return true;
  }

  const int token_bytes_;
  std::optional<KvHead<Item>> head_;
  int position_ = 0, end_ = 0;
  const char* keys_ = nullptr;
  const char* values_ = nullptr;
  int bytes_left_ = 0;
};

}  // namespace mesh
