"""NIXL over UCX, where one-sided reads are real: RDMA, CUDA IPC, memory of other processes of the host."""
