#include "abi.h"

#include <algorithm>
#include <exception>
#include <string>

#include "bf16_pairs.h"

using namespace mesh;

namespace {

thread_local std::string last_error;

// Runs `body`; returns what went wrong in it, or null.
template <class Body>
const char* guarded(const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return last_error.c_str();
}

Parts& parts_of(Model& model, int layer, Role role) {
  switch (role) {
    case Role::kEmbedding:
      return model.embedding;
    case Role::kQueryKeyValue:
      return model.layer(layer).query_key_value;
    case Role::kOutput:
      return model.layer(layer).output;
    case Role::kGateUp:
      return model.layer(layer).gate_up;
    case Role::kDown:
      return model.layer(layer).down;
    default:
      return model.head;
  }
}

Array<float>& norm_of(Model& model, int layer, Role role) {
  switch (role) {
    case Role::kInputNorm:
      return model.layer(layer).input_norm;
    case Role::kPostNorm:
      return model.layer(layer).post_norm;
    case Role::kQueryNorm:
      return model.layer(layer).query_norm;
    case Role::kKeyNorm:
      return model.layer(layer).key_norm;
    default:
      return model.final_norm;
  }
}

}  // namespace

int32_t mesh_features() { return (kWidth == 16 ? kWide : 0) | (MESH_BF16_DOT ? kRoundsInputs : 0); }

PackedLinear* mesh_linear_new(int32_t kind, int32_t num_outputs, int32_t num_inputs,
                              const char** error) {
  const auto weight_kind = static_cast<WeightKind>(kind);
  const LinearKernel* kernel = kernel_of(weight_kind);
  *error = kernel == nullptr ? "no such kind of weights" : kernel->refusal(num_inputs);
  if (*error != nullptr) return nullptr;
  PackedLinear* made = nullptr;
  *error = guarded([&] { made = new PackedLinear(weight_kind, num_outputs, num_inputs); });
  return made;
}

void mesh_linear_free(PackedLinear* linear) { delete linear; }

const char* mesh_linear_fill(PackedLinear* linear, int32_t first_output, int32_t num_rows,
                             const void* source, int32_t source_kind, const float* bias) {
  if (first_output < 0 || num_rows < 0 || num_rows > linear->num_outputs - first_output)
    return "more rows than the layer has outputs";
  const LinearKernel& kernel = *kernel_of(linear->kind);
  if (!kernel.pack(*linear, first_output, num_rows, source, static_cast<SourceKind>(source_kind)))
    return "weights of this kind can't be packed from such a source";
  if (bias != nullptr) std::copy_n(bias, num_rows, linear->bias.data() + first_output);
  return nullptr;
}

const char* mesh_linear_multiply(const PackedLinear* linear, const float* inputs, int32_t num_rows,
                                 float* outputs, int32_t num_threads) {
  return guarded([&] {
    ThreadTeam team(num_threads);
    Array<std::byte> prepared;
    const InputRows rows = {reinterpret_cast<const std::byte*>(inputs),
                            static_cast<size_t>(linear->num_inputs) * sizeof(float)};
    const OutputRows to = {outputs, static_cast<size_t>(linear->num_outputs)};
    multiply(*linear, rows, num_rows, to, prepared, team);
  });
}

void mesh_linear_unpack(const PackedLinear* linear, int32_t output, float* row) {
  kernel_of(linear->kind)->unpack(*linear, output, row);
}

Model* mesh_model_new(const ModelShape* shape, int32_t num_threads, const char** error) {
  Model* made = nullptr;
  *error = guarded([&] { made = new Model(*shape, num_threads); });
  return made;
}

void mesh_model_free(Model* model) { delete model; }

void mesh_model_give(Model* model, int32_t layer, int32_t role, PackedLinear* linear) {
  parts_of(*model, layer, static_cast<Role>(role)).emplace_back(linear);
}

const char* mesh_model_set_norm(Model* model, int32_t layer, int32_t role, const float* weights,
                                int32_t size) {
  return guarded([&] {
    Array<float> copy(static_cast<size_t>(size));
    std::copy_n(weights, size, copy.data());
    norm_of(*model, layer, static_cast<Role>(role)) = std::move(copy);
  });
}

void mesh_model_set_window(Model* model, int32_t layer, int32_t window) {
  model->layer(layer).window = window;
}

void mesh_model_wake(Model* model) { model->team.wake(); }

const char* mesh_model_run(Model* model, const Batch* batch) {
  return guarded([&] { model->run(*batch); });
}

void mesh_model_times(const Model* model, Times* times) { *times = model->times; }

const char* mesh_model_find_largest(Model* model, const LogitRows* rows, int32_t* ids) {
  return guarded([&] { find_largest(*rows, ids, model->team); });
}

const char* mesh_model_weigh_runs(Model* model, const LogitRows* rows, const RunWeights* weights) {
  return guarded([&] { weigh_runs(*rows, *weights, model->team); });
}

const char* mesh_model_find_likeliest(Model* model, const LogitRows* rows,
                                      LikeliestTokens* tokens) {
  return guarded([&] { find_likeliest(*rows, *tokens, model->team); });
}
