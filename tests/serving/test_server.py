"""The policy server over a real socket, spoken to by openpi's own client where it is installed."""

import asyncio
import concurrent.futures
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
import websockets.exceptions
from policy_client import CAMERAS, METADATA, Client, get, running_at

from somaspeed_jax.serving.server import PolicyServer
from somaspeed_jax.serving.wire import pack

RED = np.zeros((4, 6, 3), np.uint8)
RED[..., 0] = 255
TOKEN = "correct horse battery"


class Echo:
    """Actions that show what arrived: [state..., mean red of the first picture], repeated over three steps."""

    def __init__(self, seconds=0.0):
        self.batches, self.seconds = [], seconds

    def __call__(self, observations):
        self.batches.append(len(observations))
        time.sleep(self.seconds)
        for o in observations:
            if o["task"] == "refuse":
                raise ValueError("no such task")
            if o["task"] == "break":
                raise RuntimeError("secret detail")
        rows = [[*o["state"], o["images"][CAMERAS[0]][..., 0].mean()] for o in observations]
        actions = np.repeat(np.array(rows, np.float32)[:, None], 3, 1)
        return np.where(np.array([o["task"] == "nan" for o in observations])[:, None, None], np.nan, actions)


def serving(policy, **options):
    return PolicyServer(policy, cameras=CAMERAS, state_dim=2, metadata=METADATA, **options)


def message(**changes):
    return {"observation/top": RED, "observation/wrist": RED, "observation/state": [0.5, 1.5], "prompt": "go"} | changes


@pytest.fixture(scope="module")
def echo():
    with running_at(Echo()) as (server, port):
        yield server, port


@pytest.mark.filterwarnings("ignore:connect")  # openpi-client connects in a way that newer websockets discourage
def test_openpi_s_client_is_answered(echo):
    """U11, the server's part: red arrives red, in both layouts; other forms are refused by name and harm nothing."""
    openpi = pytest.importorskip("openpi_client.websocket_client_policy")
    client = openpi.WebsocketClientPolicy("127.0.0.1", echo[1])
    assert client.get_server_metadata() == METADATA
    for picture in (RED, RED.transpose(2, 0, 1)):
        answer = client.infer(message(**{"observation/top": picture}))
        np.testing.assert_array_equal(answer["actions"], np.tile(np.float32([0.5, 1.5, 255]), (3, 1)))
        assert answer["actions"].dtype == np.float32
        assert answer["server_timing"]["infer_ms"] <= answer["server_timing"]["total_ms"]
    with pytest.raises(RuntimeError, match=r"camera observation.images.top: shape \(4, 6, 3\), type float64"):
        client.infer(message(**{"observation/top": RED / 255}))
    with pytest.raises(RuntimeError, match=r"camera observation.images.top: shape \(4, 6\), type uint8"):
        client.infer(message(**{"observation/top": RED[..., 0]}))
    assert client.infer(message())["actions"].shape == (3, 3)


@pytest.mark.filterwarnings("ignore:connect")
def test_openpi_s_client_sends_its_token():
    openpi = pytest.importorskip("openpi_client.websocket_client_policy")
    with running_at(Echo(), token=TOKEN) as (_, port):
        client = openpi.WebsocketClientPolicy("127.0.0.1", port, api_key=TOKEN)
        assert client.infer(message())["actions"].shape == (3, 3)


def test_malformed_messages_harm_neither_their_client_nor_others(echo):
    server, port = echo
    bad, good = Client(port), Client(port)
    before = dict(server.metrics.requests)
    garbage = [b"", b"\xc1", "text", pack({"prompt": "go"}), b"\x91" * 5000 + b"\x00"]
    for data in garbage:
        assert bad.send(data).startswith("refused: ")
        assert good.infer(message())["actions"][0, 2] == 255
    assert bad.infer(message())["actions"][0, 2] == 255
    assert server.metrics.requests["refused"] - before["refused"] == len(garbage)


def test_a_message_that_is_too_large_costs_its_client_the_connection():
    with running_at(Echo(), max_bytes=100_000) as (_, port):
        greedy, modest = Client(port), Client(port)
        greedy.socket.send(b"\0" * 100_001)
        with pytest.raises(websockets.exceptions.ConnectionClosed) as caught:
            greedy.socket.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009
        assert modest.infer(message())["actions"].shape == (3, 3)


def test_the_policy_s_refusals_are_told_and_its_failures_are_not(echo):
    client = Client(echo[1])
    assert client.infer(message(prompt="refuse")) == "refused: no such task"
    for prompt in ("break", "nan"):
        answer = client.infer(message(prompt=prompt))
        assert answer.startswith("failed: ")
        assert "secret" not in answer
    assert client.infer(message())["actions"].shape == (3, 3)


def test_concurrent_clients_are_answered_together_and_each_gets_its_own():
    policy = Echo(seconds=0.05)
    with running_at(policy, max_batch=4) as (server, port):
        assert policy.batches == [1, 2, 4]  # the warm-up, before the port was open
        clients = [Client(port) for _ in range(8)]

        def ask(i):
            prompt = "refuse" if i == 5 else "go"
            return [clients[i].infer(message(**{"observation/state": [i, n], "prompt": prompt})) for n in range(3)]

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
    for i, mine in enumerate(answers):
        if i == 5:  # shares batches with others, and spoils none
            assert mine == ["refused: no such task"] * 3
            continue
        for n, answer in enumerate(mine):
            np.testing.assert_array_equal(answer["actions"][0], np.float32([i, n, 255]))
    assert set(policy.batches) <= {1, 2, 4}
    assert 4 in policy.batches[3:]
    assert sum(server.metrics.batch.counts[2:]) > 0  # batches of three or four observations


def test_a_client_that_leaves_while_it_waits_harms_nobody():
    policy = Echo(seconds=0.05)
    with running_at(policy) as (_, port):
        impatient, patient = Client(port), Client(port)
        impatient.socket.send(pack(message()))
        impatient.socket.close()
        assert patient.infer(message())["actions"].shape == (3, 3)


def test_warm_up_comes_before_listening():
    class Slow(Echo):
        def __call__(self, observations):
            if len(self.batches) < 2:
                with pytest.raises(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1)
            return super().__call__(observations)

    with running_at(Echo()) as (_, port):
        pass  # a port that is free now
    policy = Slow()
    server = serving(policy, max_batch=2)

    async def once():
        ready = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(server.run("127.0.0.1", port, ready))
        await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
        assert ready.done(), task.exception()
        task.cancel()

    asyncio.run(once())
    assert policy.batches == [1, 2]


def test_other_machines_need_a_token():
    for host in ("0.0.0.0", "::", "robot.example"):
        with pytest.raises(ValueError, match="set a token"):
            asyncio.run(serving(Echo()).run(host, 0))
    with pytest.raises(ValueError, match="3 characters, expected at least 16"):
        serving(Echo(), token="abc")
    with pytest.raises(ValueError, match="max_batch is 6, expected a power of two"):
        serving(Echo(), max_batch=6)


def test_a_wrong_token_is_turned_away():
    with running_at(Echo(), token=TOKEN) as (_, port):
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": TOKEN}):
            with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
                Client(port, additional_headers=headers)
            assert caught.value.response.status_code == 401
        assert get(port, "/healthz") == "OK\n"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(port, "/metrics")
        assert "somaspeed_request_seconds_count 0" in get(port, "/metrics", TOKEN)


def test_web_pages_and_too_many_clients_are_turned_away():
    with running_at(Echo(), max_clients=1) as (_, port):
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            Client(port, origin="http://evil.example")
        assert caught.value.response.status_code == 403
        only = Client(port)
        with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
            Client(port)
        assert caught.value.response.status_code == 503
        assert only.infer(message())["actions"].shape == (3, 3)


def test_metrics_count_what_happened():
    with running_at(Echo(seconds=0.02)) as (server, port):
        client = Client(port)
        for _ in range(3):
            client.infer(message())
        client.infer(message(prompt=" "))
        text = get(port, "/metrics")
        assert 'somaspeed_request_seconds_bucket{le="0.01"} 0' in text
        assert 'somaspeed_request_seconds_bucket{le="+Inf"} 3' in text
        assert 'somaspeed_requests_total{outcome="answered"} 3' in text
        assert 'somaspeed_requests_total{outcome="refused"} 1' in text
        assert 'somaspeed_batch_size_bucket{le="1"} 3' in text
        assert "somaspeed_clients 1" in text
        assert "3 answered, 1 refused, 0 failed" in server.metrics.table()
