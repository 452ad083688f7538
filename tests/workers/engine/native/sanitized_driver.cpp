// Runs the native code over many shapes, for a build with address and undefined-behaviour
// sanitizers. Every buffer that it hands over has exactly the size that the interface asks for.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <vector>

#include "abi.h"

using namespace mesh;

namespace {

std::mt19937 generator(1);

float random_float() { return std::uniform_real_distribution<float>(-0.2f, 0.2f)(generator); }
int random_int(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

std::vector<float> random_floats(size_t count) {
  std::vector<float> made(count);
  for (float& item : made) item = random_float();
  return made;
}

void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void demand_no(const char* error) { demand(error == nullptr, error); }

PackedLinear* random_linear(WeightKind kind, int num_outputs, int num_inputs) {
  const char* error = nullptr;
  PackedLinear* made = mesh_linear_new(static_cast<int32_t>(kind), num_outputs, num_inputs, &error);
  demand_no(error);
  const auto weights =
      random_floats(static_cast<size_t>(num_outputs) * static_cast<size_t>(num_inputs));
  const auto bias = random_floats(static_cast<size_t>(num_outputs));
  demand_no(mesh_linear_fill(made, 0, num_outputs, weights.data(),
                             static_cast<int32_t>(SourceKind::kFp32), bias.data()));
  return made;
}

struct FreeModel {
  void operator()(Model* model) const { mesh_model_free(model); }
};
using OwnedModel = std::unique_ptr<Model, FreeModel>;

void give(Model& model, int layer, Role role, WeightKind kind, int outputs, int inputs) {
  mesh_model_give(&model, layer, static_cast<int32_t>(role), random_linear(kind, outputs, inputs));
}

void set_norm(Model& model, int layer, Role role, int size) {
  const auto weights = random_floats(static_cast<size_t>(size));
  demand_no(mesh_model_set_norm(&model, layer, static_cast<int32_t>(role), weights.data(), size));
}

OwnedModel random_model(const ModelShape& shape, WeightKind kind, int num_threads) {
  const char* error = nullptr;
  OwnedModel model(mesh_model_new(&shape, num_threads, &error));
  demand_no(error);
  const int heads = shape.num_heads * shape.head_dim, kv_heads = shape.num_kv_heads * shape.head_dim;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    set_norm(*model, layer, Role::kInputNorm, shape.hidden_size);
    set_norm(*model, layer, Role::kPostNorm, shape.hidden_size);
    set_norm(*model, layer, Role::kQueryNorm, shape.head_dim);
    set_norm(*model, layer, Role::kKeyNorm, shape.head_dim);
    give(*model, layer, Role::kQueryKeyValue, kind, heads, shape.hidden_size);
    give(*model, layer, Role::kQueryKeyValue, kind, 2 * kv_heads, shape.hidden_size);
    give(*model, layer, Role::kOutput, kind, shape.hidden_size, heads);
    give(*model, layer, Role::kGateUp, kind, 2 * shape.intermediate_size, shape.hidden_size);
    give(*model, layer, Role::kDown, kind, shape.hidden_size, shape.intermediate_size);
    mesh_model_set_window(model.get(), layer, layer == 0 ? 1 << 30 : 20);
  }
  set_norm(*model, 0, Role::kFinalNorm, shape.hidden_size);
  give(*model, 0, Role::kHead, kind, shape.vocab_size, shape.hidden_size);
  return model;
}

struct Sequence {
  std::vector<int32_t> blocks;
  int length = 0;
};

// Runs some steps of three sequences; each step gives each of them a random number of tokens.
void run_steps(Model& model, const ModelShape& shape, size_t item_bytes) {
  constexpr int kPositions = 200;
  const int blocks_each = (kPositions + shape.block_size - 1) / shape.block_size;
  const size_t block_items = KvShape{shape.num_layers, shape.num_kv_heads, shape.head_dim,
                                     shape.block_size}.block_items();
  std::vector<std::byte> pool(static_cast<size_t>(3 * blocks_each) * block_items * item_bytes,
                              std::byte{0xff});
  const auto cosines = random_floats(static_cast<size_t>(kPositions * shape.head_dim / 2));
  const auto sines = random_floats(static_cast<size_t>(kPositions * shape.head_dim / 2));
  std::vector<Sequence> sequences(3);
  for (int block = 0; block < 3 * blocks_each; ++block)
    sequences[static_cast<size_t>(block % 3)].blocks.push_back(block);
  for (const int most : {90, 1, 70, 1, 30}) {
    std::vector<Span> spans;
    std::vector<int32_t> token_ids, tables;
    int num_logits = 0;
    for (Sequence& sequence : sequences) {
      const int count = random_int(1, most);
      const int end = sequence.length + count;
      const bool is_wanted = random_int(0, 3) > 0;
      spans.push_back({static_cast<int32_t>(token_ids.size()), count, sequence.length,
                       static_cast<int32_t>(tables.size()), is_wanted ? num_logits++ : -1});
      for (int at = 0; at < count; ++at) token_ids.push_back(random_int(0, shape.vocab_size - 1));
      const int num_blocks = (end + shape.block_size - 1) / shape.block_size;
      tables.insert(tables.end(), sequence.blocks.begin(), sequence.blocks.begin() + num_blocks);
      sequence.length = end;
    }
    std::vector<float> logits(static_cast<size_t>(num_logits * shape.vocab_size), NAN);
    const Batch batch = {static_cast<int32_t>(token_ids.size()), 3, token_ids.data(), spans.data(),
                         tables.data(), cosines.data(), sines.data(), pool.data(), logits.data()};
    mesh_model_wake(&model);
    demand_no(mesh_model_run(&model, &batch));
    for (const float logit : logits) demand(std::isfinite(logit), "a logit is no number");
  }
}

// Rows of every length around those of vectors and runs, with infinities and not-a-number in them.
void scan_rows(int vocab_size, int at_least) {
  constexpr int kRows = 5;
  const ModelShape shape = {1, 16, 1, 1, 16, 16, 16, 1, KvKind::kFp32, 1e-5f, 0.1f};
  const char* error = nullptr;
  OwnedModel model(mesh_model_new(&shape, 1 + vocab_size % 3, &error));
  demand_no(error);
  const auto size = static_cast<size_t>(vocab_size);
  auto logits = random_floats(kRows * size);
  std::fill_n(logits.begin(), size, NAN);
  std::fill_n(logits.begin() + size, size, -INFINITY);
  std::fill_n(logits.begin() + 2 * size, size, 0.5f);
  logits[3 * size] = NAN;
  const LogitRows rows = {logits.data(), kRows, vocab_size};
  std::vector<int32_t> ids(kRows);
  demand_no(mesh_model_find_largest(model.get(), &rows, ids.data()));
  for (const int32_t id : ids) demand(id >= 0 && id < vocab_size, "no such token");
  const std::vector<float> temperatures(kRows, 0.7f);
  std::vector<float> largest(kRows);
  std::vector<double> sums(kRows * ((size + kTokensPerRun - 1) / kTokensPerRun));
  const RunWeights weights = {temperatures.data(), largest.data(), sums.data()};
  demand_no(mesh_model_weigh_runs(model.get(), &rows, &weights));
  for (const double sum : sums) demand(std::isfinite(sum), "a weight is no number");
  const int capacity = std::min(8 * at_least, vocab_size);
  std::vector<int64_t> table(static_cast<size_t>(kRows * capacity)), counts(kRows);
  std::vector<float> found(table.size());
  std::vector<uint8_t> is_all(kRows);
  LikeliestTokens tokens = {std::min(at_least, vocab_size), capacity, 0, table.data(),
                            found.data(), counts.data(), is_all.data()};
  demand_no(mesh_model_find_likeliest(model.get(), &rows, &tokens));
  demand(counts[0] == 0 && counts[1] == 0, "a row without numbers has candidates");
  demand(tokens.width >= 1 && tokens.width <= capacity, "a width out of its range");
}

void check_refusals() {
  const char* error = nullptr;
  demand(mesh_linear_new(99, 16, 16, &error) == nullptr && error != nullptr, "kind 99 was made");
  PackedLinear* linear = random_linear(WeightKind::kBf16, 5, 32);
  const std::vector<float> row(32);
  demand(mesh_linear_fill(linear, 5, 1, row.data(), 0, nullptr) != nullptr, "a row too many");
  demand(mesh_linear_fill(linear, 0, 1, row.data(), 77, nullptr) != nullptr, "an unknown source");
  mesh_linear_free(linear);
}

}  // namespace

int main() {
  check_refusals();
  for (const int vocab_size : {1, 7, 8, 61, 1023, 1024, 4099})
    for (const int at_least : {1, 30, 256, 5000}) scan_rows(vocab_size, at_least);
  int number = 0;
  for (const int head_dim : {16, 64, 80, 96, 128}) {
    for (const WeightKind kind : {WeightKind::kFp32, WeightKind::kBf16}) {
      ++number;
      const int num_kv_heads = 1 + number % 2, group = 1 + number % 5;
      const bool is_bf16 = kind == WeightKind::kBf16;
      const ModelShape shape = {2,  32 * (1 + number % 3), num_kv_heads * group,
                                num_kv_heads, head_dim, 16 * (1 + number % 4), 61,
                                1 + 5 * (number % 4), is_bf16 ? KvKind::kBf16 : KvKind::kFp32,
                                1e-5f, 0.1f};
      run_steps(*random_model(shape, kind, 1 + number % 3), shape, is_bf16 ? 2 : 4);
    }
  }
  std::puts("ok");
}
