"""Supply chain: hashed locks of what images install, digests of base images, and an audit for known vulnerabilities."""
