"""Transport by NIXL over UCX, where one-sided reads are native: RDMA, CUDA IPC, memory of processes of one host."""
