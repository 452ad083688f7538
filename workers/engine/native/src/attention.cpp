#include "attention.h"

#include <algorithm>
#include <limits>

#include "bf16.h"
#include "memory.h"
#include "tile_fetcher.h"

namespace mesh {
namespace {

constexpr int kTile = 64;       // keys that are widened and used together
constexpr int kMostQueries = 48;  // per block: their sums stay in the second-level cache
constexpr int kMostChunk = 8;   // vectors of a value that are summed together, in registers

// Tokens [first, last) of a tile that a query sees, counted from the tile's beginning.
struct Visible {
  int first, last;
};

// The softmax of a query so far: the largest score, the sum of weights relative to it.
struct Softmax {
  float largest;
  float sum;
};

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

// Copies the tile's keys and values that some query of the block sees. Others are never used: their
// scores are masked, and sums leave them out. Meanwhile half of the next tile is fetched.
template <class Item>
void load_tile(const KvHead<Item>& kv, int tile_start, Visible range, int head_dim,
               Scratch& scratch, TileFetcher<Item>& next) {
  for (int token = range.first; token < range.last;) {
    KvRun<Item> run = kv.run(tile_start + token);
    for (const int end = std::min(token + run.count, range.last); token < end; ++token) {
      widen(run.keys, head_dim, scratch.keys.data() + token * head_dim);
      widen(run.values, head_dim, scratch.values.data() + token * head_dim);
      run.keys += head_dim;
      run.values += head_dim;
      next.fetch((next.token_lines() + 1) / 2);
    }
  }
}

// Scores of kWidth keys.
Vec score(const float* query, const float* keys, int head_dim) {
  Vec sums[kWidth] = {};
  for (int at = 0; at < head_dim; at += kWidth) {
    const Vec part = load(query + at);
    for (int key = 0; key < kWidth; ++key)
      sums[key] = fma(part, load(keys + key * head_dim + at), sums[key]);
  }
  return sum_each(sums);
}

const Vec kLanes = [] {
  float lanes[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] = static_cast<float>(lane);
  return load(lanes);
}();

// `value` in the lanes of visible tokens, `other` elsewhere; lane 0 is token `first`.
Vec where_visible(Vec value, Vec other, int first, Visible visible) {
  const Vec token = kLanes + static_cast<float>(first);
  const Vec hidden_before = token < static_cast<float>(visible.first) ? other : value;
  return token < static_cast<float>(visible.last) ? hidden_before : other;
}

// Turns one query's scores of a tile into weights relative to the largest score so far. Returns
// the factor by which everything before shrinks.
float weigh(float* scores, Visible visible, Softmax& softmax) {
  const Vec lowest = splat(-std::numeric_limits<float>::infinity());
  const int begin = visible.first / kWidth * kWidth;
  Vec most = lowest;
  for (int at = begin; at < visible.last; at += kWidth)
    most = vector_max(most, where_visible(load(scores + at), lowest, at, visible));
  const float largest = std::max(softmax.largest, max_lanes(most));
  Vec total = {};
  for (int at = begin; at < visible.last; at += kWidth) {
    const Vec weight = exponential(load(scores + at) - largest);
    const Vec kept = where_visible(weight, Vec{}, at, visible);
    store(scores + at, kept);
    total = total + kept;
  }
  const float shrink = exponential(splat(softmax.largest - largest))[0];
  softmax.sum = softmax.sum * shrink + sum_lanes(total);
  softmax.largest = largest;
  return shrink;
}

// sums = sums * shrink + weights * values, for `Chunk` vectors of each value.
template <int Chunk>
void add_values(const float* weights, const float* values, Visible visible, int head_dim,
                float shrink, float* sums) {
  Vec chunk[Chunk];
  for (int v = 0; v < Chunk; ++v) chunk[v] = load(sums + v * kWidth) * shrink;
  for (int token = visible.first; token < visible.last; ++token) {
    const Vec weight = splat(weights[token]);
    const float* value = values + token * head_dim;
    for (int v = 0; v < Chunk; ++v) chunk[v] = fma(weight, load(value + v * kWidth), chunk[v]);
  }
  for (int v = 0; v < Chunk; ++v) store(sums + v * kWidth, chunk[v]);
}

template <int Chunk>
void add_chunks(int num_vectors, const float* weights, const float* values, Visible visible,
                int head_dim, float shrink, float* sums) {
  for (; num_vectors >= Chunk; num_vectors -= Chunk) {
    add_values<Chunk>(weights, values, visible, head_dim, shrink, sums);
    values += Chunk * kWidth;
    sums += Chunk * kWidth;
  }
  if constexpr (Chunk > 1) {
    if (num_vectors > 0)
      add_chunks<Chunk - 1>(num_vectors, weights, values, visible, head_dim, shrink, sums);
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
        num_queries_((block.end_position - block.first_position) * block.group),
        first_seen_(std::max(0, block.first_position + 1 - block.window)),
        scratch_(scratch),
        next_(head_dim) {
    scratch.reserve(num_queries_, head_dim);
  }

  void run() {
    for (int head = block_.first_head; head < block_.end_head; ++head) {
      begin(head);
      for (int start = first_tile(); start < block_.end_position; start += kTile)
        add_tile(head, start);
      for (int query = 0; query < num_queries_; ++query) finish(head, query);
    }
  }

 private:
  int first_tile() const { return first_seen_ / kTile * kTile; }

  Visible range_of(int tile_start) const {
    return {std::max(0, first_seen_ - tile_start),
            std::min(kTile, block_.end_position - tile_start)};
  }

  void begin(int head) {
    const Vec scale = splat(block_.scale);
    for (int query = 0; query < num_queries_; ++query) {
      const float* from = block_.queries + place(head, query, block_.query_stride);
      for (int at = 0; at < head_dim_; at += kWidth) {
        store(of(scratch_.queries, query) + at, load(from + at) * scale);
        store(of(scratch_.sums, query) + at, Vec{});
      }
      scratch_.softmax[static_cast<size_t>(query)] = {-1e30f, 0.0f};
    }
  }

  void add_tile(int head, int start) {
    aim_behind(head, start);
    load_tile(heads_.head(head), start, range_of(start), head_dim_, scratch_, next_);
    for (int query = 0; query < num_queries_; ++query) add_to_query(query, start);
  }

  // What is computed with after a tile: the head's next one, or the first of the next head.
  void aim_behind(int head, int start) {
    start += kTile;
    if (start >= block_.end_position) {
      start = first_tile();
      if (++head == block_.end_head) return;
    }
    const Visible range = range_of(start);
    next_.aim(heads_.head(head), start + range.first, start + range.last);
  }

  void add_to_query(int query, int tile_start) {
    const int position = block_.first_position + query / block_.group;
    const Visible visible = {std::max(0, position + 1 - block_.window - tile_start),
                             std::min(kTile, position + 1 - tile_start)};
    if (visible.first >= visible.last) return;
    float scores[kTile];
    for (int at = visible.first / kWidth * kWidth; at < visible.last; at += kWidth) {
      store(scores + at, score(of(scratch_.queries, query),
                               scratch_.keys.data() + at * head_dim_, head_dim_));
      next_.fetch((next_.token_lines() + 1) / 2);
    }
    const float shrink = weigh(scores, visible, scratch_.softmax[static_cast<size_t>(query)]);
    next_.fetch(3 * next_.token_lines());
    add_chunks<kMostChunk>(head_dim_ / kWidth, scores, scratch_.values.data(), visible, head_dim_,
                           shrink, of(scratch_.sums, query));
    next_.fetch(3 * next_.token_lines());
  }

  void finish(int head, int query) {
    const Vec total = splat(scratch_.softmax[static_cast<size_t>(query)].sum);
    const float* sums = of(scratch_.sums, query);
    float* to = block_.outputs + place(head, query, block_.output_stride);
    for (int at = 0; at < head_dim_; at += kWidth) store(to + at, load(sums + at) / total);
  }

  float* of(Array<float>& array, int query) const { return array.data() + query * head_dim_; }

  size_t place(int head, int query, size_t stride) const {
    return static_cast<size_t>(query / block_.group) * stride +
           static_cast<size_t>((head * block_.group + query % block_.group) * head_dim_);
  }

  const QueryBlock& block_;
  const KvHeads<Item>& heads_;
  const int head_dim_;
  const int num_queries_;  // of one head
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
