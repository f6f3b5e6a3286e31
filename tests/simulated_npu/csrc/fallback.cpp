// Every operator without a kernel of its own: copied to the CPU, computed there, copied back. As strict as a device
// about what it is given.
#include <ATen/core/Generator.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "device.h"
#include "random.h"

namespace simulated_npu {
namespace {

// Indices may lie on the CPU: they are moved.
bool takes_indices(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
}

void check_device(const at::Tensor& tensor, std::optional<c10::Device>& device, const std::string& name) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
    return;
  }
  if (!device.has_value()) {
    device = tensor.device();
  }
  TORCH_CHECK(
      tensor.device() == *device,
      "Expected all tensors to be on the same device, but ", name, " got ", *device, " and ", tensor.device());
}

// What host memory would forgive, a device does not: tensors of the CPU, or of another device, among its own.
void check_one_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  if (takes_indices(name)) {
    return;
  }
  std::optional<c10::Device> device;
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      check_device(value.toTensor(), device, name);
    } else if (value.isTensorList()) {
      for (const auto& tensor : value.toTensorVector()) {
        check_device(tensor, device, name);
      }
    }
  }
}

c10::Device device_of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  for (const auto& value : torch::jit::last(stack, op.schema().arguments().size())) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == kNpu) {
      return value.toTensor().device();
    }
  }
  return c10::Device(kNpu, current_device());
}

// The generator to draw from; CPU kernels know the CPU's alone, so it is taken out of the arguments.
at::Generator take_generator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto generator = default_generator(device_of(op, *stack).index());
  const auto count = op.schema().arguments().size();
  for (size_t i = 0; i < count; ++i) {
    auto& value = torch::jit::peek(*stack, i, count);
    if (value.isGenerator()) {
      generator = value.toGenerator();
      TORCH_CHECK(
          generator.device().type() == kNpu,
          "Expected a 'npu' device type for generator but found '", generator.device().type(), "'");
      value = c10::IValue();
    }
  }
  return generator;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_one_device(op, *stack);
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    const DrawFrom drawing(take_generator(op, stack));
    at::native::cpu_fallback(op, stack);
  } else {
    at::native::cpu_fallback(op, stack);
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace
} // namespace simulated_npu
