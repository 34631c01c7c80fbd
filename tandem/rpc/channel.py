"""gRPC options of both ends of a connection.

While a call runs, a peer that disappeared silently is noticed within `KEEPALIVE_S + KEEPALIVE_TIMEOUT_S`.
"""

MAX_MESSAGE_BYTES = 64 << 20  # of one message, sent or received
MAX_METADATA_BYTES = 32 << 10  # of a call's headers
KEEPALIVE_S = 10.0  # between two pings of a connection on which calls run
KEEPALIVE_TIMEOUT_S = 5.0  # for the answer to a ping; then the connection counts as broken
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0
_CONNECT_TIMEOUT_S = 2.0
_HANDSHAKE_TIMEOUT_S = 5.0

Options = tuple[tuple[str, int], ...]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)


_BOTH: Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", _ms(KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),
    ("grpc.http2.ping_timeout_ms", _ms(KEEPALIVE_TIMEOUT_S)),  # NOTE: by default 60 s, and counts instead of the above
    ("grpc.http2.max_pings_without_data", 0),
)
CLIENT_OPTIONS: Options = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # NOTE: a retry goes over a new connection, to a process that may be another one
    ("grpc.use_local_subchannel_pool", 1),  # NOTE: a new client must not inherit an old one's backoff
    ("grpc.initial_reconnect_backoff_ms", _ms(_FIRST_BACKOFF_S)),
    ("grpc.max_reconnect_backoff_ms", _ms(_MAX_BACKOFF_S)),
    ("grpc.min_reconnect_backoff_ms", _ms(_CONNECT_TIMEOUT_S)),  # NOTE: really how long connecting may take
)
SERVER_OPTIONS: Options = (
    *_BOTH,
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", _ms(_HANDSHAKE_TIMEOUT_S)),  # NOTE: by default 120 s, for who says nothing
    ("grpc.http2.min_ping_interval_without_data_ms", _ms(KEEPALIVE_TIMEOUT_S)),  # NOTE: by default 5 min, else GOAWAY
)
