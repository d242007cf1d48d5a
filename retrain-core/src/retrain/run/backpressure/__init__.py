"""Back pressure: adapts the batch size to measured throughput. Off by default; see `docs/pages/backpressure.md`."""
