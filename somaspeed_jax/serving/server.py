"""A websocket server for a policy, speaking the protocol of openpi-client.

On connecting, a client is sent the metadata; then each message is an observation and each answer a chunk of actions in
robot units. Observations of several clients that arrive while the policy is busy are answered together in its next
batch; nobody waits for a batch to fill. An answer that is text is an error: the client raises it, the connection stays.
"""

import asyncio
import concurrent.futures
import hmac
import http
import ipaddress
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import websockets
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from somaspeed_jax.serving.metrics import Metrics
from somaspeed_jax.serving.wire import pack, read_observation, unpack

log = logging.getLogger(__name__)

_MIN_TOKEN = 16  # characters


ActBatch = Callable[[list[dict]], np.ndarray]
"""Observations, as `wire.read_observation` gives them -> float [n, t, a] in robot units. Raises ValueError for an
observation that it cannot use."""


class PolicyServer:
    """Answers observations with actions.

    Args:
      act_batch: the policy, called from one thread with 1, 2, 4, ... `max_batch` observations (padded up by
        repetition), so that a compiled policy sees these sizes only; `warm_up` runs each once.
      cameras: dataset features that the policy reads. state_dim: numbers in a state.
      metadata: plain values that clients are told when they connect.
      token: what clients must send as `Authorization: Api-Key <token>` (openpi-client's `api_key`).
      max_bytes: of a message; a client that sends more is disconnected.
      max_clients: connections at a time; more are turned away with 503.
      names: a client's own short names for cameras and state (see `wire.read_observation`).
      default_prompt: the task of a message that has none.
    """

    def __init__(
        self,
        act_batch: ActBatch,
        *,
        cameras: Sequence[str],
        state_dim: int,
        metadata: Mapping[str, Any],
        max_batch: int = 8,
        token: str = "",
        max_bytes: int = 16 * 2**20,
        max_clients: int = 64,
        names: Mapping[str, str] | None = None,
        default_prompt: str = "",
    ):
        if token and len(token) < _MIN_TOKEN:
            raise ValueError(f"the token has {len(token)} characters, expected at least {_MIN_TOKEN}")
        self.metrics = Metrics()
        self._act_batch, self._cameras, self._state_dim = act_batch, tuple(cameras), state_dim
        self._metadata = pack(metadata)
        self.sizes = [2**i for i in range(max(1, max_batch).bit_length())]
        if max_batch != self.sizes[-1]:
            raise ValueError(f"max_batch is {max_batch}, expected a power of two")
        self._token, self._max_bytes, self._max_clients = token, max_bytes, max_clients
        self._names, self._default_prompt = names, default_prompt
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "policy")
        self._waiting: asyncio.Queue[tuple[dict, asyncio.Future]] = asyncio.Queue()

    def warm_up(self) -> None:
        """Runs the policy once at each batch size, so that no client waits for compilation."""
        black = {camera: np.zeros((64, 64, 3), np.uint8) for camera in self._cameras}
        state = np.zeros(self._state_dim, np.float32)
        for size in self.sizes:
            start = time.perf_counter()
            self._act_batch([{"images": black, "state": state, "task": "a"}] * size)  # no prompt is shorter
            log.info("warm-up: batch of %d took %.2f s", size, time.perf_counter() - start)

    async def run(self, host: str, port: int, ready: asyncio.Future[Server] | None = None) -> None:
        """Warms up, then listens until cancelled; `ready` is given the listening server.

        Raises ValueError for a host that other machines can reach when there is no token.
        """
        if not self._token and not _is_loopback(host):
            raise ValueError(f"host {host} can be reached from other machines: set a token, or serve on 127.0.0.1")
        await asyncio.get_running_loop().run_in_executor(self._thread, self.warm_up)
        batches = asyncio.create_task(self._answer_forever())
        try:
            async with serve(
                self._client,
                host,
                port,
                process_request=self._http,
                origins=[None],  # robots send no Origin; a web page in someone's browser does
                compression=None,
                max_size=self._max_bytes,
            ) as server:
                if ready is not None:
                    ready.set_result(server)
                await batches
        finally:
            batches.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        sent = request.headers.get("Authorization", "").encode()
        if self._token and not hmac.compare_digest(sent, f"Api-Key {self._token}".encode()):
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "Send the header Authorization: Api-Key <token>\n")
        if request.path == "/metrics":
            return connection.respond(http.HTTPStatus.OK, self.metrics.prometheus())
        if self.metrics.clients >= self._max_clients:
            return connection.respond(
                http.HTTPStatus.SERVICE_UNAVAILABLE, f"{self._max_clients} clients are connected\n"
            )
        return None

    async def _client(self, connection: ServerConnection) -> None:
        self.metrics.clients += 1
        try:
            await connection.send(self._metadata)
            async for message in connection:
                await connection.send(await self._answer(message))
        except websockets.ConnectionClosed:
            pass  # the client is gone, or sent more than max_bytes
        finally:
            self.metrics.clients -= 1

    async def _answer(self, message: bytes | str) -> bytes | str:
        start = time.perf_counter()
        try:
            observation = read_observation(
                unpack(message),
                self._cameras,
                self._state_dim,
                names=self._names,
                default_prompt=self._default_prompt,
            )
            answer = asyncio.get_running_loop().create_future()
            self._waiting.put_nowait((observation, answer))
            actions, seconds = await answer
        except ValueError as error:
            self.metrics.requests["refused"] += 1
            return f"refused: {error}"
        except Exception:
            self.metrics.requests["failed"] += 1
            log.exception("the policy failed")
            return "failed: an error inside the policy; its traceback is in the server's log"
        self.metrics.requests["answered"] += 1
        total = time.perf_counter() - start
        self.metrics.request.add(total)
        return pack(
            {
                "actions": actions,
                "server_timing": {"infer_ms": seconds * 1e3, "total_ms": total * 1e3},
            }
        )

    async def _answer_forever(self) -> None:
        """Takes whatever waits, up to the largest batch, as soon as the policy is free."""
        loop = asyncio.get_running_loop()
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.sizes[-1] and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            batch = [(o, answer) for o, answer in batch if not answer.done()]  # less the clients that are gone
            results = await loop.run_in_executor(self._thread, self._act, [o for o, _ in batch])
            for (_, answer), result in zip(batch, results, strict=True):
                if answer.done():
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    def _act(self, observations: list[dict]) -> list[tuple[np.ndarray, float] | Exception]:
        """An answer each: (actions [t, a], seconds) or the error. One bad observation does not spoil its batch."""
        if not observations:
            return []
        start = time.perf_counter()
        size = next(s for s in self.sizes if s >= len(observations))
        try:
            actions = np.asarray(self._act_batch(observations + observations[-1:] * (size - len(observations))))
            if not np.isfinite(actions).all():
                raise FloatingPointError("the policy gave actions that are not finite")
        except Exception as error:
            if len(observations) == 1:
                return [error]
            return [result for o in observations for result in self._act([o])]
        seconds = time.perf_counter() - start
        self.metrics.policy.add(seconds)
        self.metrics.batch.add(len(observations))
        return [(a, seconds) for a in actions[: len(observations)]]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
