#include "host.h"

#include <ATen/ops/from_blob.h>

#include "device.h"

namespace simulated_npu {

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kNpu) {
    return tensor;
  }
  const auto kept = tensor.detach();
  const auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  return at::from_blob(
      kept.data_ptr(), kept.sizes(), kept.strides(), [kept](void*) {}, options);
}

} // namespace simulated_npu
