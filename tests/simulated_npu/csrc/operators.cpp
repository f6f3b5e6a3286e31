// Operators that are about memory; every other one runs on the CPU (fallback.cpp).
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "device.h"
#include "host.h"
#include "memory.h"

namespace simulated_npu {
namespace {

using at::Tensor;
using c10::IntArrayRef;
using c10::SymIntArrayRef;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(
    IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> memory_format) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_generic(size, &memory(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::OptionalDeviceGuard on(device);
  return at::detail::empty_strided_generic(size, stride, &memory(), kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

c10::Scalar local_scalar(const Tensor& tensor) {
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor,
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& tensor, SymIntArrayRef size, std::optional<c10::MemoryFormat> memory_format) {
  const c10::DeviceGuard on(tensor.device());
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), memory_format);
}

Tensor& set_part(Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(tensor, std::move(storage), offset, size, stride);
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_part(tensor, std::move(storage), 0, {size}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_part(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Accelerators count whole numbers; the CPU's kernel takes floating-point ones alone.
Tensor histc(const Tensor& tensor, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const auto values = at::isIntegralType(tensor.scalar_type(), true) ? on_host(tensor).to(at::kDouble) : on_host(tensor);
  return at::histc(values, bins, min, max).to(tensor.scalar_type()).to(tensor.device());
}

void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("histc", &histc);
  library.impl("record_stream", &record_stream);
}

} // namespace
} // namespace simulated_npu
