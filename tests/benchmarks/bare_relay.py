"""The least that can stand between HTTP and a replica: no journal, keys, queue or ledger.

`bare_relay.py PORT TOKEN TOKENS` prints the port it listens on.

It is the baseline of what the gateway adds: an engine reached over HTTP and nothing more.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

from function_runtime import protocol


class Relay:
    def __init__(self, token: str, tokens: int) -> None:
        self.token, self.tokens = token, tokens
        self.queues: dict[str, asyncio.Queue[protocol.ReplicaMessage]] = {}
        self.numbers = iter(range(1 << 30))

    async def connect(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        self.writer.write(protocol.encode(protocol.Hello(token=self.token, gateway="gw-relay")))
        self.task = asyncio.create_task(self.read())

    async def read(self) -> None:
        frames = protocol.FrameBuffer()
        while data := await self.reader.read(1 << 16):
            for body in frames.feed(data):
                message = protocol.decode_replica(body)
                if isinstance(message, protocol.Tokens | protocol.Finished):
                    self.queues[message.request_id].put_nowait(message)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        request_id = f"cmpl-relay-{next(self.numbers)}"
        queue = self.queues[request_id] = asyncio.Queue()
        sampling = protocol.Sampling(seed=1, max_tokens=self.tokens)
        work = protocol.Work(request_id, 1, "default", "", tuple(range(8)), sampling, write_kv=False)
        self.writer.write(protocol.encode(protocol.Submit(work)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while not isinstance(message := await queue.get(), protocol.Finished):
            if isinstance(message, protocol.Tokens):
                chunk = {"id": request_id, "model": body["model"], "choices": [{"text": message.events[0].text}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        del self.queues[request_id]
        self.writer.write(protocol.encode(protocol.Settled(request_id, 1)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def serve() -> None:
    relay = Relay(sys.argv[2], int(sys.argv[3]))
    await relay.connect(int(sys.argv[1]))
    app = web.Application()
    app.router.add_post("/v1/completions", relay.complete)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
