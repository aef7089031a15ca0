"""RDMA by verbs."""
