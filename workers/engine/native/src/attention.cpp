#include "attention.h"

#include "attention_tile.h"
#include "memory.h"

namespace mesh {
namespace {

constexpr int kMostQueries = 48;  // per block: their sums stay in the second-level cache

// What a thread needs while it computes a block.
struct Scratch {
  Array<float> keys, values;  // [kTile, head_dim]
  Array<float> queries;       // [num_queries, head_dim], scaled
  Array<float> sums;          // [num_queries, head_dim]
  Array<Softmax> softmax;     // [num_queries]

  void reserve(int num_queries, int head_dim) {
    const auto dim = static_cast<size_t>(head_dim);
    keys.reserve(kTile * dim);
    values.reserve(kTile * dim);
    queries.reserve(static_cast<size_t>(num_queries) * dim);
    sums.reserve(static_cast<size_t>(num_queries) * dim);
    softmax.reserve(static_cast<size_t>(num_queries));
  }
};

template <class Item>
void widen(const Item* from, int size, float* to) {
  for (int at = 0; at < size; at += kWidth) store(to + at, load_items(from + at));
}

// Finds a tile's keys and values in the pool.
template <class Item>
void find_tile(const KvHead<Item>& kv, int tile_start, Visible range, int head_dim,
               Tile<Item>& tile) {
  for (int token = range.first; token < range.last;) {
    KvRun<Item> run = kv.run(tile_start + token);
    for (const int end = std::min(token + run.count, range.last); token < end; ++token) {
      tile.keys[token] = run.keys;
      tile.values[token] = run.values;
      run.keys += head_dim;
      run.values += head_dim;
    }
  }
  for (int token = range.first / kWidth * kWidth; token < range.first; ++token)
    tile.keys[token] = tile.keys[range.first];
  for (int token = range.last; token % kWidth != 0; ++token)
    tile.keys[token] = tile.keys[range.first];
}

// Widens a tile's keys and values, for the many queries that read them. Meanwhile half of the next
// tile is fetched.
template <class Item>
void widen_tile(const Tile<Item>& tile, Visible range, int head_dim, Scratch& scratch,
                Tile<float>& to, TileFetcher<Item>& next) {
  for (int token = 0; token < kTile; ++token) {
    to.keys[token] = scratch.keys.data() + token * head_dim;
    to.values[token] = scratch.values.data() + token * head_dim;
  }
  for (int token = range.first; token < range.last; ++token) {
    widen(tile.keys[token], head_dim, scratch.keys.data() + token * head_dim);
    widen(tile.values[token], head_dim, scratch.values.data() + token * head_dim);
    next.fetch((next.token_lines() + 1) / 2);
  }
}

template <class Item>
class BlockAttention {
 public:
  BlockAttention(const QueryBlock& block, const KvHeads<Item>& heads, int head_dim,
                 Scratch& scratch)
      : block_(block),
        heads_(heads),
        head_dim_(head_dim),
        first_seen_(std::max(0, block.first_position + 1 - block.window)),
        scratch_(scratch),
        next_(head_dim) {
    scratch.reserve((block.end_position - block.first_position) * block.group, head_dim);
  }

  void run() {
    for (int first = block_.first_head; first < block_.end_head; first += num_heads_) {
      const int head = first / block_.group;
      begin(first, std::min((head + 1) * block_.group, block_.end_head));
      for (int start = first_tile(); start < block_.end_position; start += kTile)
        add_tile_of(head, start);
      for (int query = 0; query < num_queries(); ++query) finish(query);
    }
  }

 private:
  int first_tile() const { return first_seen_ / kTile * kTile; }

  // What some query of the block sees.
  Visible range_of(int tile_start) const {
    return {std::max(0, first_seen_ - tile_start),
            std::min(kTile, block_.end_position - tile_start)};
  }

  // Some query heads of one group; what they read of keys and values is the same.
  void begin(int first_head, int end_head) {
    first_head_ = first_head;
    num_heads_ = end_head - first_head;
    const Vec scale = splat(block_.scale);
    for (int query = 0; query < num_queries(); ++query) {
      const float* from = block_.queries + place(query, block_.query_stride);
      for (int at = 0; at < head_dim_; at += kWidth) {
        store(of(scratch_.queries, query) + at, load(from + at) * scale);
        store(of(scratch_.sums, query) + at, Vec{});
      }
      scratch_.softmax[static_cast<size_t>(query)] = {-1e30f, 0.0f};
    }
  }

  // The few queries of one position read keys and values where they are.
  void add_tile_of(int head, int start) {
    aim_behind(head, start);
    const Visible range = range_of(start);
    Tile<Item> tile;
    find_tile(heads_.head(head), start, range, head_dim_, tile);
    if (block_.end_position - block_.first_position == 1) {
      add_to_position(tile, block_.first_position, start);
      return;
    }
    Tile<float> wide;
    widen_tile(tile, range, head_dim_, scratch_, wide, next_);
    for (int position = block_.first_position; position < block_.end_position; ++position)
      add_to_position(wide, position, start);
  }

  // What is computed with after a tile: the head's next one, or the first of the next head.
  void aim_behind(int head, int start) {
    start += kTile;
    if (start >= block_.end_position) {
      start = first_tile();
      if (++head * block_.group >= block_.end_head) return;
    }
    const Visible range = range_of(start);
    next_.aim(heads_.head(head), start + range.first, start + range.last);
  }

  template <class From>
  void add_to_position(const Tile<From>& tile, int position, int tile_start) {
    const Visible visible = {std::max(0, position + 1 - block_.window - tile_start),
                             std::min(kTile, position + 1 - tile_start)};
    if (visible.first >= visible.last) return;
    const int first = (position - block_.first_position) * num_heads_;
    const int num_parts = (num_heads_ + kMostTogether - 1) / kMostTogether;
    for (int part = 0; part < num_parts; ++part) {
      const int begin = num_heads_ * part / num_parts;
      const int count = num_heads_ * (part + 1) / num_parts - begin;
      const int query = first + begin;
      const Queries queries = {of(scratch_.queries, query), of(scratch_.sums, query),
                               scratch_.softmax.data() + query};
      if (count == 1)
        add_tile<1>(tile, visible, head_dim_, queries, next_);
      else if (count == 2)
        add_tile<2>(tile, visible, head_dim_, queries, next_);
      else
        add_tile<kMostTogether>(tile, visible, head_dim_, queries, next_);
    }
  }

  void finish(int query) {
    const Vec total = splat(scratch_.softmax[static_cast<size_t>(query)].sum);
    const float* sums = of(scratch_.sums, query);
    float* to = block_.outputs + place(query, block_.output_stride);
    for (int at = 0; at < head_dim_; at += kWidth) store(to + at, load(sums + at) / total);
  }

  float* of(Array<float>& array, int query) const { return array.data() + query * head_dim_; }

  int num_queries() const { return (block_.end_position - block_.first_position) * num_heads_; }

  size_t place(int query, size_t stride) const {
    return static_cast<size_t>(query / num_heads_) * stride +
           static_cast<size_t>((first_head_ + query % num_heads_) * head_dim_);
  }

  const QueryBlock& block_;
  const KvHeads<Item>& heads_;
  const int head_dim_;
  int first_head_ = 0, num_heads_ = 0;  // the query heads that are computed now
  const int first_seen_;   // the first position that some query sees
  Scratch& scratch_;
  TileFetcher<Item> next_;
};

}  // namespace

template <class Item>
void attend(const QueryBlock& block, const KvHeads<Item>& heads, int head_dim) {
  thread_local Scratch scratch;
  BlockAttention<Item>(block, heads, head_dim, scratch).run();
}

template void attend(const QueryBlock&, const KvHeads<float>&, int);
template void attend(const QueryBlock&, const KvHeads<Bf16>&, int);

int positions_per_block(int group) { return std::max(1, kMostQueries / group); }

}  // namespace mesh
