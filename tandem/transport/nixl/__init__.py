"""Transport by NIXL over UCX, used where one-sided reads are native: RDMA, CUDA IPC, memory of processes of one host."""
