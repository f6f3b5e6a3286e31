// Autocast: matrix products in the lower precision, what sums or exponentiates in float32, the rest as it comes.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "device.h"

// Declared here, since <ATen/autocast_mode.h> brings every operator of torch, and half a minute of compiling.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace simulated_npu {
namespace {

at::Tensor cast(const at::Tensor& tensor, at::ScalarType dtype) {
  const bool eligible = tensor.defined() && tensor.device().type() == kNpu && tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble;
  return eligible ? tensor.to(dtype) : tensor;
}

void run_in(at::ScalarType dtype, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::AutocastPrivateUse1);
  const auto count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = torch::jit::peek(*stack, i, count);
    if (value.isTensor()) {
      value = cast(value.toTensor(), dtype);
    }
  }
  op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::autocast::get_autocast_dtype(kNpu), op, stack);
}

void in_float32(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_in(at::kFloat, op, stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name :
       {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  }
  for (const char* name :
       {"cumsum", "exp", "layer_norm", "log", "log_softmax.int", "nll_loss", "pow.Tensor_Scalar", "rms_norm", "rsqrt",
        "softmax.int", "sum", "sum.dim_IntList"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  }
}

} // namespace
} // namespace simulated_npu
