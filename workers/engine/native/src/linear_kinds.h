// The kinds of weights there are, each in its own file.
#pragma once

#include "linear.h"

namespace mesh {

const LinearKernel& fp32_kernel();
const LinearKernel& bf16_kernel();

// Quantised weights: rows rounded to integers (fast), or kept as floats (exact).
const LinearKernel& q4_0_kernel();
const LinearKernel& q4_1_kernel();
const LinearKernel& q8_0_kernel();
const LinearKernel& exact_q4_0_kernel();
const LinearKernel& exact_q4_1_kernel();
const LinearKernel& exact_q8_0_kernel();

}  // namespace mesh
