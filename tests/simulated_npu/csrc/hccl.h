// The collectives of the device, carried out by a gloo backend on the same memory.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated_npu {

c10::intrusive_ptr<c10d::Backend> make_hccl(c10::intrusive_ptr<c10d::Backend> gloo);

} // namespace simulated_npu
