// Random generators: one per device, apart from the CPU's; equal seeds give the numbers that the CPU draws.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace simulated_npu {

// The default generator of a device; of the current one if the index is negative.
const at::Generator& default_generator(c10::DeviceIndex index);

at::Generator new_generator(c10::DeviceIndex index);

// While it lives, what the CPU's default generator draws is drawn from a device's generator.
class DrawFrom {
 public:
  explicit DrawFrom(at::Generator generator);
  ~DrawFrom();
  DrawFrom(const DrawFrom&) = delete;
  DrawFrom& operator=(const DrawFrom&) = delete;

 private:
  at::Generator generator_;
  at::Tensor host_state_;
};

} // namespace simulated_npu
