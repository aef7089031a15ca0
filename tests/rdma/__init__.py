"""Real RDMA without a NIC: virtual machines with the kernel's Soft-RoCE driver, and the tests that run in them."""
