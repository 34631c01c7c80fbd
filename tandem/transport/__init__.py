"""Transports: move the bytes of KV blocks between workers, by memory copies, TCP or NIXL.

`base` describes the methods of all. They register memory, read and report the end of reads. They never retry, and know
no tokens or requests.
"""
