// Linear layers: weights packed once, in one of several kinds, and one way to multiply by them.
//
// A kind of weights is one LinearKernel in one file of its own; nothing else knows its layout. To
// add a kind: a value of WeightKind, a file with a class, a line in kernel_of().
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "thread_team.h"
#include "weight_memory.h"

namespace mesh {

// Numbers are part of the C interface.
enum class WeightKind : int32_t {
  kFp32 = 0,
  kBf16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 4,
  kExactQ4_0 = 5,
  kExactQ4_1 = 6,
  kExactQ8_0 = 7,
};

// How the weights that are handed over for packing lie: row-major floats or bfloat16, or rows of
// GGUF blocks as they stand in the file. Numbers are part of the C interface.
enum class SourceKind : int32_t { kFp32 = 0, kBf16 = 1, kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 4 };

// [num_outputs, num_inputs] weights. Outputs are padded with zero rows to whole panels: the
// outputs that a kernel computes together.
struct PackedLinear {
  PackedLinear(WeightKind kind, int num_outputs, int num_inputs);

  int num_panels() const;

  WeightKind kind;
  int num_outputs;
  int num_inputs;
  WeightMemory data;  // laid out by the kernel of `kind`
  Array<float> bias;      // a value per output of every panel; zero where a layer has none
};

// Input rows as a kernel wants them: `stride` bytes from one row to the next.
struct InputRows {
  const std::byte* data;
  size_t stride;

  template <class Item>
  const Item* row(int64_t number) const {
    return reinterpret_cast<const Item*>(data + static_cast<size_t>(number) * stride);
  }
};

// Output rows of floats: `stride` floats from one row to the next.
struct OutputRows {
  float* data;
  size_t stride;

  float* row(int64_t number) const { return data + static_cast<size_t>(number) * stride; }
};

// A part of a product: some rows times some panels.
struct Tile {
  int first_row, end_row;
  int first_panel, end_panel;
};

class LinearKernel {
 public:
  virtual ~LinearKernel() = default;

  // How many outputs are computed together.
  virtual int panel_outputs() const = 0;

  // Panels that go best together where there is but one row.
  virtual int panels_at_once() const { return 2; }

  // Bytes of one packed panel.
  virtual size_t panel_bytes(int num_inputs) const = 0;

  // Why this kind can't hold rows of `num_inputs`; null if it can.
  virtual const char* refusal(int num_inputs) const = 0;

  // Packs `num_rows` rows of weights as outputs [first_output, first_output + num_rows).
  // Returns false when it can't read sources of this kind.
  virtual bool pack(PackedLinear& weights, int first_output, int num_rows, const void* source,
                    SourceKind source_kind) const = 0;

  // The weights of one output as floats: [num_inputs]. For embeddings.
  virtual void unpack(const PackedLinear& weights, int output, float* row) const = 0;

  // Bytes of a prepared input row; 0 when rows of floats are read as they are.
  virtual size_t prepared_bytes(int num_inputs) const = 0;

  // Turns a row of floats into the form that `multiply` reads (rounded, or quantised with scales).
  virtual void prepare(const float* row, int num_inputs, std::byte* prepared) const = 0;

  // out[row][output] = bias[output] + sum over inputs of weight * input, for one tile. A result is
  // the same bit for bit in whatever tile and beside whatever rows it is computed.
  virtual void multiply(const PackedLinear& weights, InputRows inputs, OutputRows outputs,
                        Tile tile) const = 0;
};

// Null for a kind that this build does not have.
const LinearKernel* kernel_of(WeightKind kind);

// Multiplies rows of floats by a packed layer: outputs[row][0 .. num_outputs).
//
// `inputs.data` holds `num_rows` rows of floats. `prepared` is scratch that is kept from call to
// call. Nothing behind the last output of a row is written.
void multiply(const PackedLinear& weights, InputRows inputs, int num_rows, OutputRows outputs,
              Array<std::byte>& prepared, ThreadTeam& team);

}  // namespace mesh
