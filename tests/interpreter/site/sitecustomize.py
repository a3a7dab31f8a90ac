"""Makes Triton believe in a CPU device, in every process of the interpreter tests.

Triton has no CPU backend; its interpreter needs none, but importing kernels asks
for an active driver. This one answers.
"""

import os
import types

if os.environ.get("VLLM_SCOPE_TEST_INTERPRETER"):
    import triton.backends as backends

    class _CpuDriver:
        @staticmethod
        def is_active():
            return True

        def get_current_target(self):
            from triton.backends.compiler import GPUTarget

            return GPUTarget("cpu", 0, 1)

        def get_current_device(self):
            return 0

        def set_current_device(self, device):
            pass

        def get_current_stream(self, device):
            return 0

        def get_active_torch_device(self):
            import torch

            return torch.device("cpu")

        def get_device_interface(self):
            import torch

            return torch.cpu

    backends.backends["cpu"] = types.SimpleNamespace(driver=_CpuDriver, compiler=None)
