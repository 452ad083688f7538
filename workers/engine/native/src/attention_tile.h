// What attention does with one tile of keys and values, for some queries of one position.
//
// A query's arithmetic is the same in whatever company: what is computed together shares loads.
#pragma once

#include <algorithm>
#include <limits>

#include "bf16.h"
#include "tile_fetcher.h"

namespace mesh {

constexpr int kTile = 64;         // keys that are used together
constexpr int kMostTogether = 3;  // queries whose sums for four keys fit the registers

// Tokens [first, last) of a tile that a query sees, counted from the tile's beginning.
struct Visible {
  int first, last;
};

// The softmax of a query so far: the largest score, the sum of weights relative to it.
struct Softmax {
  float largest;
  float sum;
};

// Where a tile's keys and values lie: one head's in the pool, or widened copies. There are
// pointers for whole vectors of tokens; what lies behind those nobody sees is read and not used.
template <class Item>
struct Tile {
  const Item* keys[kTile];
  const Item* values[kTile];
};

// Some queries of one position, all [head_dim] rows behind each other.
struct Queries {
  const float* rows;
  float* sums;
  Softmax* softmax;
};

// Scores of a tile's tokens, then their weights.
using Weights = float[kMostTogether][kTile];

// Scores of kWidth keys from `first` on.
template <int Count, class Item>
MESH_INLINE void score(const float* queries, const Item* const* keys, int head_dim, int first,
                       Weights& scores) {
  Vec quads[Count][kWidth / 4];
#pragma GCC unroll 4
  for (int quad = 0; quad < kWidth / 4; ++quad) {
    const Item* const* const four = keys + first + 4 * quad;
    Vec sums[Count][4] = {};
    for (int at = 0; at < head_dim; at += kWidth) {
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) {
        const Vec part = load_items(four[key] + at);
#pragma GCC unroll 3
        for (int query = 0; query < Count; ++query)
          sums[query][key] = fma(load(queries + query * head_dim + at), part, sums[query][key]);
      }
    }
#pragma GCC unroll 3
    for (int query = 0; query < Count; ++query) quads[query][quad] = quads_of(sums[query]);
  }
#pragma GCC unroll 3
  for (int query = 0; query < Count; ++query)
    store(scores[query] + first, join_quads(quads[query]));
}

inline const Vec kLanes = [] {
  float lanes[kWidth];
  for (int lane = 0; lane < kWidth; ++lane) lanes[lane] = static_cast<float>(lane);
  return load(lanes);
}();

// `value` in the lanes of visible tokens, `other` elsewhere; lane 0 is token `first`.
inline Vec where_visible(Vec value, Vec other, int first, Visible visible) {
  const Vec token = kLanes + static_cast<float>(first);
  const Vec hidden_before = token < static_cast<float>(visible.first) ? other : value;
  return token < static_cast<float>(visible.last) ? hidden_before : other;
}

// Turns one query's scores of a tile into weights relative to the largest score so far. Returns
// the factor by which everything before shrinks.
inline float weigh(float* scores, Visible visible, Softmax& softmax) {
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

// sums = sums * shrink + weights * values, for `Chunk` vectors of each value from item `at` on.
template <int Count, int Chunk, class Item, class Fetcher>
MESH_INLINE void add_chunk(const Weights& weights, const float (&shrinks)[kMostTogether],
                           const Item* const* values, Visible visible, int at, int head_dim,
                           float* sums, Fetcher& next) {
  Vec chunk[Count][Chunk];
#pragma GCC unroll 3
  for (int query = 0; query < Count; ++query)
#pragma GCC unroll 8
    for (int v = 0; v < Chunk; ++v)
      chunk[query][v] = load(sums + query * head_dim + at + v * kWidth) * shrinks[query];
  for (int token = visible.first; token < visible.last; ++token) {
    const Item* const value = values[token] + at;
#pragma GCC unroll 8
    for (int v = 0; v < Chunk; ++v) {
      const Vec part = load_items(value + v * kWidth);
#pragma GCC unroll 3
      for (int query = 0; query < Count; ++query)
        chunk[query][v] = fma(splat(weights[query][token]), part, chunk[query][v]);
    }
    next.fetch(1);
  }
#pragma GCC unroll 3
  for (int query = 0; query < Count; ++query)
#pragma GCC unroll 8
    for (int v = 0; v < Chunk; ++v)
      store(sums + query * head_dim + at + v * kWidth, chunk[query][v]);
}

template <int Count, int Chunk, class Item, class Fetcher>
inline void add_values(const Weights& weights, const float (&shrinks)[kMostTogether],
                       const Item* const* values, Visible visible, int at, int head_dim,
                       float* sums, Fetcher& next) {
  for (; head_dim - at >= Chunk * kWidth; at += Chunk * kWidth)
    add_chunk<Count, Chunk>(weights, shrinks, values, visible, at, head_dim, sums, next);
  if constexpr (Chunk > 1) {
    if (at < head_dim)
      add_values<Count, Chunk / 2>(weights, shrinks, values, visible, at, head_dim, sums, next);
  }
}

// Adds a tile to `Count` queries. Meanwhile the next one is fetched.
template <int Count, class Item, class Fetcher>
inline void add_tile(const Tile<Item>& tile, Visible visible, int head_dim, Queries queries,
                     Fetcher& next) {
  constexpr int kChunk = Count == 1 ? 8 : 4;  // sums enough to be added to without waiting
  Weights weights;
  for (int at = visible.first / kWidth * kWidth; at < visible.last; at += kWidth) {
    score<Count>(queries.rows, tile.keys, head_dim, at, weights);
    next.fetch(next.token_lines() * 4);  // half a tile; with a line per value below, all of it
  }
  float shrinks[kMostTogether];
  for (int query = 0; query < Count; ++query)
    shrinks[query] = weigh(weights[query], visible, queries.softmax[query]);
  add_values<Count, kChunk>(weights, shrinks, tile.values, visible, 0, head_dim, queries.sums,
                            next);
}

}  // namespace mesh
