"""A policy server in a thread, and a client that speaks the protocol without openpi-client."""

import asyncio
import concurrent.futures
import contextlib
import threading
import urllib.request

import websockets.sync.client

from somaspeed_jax.serving.server import PolicyServer
from somaspeed_jax.serving.wire import pack, unpack

CAMERAS = ("observation.images.top", "observation.images.wrist")
METADATA = {"model": "echo", "cameras": list(CAMERAS)}


@contextlib.contextmanager
def running(server):
    """Runs a server in a thread of its own: yields its port."""
    started, loop = concurrent.futures.Future(), asyncio.new_event_loop()

    async def run():
        ready = loop.create_future()
        ready.add_done_callback(lambda f: started.set_result(f.result().sockets[0].getsockname()[1]))
        await server.run("127.0.0.1", 0, ready)

    task = loop.create_task(run())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])), daemon=True)
    thread.start()
    try:
        yield started.result(timeout=30)
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def running_at(policy, *, cameras=CAMERAS, state_dim=2, **options):
    """The same for a policy: yields (server, port)."""
    server = PolicyServer(policy, cameras=cameras, state_dim=state_dim, metadata=METADATA, **options)
    with running(server) as port:
        yield server, port


class Client:
    """The protocol without openpi-client: what it sends and expects, on a bare socket."""

    def __init__(self, port, **options):
        connecting = websockets.sync.client.connect(f"ws://127.0.0.1:{port}", compression=None, **options)
        self.socket = contextlib.ExitStack().enter_context(connecting)
        self.metadata = unpack(self.socket.recv())

    def send(self, data):
        self.socket.send(data)
        answer = self.socket.recv()
        return answer if isinstance(answer, str) else unpack(answer)

    def infer(self, observation):
        return self.send(pack(observation))


def get(port, path, token=""):
    headers = {"Authorization": f"Api-Key {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)) as answer:
        return answer.read().decode()
