#include "attention.h"

#include <algorithm>
#include <limits>

#include "bf16.h"
#include "memory.h"

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
// scores are masked, and sums leave them out.
template <class Item>
void load_tile(const KvHead<Item>& kv, int tile_start, Visible range, int head_dim,
               Scratch& scratch) {
  for (int token = range.first; token < range.last;) {
    const KvRun<Item> run = kv.run(tile_start + token);
    const int count = std::min(run.count, range.last - token);
    widen(run.keys, count * head_dim, scratch.keys.data() + token * head_dim);
    widen(run.values, count * head_dim, scratch.values.data() + token * head_dim);
    token += count;
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

class BlockAttention {
 public:
  BlockAttention(const QueryBlock& block, int head_dim, Scratch& scratch)
      : block_(block), head_dim_(head_dim), scratch_(scratch) {
    num_queries_ = (block.end_position - block.first_position) * block.group;
    scratch.reserve(num_queries_, head_dim);
    const Vec scale = splat(block.scale);
    for (int query = 0; query < num_queries_; ++query) {
      const float* from = block.queries + place(query, block.query_stride);
      for (int at = 0; at < head_dim; at += kWidth) {
        store(of(scratch.queries, query) + at, load(from + at) * scale);
        store(of(scratch.sums, query) + at, Vec{});
      }
      scratch.softmax[static_cast<size_t>(query)] = {-1e30f, 0.0f};
    }
  }

  template <class Item>
  void run(const KvHead<Item>& kv) {
    const int first_seen = std::max(0, block_.first_position + 1 - block_.window);
    for (int start = first_seen / kTile * kTile; start < block_.end_position; start += kTile) {
      const Visible range = {std::max(0, first_seen - start),
                             std::min(kTile, block_.end_position - start)};
      load_tile(kv, start, range, head_dim_, scratch_);
      for (int query = 0; query < num_queries_; ++query) add_tile(query, start);
    }
    for (int query = 0; query < num_queries_; ++query) finish(query);
  }

 private:
  void add_tile(int query, int tile_start) {
    const int position = block_.first_position + query / block_.group;
    const Visible visible = {std::max(0, position + 1 - block_.window - tile_start),
                             std::min(kTile, position + 1 - tile_start)};
    if (visible.first >= visible.last) return;
    float scores[kTile];
    for (int at = visible.first / kWidth * kWidth; at < visible.last; at += kWidth)
      store(scores + at, score(of(scratch_.queries, query),
                               scratch_.keys.data() + at * head_dim_, head_dim_));
    const float shrink = weigh(scores, visible, scratch_.softmax[static_cast<size_t>(query)]);
    add_chunks<kMostChunk>(head_dim_ / kWidth, scores, scratch_.values.data(), visible, head_dim_,
                           shrink, of(scratch_.sums, query));
  }

  void finish(int query) {
    const Vec total = splat(scratch_.softmax[static_cast<size_t>(query)].sum);
    const float* sums = of(scratch_.sums, query);
    float* to = block_.outputs + place(query, block_.output_stride);
    for (int at = 0; at < head_dim_; at += kWidth) store(to + at, load(sums + at) / total);
  }

  float* of(Array<float>& array, int query) const { return array.data() + query * head_dim_; }

  size_t place(int query, size_t stride) const {
    return static_cast<size_t>(query / block_.group) * stride +
           static_cast<size_t>(query % block_.group * head_dim_);
  }

  const QueryBlock& block_;
  const int head_dim_;
  Scratch& scratch_;
  int num_queries_;
};

}  // namespace

template <class Item>
void attend(const QueryBlock& block, const KvHead<Item>& kv, int head_dim) {
  thread_local Scratch scratch;
  BlockAttention(block, head_dim, scratch).run(kv);
}

template void attend(const QueryBlock&, const KvHead<float>&, int);
template void attend(const QueryBlock&, const KvHead<Bf16>&, int);

int positions_per_block(int group) { return std::max(1, kMostQueries / group); }

}  // namespace mesh
