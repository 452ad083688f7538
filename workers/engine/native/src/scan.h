// What sampling asks of a whole vocabulary: which token is the likeliest of each row, what all
// tokens weigh, which come first.
//
// A row is looked at by one thread while it lies in that core's cache, so its results depend on
// nothing but the row. Not-a-number counts as -inf: a token that may not come.
#pragma once

#include <cstdint>

#include "thread_team.h"

namespace mesh {

// Logits of some rows, one behind the other. The layout is part of the C interface, as are those
// of the structs below.
struct LogitRows {
  const float* logits;  // [num_rows, vocab_size]
  int32_t num_rows;
  int32_t vocab_size;

  const float* row(int64_t number) const { return logits + number * vocab_size; }
};

constexpr int kTokensPerRun = 1024;  // tokens whose weights are told as one sum

// Weights are exp((logit - largest) / temperature).
struct RunWeights {
  const float* temperatures;  // [num_rows], above 0
  float* largest;             // [num_rows] logits
  double* sums;               // [num_rows, runs]; the last run may be shorter
};

// Tokens in order: logit descending, id ascending.
struct LikeliestTokens {
  int32_t at_least;  // how many are wanted of each row
  int32_t capacity;  // columns of the tables; `at_least` or more
  int32_t width;     // set to the columns in use, 1 or more
  int64_t* ids;      // [num_rows, capacity]; 0 behind a row's count
  float* logits;     // likewise; -inf behind a row's count
  int64_t* counts;   // [num_rows]; 0 where more than `capacity` reach the bound (equals)
  uint8_t* is_all;   // [num_rows]: whether no other token of the row may come
};

// ids[row] = the first of the row's largest logits; 0 in a row without any.
void find_largest(const LogitRows& rows, int32_t* ids, ThreadTeam& team);

void weigh_runs(const LogitRows& rows, const RunWeights& weights, ThreadTeam& team);

// A row's tokens that reach a bound which `at_least` of them reach: see candidates.py for the idea.
void find_likeliest(const LogitRows& rows, LikeliestTokens& tokens, ThreadTeam& team);

}  // namespace mesh
