// Causal attention of grouped query heads over keys and values in blocks.
#pragma once

#include "kv_blocks.h"

namespace mesh {

// The queries of some heads, of consecutive positions of one sequence.
struct QueryBlock {
  int first_position, end_position;
  int first_head, end_head;  // of the query heads; not always whole groups
  int group;                 // query heads per kv head
  const float* queries;  // all query heads of the first position, one after the other
  float* outputs;        // likewise
  size_t query_stride;  // floats from one position's heads to the next's
  size_t output_stride;
  float scale;  // of scores
  int window;   // a query sees itself and the window - 1 tokens before it
};

// Computes all of `block`'s outputs. Keys and values of its positions are in the pool already.
// Those of the next tile are fetched while one is computed with, from one head to the next.
//
// A query goes over the tiles of keys that it sees, from the first to the last; tiles begin at
// fixed positions. So its result is the same bit for bit in whatever block it is computed.
//
// Scratch comes from the calling thread's own memory and stays there.
template <class Item>
void attend(const QueryBlock& block, const KvHeads<Item>& heads, int head_dim);

// Positions that are best put into one block.
int positions_per_block(int group);

}  // namespace mesh
