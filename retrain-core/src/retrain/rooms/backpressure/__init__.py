"""Back pressure: a batch size that follows measured throughput. Off by default; see `docs/pages/backpressure.md`."""
