// The C interface of the library, as workers/engine/native/library.py declares it.
//
// Functions that can fail return null or a message, which stays valid until the next call in the
// same thread; null means that all went well where a message is returned.
#pragma once

#include "model.h"
#include "scan.h"

#define MESH_API extern "C" __attribute__((visibility("default")))

// What the library was compiled for: bits of kAbiFeature.
enum AbiFeature : int32_t { kWide = 1, kRoundsInputs = 2 };

// Where a linear layer or a norm belongs.
enum class Role : int32_t {
  kQueryKeyValue = 0,
  kOutput = 1,
  kGateUp = 2,
  kDown = 3,
  kEmbedding = 4,
  kHead = 5,
  kInputNorm = 6,
  kPostNorm = 7,
  kQueryNorm = 8,
  kKeyNorm = 9,
  kFinalNorm = 10,
};

MESH_API int32_t mesh_features();

// A linear layer of its own. Null with a message in *error when the kind can't hold it.
MESH_API mesh::PackedLinear* mesh_linear_new(int32_t kind, int32_t num_outputs, int32_t num_inputs,
                                             const char** error);
MESH_API void mesh_linear_free(mesh::PackedLinear* linear);

// Packs rows of weights, and their bias if it isn't null.
MESH_API const char* mesh_linear_fill(mesh::PackedLinear* linear, int32_t first_output,
                                      int32_t num_rows, const void* source, int32_t source_kind,
                                      const float* bias);

// outputs[num_rows, num_outputs] = inputs[num_rows, num_inputs] times the weights.
MESH_API const char* mesh_linear_multiply(const mesh::PackedLinear* linear, const float* inputs,
                                          int32_t num_rows, float* outputs, int32_t num_threads);

// row[num_inputs] = the weights of one output.
MESH_API void mesh_linear_unpack(const mesh::PackedLinear* linear, int32_t output, float* row);

// Quantises groups of 32 floats to blocks as a GGUF file has them; `kind` is a SourceKind.
MESH_API const char* mesh_quantise(int32_t kind, const float* weights, int64_t num_groups,
                                   void* blocks);

MESH_API mesh::Model* mesh_model_new(const mesh::ModelShape* shape, int32_t num_threads,
                                     const char** error);
MESH_API void mesh_model_free(mesh::Model* model);

// The model takes the linear layer over; several of one role follow each other.
MESH_API void mesh_model_give(mesh::Model* model, int32_t layer, int32_t role,
                              mesh::PackedLinear* linear);
MESH_API const char* mesh_model_set_norm(mesh::Model* model, int32_t layer, int32_t role,
                                         const float* weights, int32_t size);
MESH_API void mesh_model_set_window(mesh::Model* model, int32_t layer, int32_t window);

// Wakes the model's threads, for a step that begins in some microseconds.
MESH_API void mesh_model_wake(mesh::Model* model);
MESH_API const char* mesh_model_run(mesh::Model* model, const mesh::Batch* batch);
MESH_API void mesh_model_times(const mesh::Model* model, mesh::Times* times);

// What sampling asks of logits, by the threads of a model; a step must not run meanwhile.
MESH_API const char* mesh_model_find_largest(mesh::Model* model, const mesh::LogitRows* rows,
                                             int32_t* ids);
MESH_API const char* mesh_model_weigh_runs(mesh::Model* model, const mesh::LogitRows* rows,
                                           const mesh::RunWeights* weights);
MESH_API const char* mesh_model_find_likeliest(mesh::Model* model, const mesh::LogitRows* rows,
                                               mesh::LikeliestTokens* tokens);
