"""Transport by NIXL over UCX, used where one-sided reads are native: RDMA, CUDA IPC, processes of one host."""
