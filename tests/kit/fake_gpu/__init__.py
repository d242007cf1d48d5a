"""A GPU that is not there, for `nox -s fake-gpu`: the CUDA path of backend `local` on fake tensors.

- The machine: `card` (sizes of cards), `guard.cpp` and `build_guard` (a device guard for a CPU build of PyTorch),
  `gpu` (the dispatch mode that counts), `memory`, `graph`, `cuda_calls`, `triton_calls`, `host_reads`, `record`.
- The work: `models` (folders of weights that are shapes only), `backends` (a backend on a card, requests and rows).
"""
