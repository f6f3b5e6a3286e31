// What Python sees of the extension; torch finds the rest by itself once this library is loaded.
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "hccl.h"
#include "memory.h"
#include "random.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("TOTAL_MEMORY") = simulated_npu::kTotalMemory;
  module.def("device_count", [] { return static_cast<int>(simulated_npu::device_count()); });
  module.def("is_initialized", &simulated_npu::initialized);
  module.def("initialize", &simulated_npu::initialize);
  module.def("default_generator", &simulated_npu::default_generator);
  module.def("make_hccl", &simulated_npu::make_hccl);
}
