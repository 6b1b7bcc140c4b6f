"""Who may command an agent, and who may read its pool: holders of a token, of which only the SHA-256 is kept here.

An agent of this machine makes its own token and writes it to `agent.json`; one elsewhere is given the two hashes, so
that neither its command line nor its memory opens anything. Limits: a token is as good as its length: the hash is a
plain one, for tokens that are random.
"""

from __future__ import annotations

import hmac
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from function_runtime.protocol import agent_token, peer_token, token_hash

_BEARER: Final = "Bearer "
_HASH: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Access:
    agent_hash: str
    peer_hash: str

    @staticmethod
    def of_token(token: str) -> Access:
        return Access(token_hash(token), token_hash(peer_token(token)))

    @staticmethod
    def parse(agent_hash: str, peer_hash: str) -> Access:
        """Raises ValueError."""
        for option, text in (("--token-hash", agent_hash), ("--peer-token-hash", peer_hash)):
            if not _HASH.fullmatch(text):
                raise ValueError(f"{option} must be a SHA-256 in 64 hexadecimal digits; both hashes go together")
        return Access(agent_hash, peer_hash)

    def is_command(self, authorization: str) -> bool:
        """Whether this `Authorization` header may do everything."""
        return _matches(authorization, self.agent_hash)

    def is_peer(self, authorization: str) -> bool:
        """Whether it may read the pool."""
        return _matches(authorization, self.peer_hash)


def main() -> None:
    """`python -m function_runtime.agent.access SECRET_FILE SLOT_ID`: the options for an agent that is started by
    hand."""
    secret_path, slot_id = sys.argv[1:]
    token = agent_token(Path(secret_path).read_bytes().strip(), slot_id)
    access = Access.of_token(token)
    print(f"--slot-id {slot_id} --token-hash {access.agent_hash} --peer-token-hash {access.peer_hash}")


def _matches(authorization: str, expected: str) -> bool:
    given = authorization.removeprefix(_BEARER) if authorization.startswith(_BEARER) else ""
    return hmac.compare_digest(token_hash(given), expected) and bool(given)


if __name__ == "__main__":
    main()
