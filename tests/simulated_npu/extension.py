"""The built C++ extension, loaded. Importing this gives the process a device `npu`."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import torch

from simulated_npu.build import NAME, library

torch.utils.rename_privateuse1_backend("npu")
_spec = spec_from_file_location(NAME, library())
assert _spec is not None
assert _spec.loader is not None
extension = module_from_spec(_spec)
_spec.loader.exec_module(extension)
