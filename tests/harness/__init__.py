"""What tests run on: jobs, programs, forked peers, a NIC in software. `tensorwire.testing` has faulty devices."""
