"""Back pressure: adaptive batch sizing from measured throughput. Its table stands; its controller is to come."""
