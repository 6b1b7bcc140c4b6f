"""The worker's end of its socket pair with the agent: words in and out, and the end of both lives.

The agent's death closes the pair, and everything here then raises `AgentGone`. Limits: words are small; reports are
left out while the agent does not read.
"""

from __future__ import annotations

import socket

from function_runtime.wire import AgentWord, Word, agent_words, pack


class AgentGone(Exception):
    """The agent died: so does the worker, at once."""


class AgentChannel:
    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._buffer = bytearray()
        self._unsent = b""

    def say(self, word: Word) -> None:
        """Waits until it is sent."""
        try:
            self.socket.sendall(self._unsent + pack(word))
        except OSError as error:
            raise AgentGone from error
        self._unsent = b""

    def mention(self, word: Word) -> None:
        """Sends it if the agent reads; otherwise it is left out: a stopped agent must not stop its workers."""
        frame = self._unsent or pack(word)
        try:
            sent = self.socket.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise AgentGone from error
        self._unsent = frame[sent:] if sent < len(frame) else b""

    def receive(self) -> list[AgentWord]:
        """Blocks until something comes. Raises `AgentGone` at the end of the stream."""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            raise AgentGone from error
        if not data:
            raise AgentGone
        self._buffer += data
        words: list[AgentWord] = []
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if len(self._buffer) < 4 + size:
                break
            words.append(agent_words.decode(bytes(self._buffer[4 : 4 + size])))
            del self._buffer[: 4 + size]
        return words
