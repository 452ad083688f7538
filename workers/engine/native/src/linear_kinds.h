// The kinds of weights there are, each in its own file.
#pragma once

#include "linear.h"

namespace mesh {

const LinearKernel& fp32_kernel();
const LinearKernel& bf16_kernel();

}  // namespace mesh
