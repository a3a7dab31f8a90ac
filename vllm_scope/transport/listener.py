"""The TCP socket of a front-end, and the check of the peers that connect.

Owns:  TcpListener.
Runs:  `open` on the thread that calls `Receiver.listen`. Peers are checked on a thread that pyzmq
       starts.
From:  receiver.

Promise: a peer can connect only with the CURVE keys in the front-end's TcpAddress. Without these
keys, the handshake fails.
"""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_scope.errors import ConfigError
from vllm_scope.transport.messages import MOST_FRAME_BYTES, TcpAddress, check_curve, keep_alive

#: The largest number of messages of one worker that wait at the front-end. When this many messages
#: wait, TCP makes the worker wait.
MOST_WAITING = 8


@dataclass
class _OneKey:
    """Accepts one client key. pyzmq's authenticator calls `callback`."""

    client_key: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client_key


class TcpListener:
    """Opens the front-end's TCP socket. Call `close` before the zmq context ends."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._authenticator: ThreadAuthenticator | None = None

    def open(self, host: str) -> tuple[zmq.Socket[bytes], TcpAddress]:
        """Return a bound socket, and its address with new keys. After an error, the caller can call
        `open` again.

        Raises:
            CompatError: the installed zmq cannot encrypt.
            ConfigError: `host` is not an address or interface of this host.
        """
        check_curve()
        server_key, server_secret = zmq.curve_keypair()
        client_key, client_secret = zmq.curve_keypair()
        if self._authenticator is None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _OneKey(client_key))
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = server_key, server_secret
        # The queue is unbounded, because the front-end sends one small answer per message.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, MOST_WAITING)
        socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES + 1024)  # CURVE adds bytes to a frame
        keep_alive(socket)
        # A connection keeps the linger value that the socket had at `bind`, even if `close` sets
        # another value. With zmq's default, -1, an unsent answer to a worker that has ended would
        # block `term` for ever.
        socket.linger = 0
        socket.ipv6 = ":" in host
        try:
            socket.bind(f"tcp://{f'[{host}]' if socket.ipv6 else host}:*")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"the front-end cannot listen for rows on TCP at {host!r}: {error.strerror}. Set "
                "additional_config['scope'].road_host to an address of the front-end's "
                "host that workers can reach, or to a network interface of this host."
            ) from None
        endpoint = bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        keys = (key.decode() for key in (server_key, client_key, client_secret))
        return socket, TcpAddress(endpoint, *keys)

    def close(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
