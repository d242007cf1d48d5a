"""A GPU that is not there, for `nox -s fake-gpu`: the CUDA path of backend `local` on fake tensors.

- The machine: `card` (sizes and rates of cards), `guard.cpp` and `build_guard` (a device guard for a CPU build of
  PyTorch), `gpu` (the dispatch mode that counts), `memory`, `graph`, `cuda_calls`, `triton_calls`, `host_reads`,
  `work` (bytes and operations of a launch), `record`.
- Its users: `models` (folders of weights that are shapes only), `hosted_models` (transformers' own modules),
  `backends` (a backend on a card, requests and rows), `fake_ranks` (one rank of two).
- What follows from a run: `specialisation` and `compiled` (kernel variants, ahead of time), `roofline`.
"""
