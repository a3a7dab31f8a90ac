"""A vLLM plugin for tests: lets Model Runner V2 run where there is no CUDA.

V2 orders its work with CUDA streams and events. On a CPU everything happens at
once and in order, so both become objects that do nothing.
"""

import contextlib
import os


def register() -> None:
    if not os.environ.get("VLLM_SCOPE_TEST_INTERPRETER"):
        return
    import torch
    import torch.utils._triton as inductor_triton

    class Stream:
        def __init__(self, *args, **kwargs):
            self.device = torch.device("cpu")
            self.cuda_stream = 0

        def wait_stream(self, *args):
            pass

        def wait_event(self, *args):
            pass

        def record_event(self, *args):
            return Event()

        def synchronize(self):
            pass

        def query(self):
            return True

        def __enter__(self):
            return self

        def __exit__(self, *args):
            return False

    class Event:
        def __init__(self, *args, **kwargs):
            pass

        def record(self, *args):
            pass

        def synchronize(self):
            pass

        def wait(self, *args):
            pass

        def query(self):
            return True

        def elapsed_time(self, other):
            return 0.0

    torch.cuda.Stream, torch.cuda.Event, torch.Event = Stream, Event, Event
    torch.cuda.current_stream = lambda *args, **kwargs: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.set_stream = lambda stream: None
    torch.accelerator.synchronize = lambda *args, **kwargs: None
    torch.accelerator.empty_cache = lambda *args, **kwargs: None
    torch.accelerator.get_memory_info = lambda *args, **kwargs: (1 << 33, 1 << 34)
    # Inductor must not emit Triton kernels for a CPU.
    for name in vars(inductor_triton).copy():
        if name.startswith("has_triton"):
            setattr(inductor_triton, name, lambda *args, **kwargs: False)
