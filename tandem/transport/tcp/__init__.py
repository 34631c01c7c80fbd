"""Our own transport between hosts: bytes go from pool to socket to pool, and closing the socket is a true abort."""
