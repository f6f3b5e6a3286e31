// Tensors of the device as the host sees them.
#pragma once

#include <ATen/core/Tensor.h>

namespace simulated_npu {

// A CPU tensor on the same memory, which it keeps alive; a tensor that isn't the device's is returned as it is.
at::Tensor on_host(const at::Tensor& tensor);

} // namespace simulated_npu
